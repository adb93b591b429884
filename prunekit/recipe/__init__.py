"""Recipes: a job as YAML, checked whole before anything runs."""

from prunekit.recipe.loading import dump, load

__all__ = ["dump", "load"]
