"""The registries, by which settings and the command line know names without importing what bears them."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

from prunekit.registry import Registry


def _by(place: str) -> Callable[[str, Any], Any]:
    """A function of a module that is imported once it is called."""
    module, _, name = place.rpartition(".")
    return lambda reference, found: getattr(import_module(module), name)(reference, found)


BUDGETS: Registry[Any] = Registry(
    "budget",
    "budgets",
    "prunekit.planning.budgets",
    "register_budget",
    _by("prunekit.planning.budgets.registry.accept"),
)
CRITERIA: Registry[Any] = Registry(
    "criterion",
    "criteria",
    "prunekit.criteria",
    "register_criterion",
    _by("prunekit.criteria.registry.accept"),
)
SECTIONS: Registry[Any] = Registry(
    "report section",
    "sections",
    "prunekit.report.sections",
    "register_section",
    _by("prunekit.report.sections.registry.accept"),
)
TASKS: Registry[Any] = Registry("task", "tasks", "prunekit.tasks", "register_task", _by("prunekit.tasks.named.accept"))
RUNTIMES: Registry[Any] = Registry(
    "runtime",
    "runtimes",
    "prunekit.measure.runtimes",
    "register_runtime",
    _by("prunekit.measure.runtimes.registry.accept"),
)
