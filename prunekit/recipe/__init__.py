"""Recipes: jobs as YAML, checked whole before anything runs."""
