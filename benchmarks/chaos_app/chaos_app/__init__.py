"""Four small sites that fail on demand."""
