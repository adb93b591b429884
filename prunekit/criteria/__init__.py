"""Criteria: how important a channel is."""

from prunekit.catalogue import CRITERIA, CriterionFacts, Need
from prunekit.criteria import activation, chance, consumed, distance, magnitude, norms, taylor  # registers the criteria
from prunekit.criteria.registry import Criterion, Evidence, criterion, criterion_names, get_criterion
from prunekit.criteria.scoring import normalise, score

__all__ = [
    "CRITERIA",
    "Criterion",
    "CriterionFacts",
    "Evidence",
    "Need",
    "activation",
    "chance",
    "consumed",
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
