"""Recipes: a job as YAML, checked whole before anything runs."""

from prunekit.recipe.loading import load
from prunekit.settings.text import dump

__all__ = ["dump", "load"]
