"""Every test here has its own cache, and calls the command line in this process."""

from data_fixtures import cache_folder, call

__all__ = ["cache_folder", "call"]
