"""The data sets that fedheal knows by name, one module each."""
