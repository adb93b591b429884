"""One small rule for each family of operators: how labels pass through it."""

from importlib import import_module
from pkgutil import iter_modules

from prunekit.channels.rules.compute import COUNTED
from prunekit.channels.rules.convolution import whole_groups
from prunekit.channels.rules.pointwise import MADE
from prunekit.channels.rules.rule import RULES, Call, Rule, register_rule, rule_of

for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")

__all__ = [
    "COUNTED",
    "MADE",
    "RULES",
    "Call",
    "Rule",
    "register_rule",
    "rule_of",
    "whole_groups",
]
