"""Stages that are a whole method of their own."""
