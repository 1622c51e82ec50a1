"""The fault tests call the command line in this process, too."""

from data_fixtures import call

__all__ = ["call"]
