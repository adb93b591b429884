"""Sizes that a model's own Python states: which labels they count, and how they are set."""
