"""Rules by operator family; importing this package fills the table."""

from prunekit.channels.rules import compute, lookup, made, norms, parts, pointwise, shape, vision
from prunekit.channels.rules.compute import COUNTED, whole_groups
from prunekit.channels.rules.made import MADE
from prunekit.channels.rules.registry import RULES, Call, Rule, rule

__all__ = [
    "COUNTED",
    "MADE",
    "RULES",
    "Call",
    "Rule",
    "compute",
    "lookup",
    "made",
    "norms",
    "parts",
    "pointwise",
    "rule",
    "shape",
    "vision",
    "whole_groups",
]
