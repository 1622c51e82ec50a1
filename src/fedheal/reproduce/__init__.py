"""The paper's results as recipes: which experiments to run, and what the paper printed for each."""

from fedheal.reproduce.plans import Options, Recipe, RecipeRow, make_suffix, plan_recipe
from fedheal.reproduce.recipes import RECIPES

__all__ = ["RECIPES", "Options", "Recipe", "RecipeRow", "make_suffix", "plan_recipe"]
