"""From numbers to what may be concluded."""
