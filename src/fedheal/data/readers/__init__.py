"""Readers of the file formats in which image data sets are distributed."""
