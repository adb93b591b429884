"""Recipes: a job as YAML, checked whole before anything runs."""

from prunekit.recipe.loading import load, own_overrides, with_overrides
from prunekit.recipe.overrides import Overrides, as_texts
from prunekit.settings.text import dump

__all__ = ["Overrides", "as_texts", "dump", "load", "own_overrides", "with_overrides"]
