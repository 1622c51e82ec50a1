"""Local training as a sum of terms, one file a term."""
