"""Sizes that a model's own Python fixes: where they stand, and how they are rewritten."""
