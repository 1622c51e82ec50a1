"""Stages that give weights: how much each client counts."""
