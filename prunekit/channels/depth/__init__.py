"""Branches of a model that may go as a whole, and how a traced run shows them."""
