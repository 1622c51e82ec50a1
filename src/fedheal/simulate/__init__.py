"""One run: its description, its rounds, its folder."""
