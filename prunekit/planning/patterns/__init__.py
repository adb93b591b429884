"""Patterns of zeros among single weights: where they may lie, how many each layer gets, and masks by scores."""
