"""What the server of any federation shares: checks of replies, a round's cohort, its summary, the run folder."""
