"""Every test here has its own cache."""

from data_fixtures import cache_folder, call

__all__ = ["cache_folder", "call"]
