"""What every package shares; it imports nothing else of fedheal."""
