"""The data sets that fedheal knows by name."""
