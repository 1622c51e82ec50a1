"""Tests here may call the command line in this process."""

from data_fixtures import call

__all__ = ["call"]
