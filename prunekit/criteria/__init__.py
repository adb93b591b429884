"""Criteria: how important a channel is."""

from prunekit.catalog import CRITERIA, CriterionFacts, Need
from prunekit.criteria import (  # registers the criteria
    activation,
    chance,
    consumed,
    distance,
    elimination,
    magnitude,
    norms,
    taylor,
)
from prunekit.criteria.registry import Criterion, Evidence, criterion, criterion_names, get_criterion
from prunekit.criteria.scoring import normalize, score

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
    "elimination",
    "get_criterion",
    "magnitude",
    "normalize",
    "norms",
    "score",
    "taylor",
]
