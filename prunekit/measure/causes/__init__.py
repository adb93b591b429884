"""Causes that keep a pruned model from its ideal speed, one function each, with the experiment that shows it."""
