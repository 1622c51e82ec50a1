"""Reads run folders, and nothing else: rows of results, tables in several formats."""
