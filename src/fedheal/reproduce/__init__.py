"""The paper's results as recipes: functions that say which experiments to run, and what the paper printed for each."""

from fedheal.reproduce.plans import Entry, Options, Recipe, planned, suffix
from fedheal.reproduce.recipes import RECIPES

__all__ = ["RECIPES", "Entry", "Options", "Recipe", "planned", "suffix"]
