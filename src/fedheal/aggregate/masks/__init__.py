"""Stages that give a mask: which entries of an update count."""
