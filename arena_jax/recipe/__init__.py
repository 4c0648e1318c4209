"""Recipes: what to train, as data. Imports no jax, so that listing and validating are instant."""

from arena_jax.recipe.load import RecipeInfo as RecipeInfo
from arena_jax.recipe.load import find_recipes as find_recipes
from arena_jax.recipe.load import load_recipe as load_recipe
from arena_jax.recipe.load import recipe_from_mapping as recipe_from_mapping
from arena_jax.recipe.load import recipe_text as recipe_text
from arena_jax.recipe.model_config import model_config as model_config
from arena_jax.recipe.schema import Recipe as Recipe
