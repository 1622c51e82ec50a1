"""The command line."""

from fedheal.cli.app import app, main

__all__ = ["app", "main"]
