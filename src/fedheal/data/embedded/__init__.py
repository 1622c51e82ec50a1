"""Four domains of digits that need no download."""
