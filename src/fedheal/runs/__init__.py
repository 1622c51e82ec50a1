"""The files that a run leaves, and the only code that knows their format."""
