"""A plan that passed its trial, and keeps to its budget of memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

from torch import nn

from prunekit.channels import ChannelMap
from prunekit.errors import PlanError
from prunekit.measure.size import count_memory
from prunekit.planning import Plan, PruneSettings
from prunekit.planning.select import Scores
from prunekit.planning.solve import plain
from prunekit.settings.budgets import facts_of

MEMORY = facts_of("memory_mb")
ATTEMPTS = 6
NEAR = 0.005
"""Of the budget: to take so much less is no reason for another plan."""


@dataclass(frozen=True, eq=False)
class Planned:
    """A plan that passed its trial.

    Attributes:
        plan: what stays.
        scores: importance of every label, float (n_labels,).
        compact: the model as planned, without any fine-tuning.
        max_relative_difference: largest difference of any operator between masked and compact model (float64).
        locked_by_trial: locks that the trial added, as text.
        unseen: what methods that no example runs may need, and which MACs no budget counts, in sentences.
    """

    plan: Plan
    scores: Scores
    compact: nn.Module
    max_relative_difference: float
    locked_by_trial: tuple[str, ...]
    unseen: tuple[str, ...] = ()


def within_memory(
    planner: Callable[[PruneSettings, ChannelMap], Planned],
    model: nn.Module,
    example_inputs: tuple[Any, ...],
    settings: PruneSettings,
    channel_map: ChannelMap,
) -> Planned:
    """A plan whose compact model, counted by itself, takes no more memory than the budget, where there is one.

    What is predicted is what is counted, unless the compact model runs other operators than the dense one: attention
    of its original class where that is whole, with one head, which needs no copies, or without a fused kernel where
    queries and values differ in width. The aim is corrected then.

    Args:
        planner: makes a plan for settings from a channel map, and tries it.
        model: the dense one.

    Raises:
        PlanError: the budgets cannot be met.
    """
    asked = settings.budget.memory_mb
    if asked is None:
        return planner(settings, channel_map)
    aim, best, most = asked, None, 0.0
    low, high = 0.0, float("inf")  # aims that led within the budget, and that did not
    for _ in range(ATTEMPTS):
        try:
            planned = planner(replace(settings, budget=replace(settings.budget, memory_mb=aim)), channel_map)
        except PlanError:
            if aim == asked:
                raise
            break
        counted = _megabytes(planned.compact, example_inputs, settings)
        if most < counted <= asked:
            best, most = planned, counted
        binds = planned.plan.provenance["binding"] == "memory_mb"
        if counted <= asked and not (binds and counted < (1 - NEAR) * asked):
            break
        low, high = (max(low, aim), high) if counted <= asked else (low, min(high, aim))
        aim *= asked / counted * (1 - 1e-6)
        aim = aim if low < aim < high else (low + high) / 2
        channel_map = planned.plan.channel_map  # the trial's locks hold for the next attempt as well
    if best is None:
        raise PlanError(
            f"budget memory_mb: at most {MEMORY.in_words(asked)} was asked for, but the narrowest plan that was "
            f"made for it takes {MEMORY.in_words(counted)}; raise the budget"
        )
    found = {"asked": asked, "left": most, "dense": _megabytes(model, example_inputs, settings)}
    return _as_asked(best, settings, found)


def _megabytes(model: nn.Module, example_inputs: tuple[Any, ...], settings: PruneSettings) -> float:
    return count_memory(model, example_inputs, settings.target.batch, settings.target.dtype) / MEMORY.per_unit


def _as_asked(planned: Planned, settings: PruneSettings, memory: dict[str, float]) -> Planned:
    """With settings as they were given, not as they were aimed at, and memory as it is counted."""
    origin = planned.plan.provenance
    provenance = {**origin, "prune": plain(asdict(settings)), "budgets": {**origin["budgets"], "memory_mb": memory}}
    return replace(planned, plan=replace(planned.plan, provenance=provenance))
