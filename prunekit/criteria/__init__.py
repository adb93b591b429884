"""Criteria: how important a channel is."""

from prunekit.criteria import activation, chance, distance, magnitude, norms, taylor  # registers the criteria
from prunekit.criteria.registry import Criterion, Evidence, criterion, criterion_names, get_criterion
from prunekit.criteria.scoring import normalise, score

__all__ = [
    "Criterion",
    "Evidence",
    "activation",
    "chance",
    "criterion",
    "criterion_names",
    "distance",
    "get_criterion",
    "magnitude",
    "normalise",
    "norms",
    "score",
    "taylor",
]
