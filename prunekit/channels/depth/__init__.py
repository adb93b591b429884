"""Branches of a model that may go as a whole: how they are found, and what is left in their place."""
