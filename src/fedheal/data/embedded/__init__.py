"""The embedded data set: four domains of digits that need no download."""
