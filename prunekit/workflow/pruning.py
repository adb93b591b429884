"""Pruning as plain functions: trace, score, plan with its trial, compact. What the recipe and the API both call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from torch import nn

from prunekit.calibration import ChannelStats, TaylorTerms
from prunekit.channels import ChannelMap, trace
from prunekit.channels.map import Keep
from prunekit.channels.trial import settle
from prunekit.context import paused_garbage_collection
from prunekit.criteria import get_criterion, normalise, score
from prunekit.errors import UsageError
from prunekit.planning import BudgetSettings, Plan, PruneSettings, make_plan
from prunekit.planning.select import Scores
from prunekit.planning.settings import Criterion, Scope


@dataclass(frozen=True, eq=False)
class Planned:
    """A plan that passed its trial.

    Attributes:
        plan: what stays.
        scores: importance of every label, float (n_labels,).
        compact: the model as planned, without any fine-tuning.
        max_relative_difference: largest difference of any operator between masked and compact model (float64).
        locked_by_trial: locks that the trial added, as text.
    """

    plan: Plan
    scores: Scores
    compact: nn.Module
    max_relative_difference: float
    locked_by_trial: tuple[str, ...]


def importance(
    model: nn.Module,
    channel_map: ChannelMap,
    settings: PruneSettings,
    stats: ChannelStats | None,
    gradients: TaylorTerms | None,
    seed: int,
) -> Scores:
    """Scores of a criterion; for scope `global` normalised within each group, unless comparable as they are."""
    scores = score(settings.criterion, model, channel_map, stats=stats, gradients=gradients, seed=seed)
    as_it_is = settings.scope == "uniform" or get_criterion(settings.criterion).comparable
    return scores if as_it_is else normalise(scores, channel_map)


def plan_model(
    model: nn.Module,
    example_inputs: tuple[Any, ...],
    settings: PruneSettings,
    *,
    stats: ChannelStats | None = None,
    gradients: TaylorTerms | None = None,
    seed: int = 0,
    channel_map: ChannelMap | None = None,
    more_examples: Sequence[tuple[Any, ...]] = (),
) -> Planned:
    """Traces a model, scores its channels, plans for a budget, and tries the plan until masked == compact.

    Args:
        model: the dense model; not changed.
        example_inputs: positional arguments of `forward`.
        settings: criterion, scope, budget and limits.
        stats: channel statistics, for criteria that need them.
        gradients: Taylor terms, for criteria that need them.
        seed: for the random criterion.
        channel_map: of this model, when it has been traced already, on the same examples in the same order.
        more_examples: further inputs, for branches that the first does not take: what only those use is known to
            nobody else, and may fail in the compact model.

    Raises:
        PlanError: the budget cannot be met, or nothing would be removed.
        UsageError: the channel map was traced on more examples.
    """
    examples = [example_inputs, *more_examples]
    with paused_garbage_collection():
        first = channel_map or trace(model, *examples)
    traced = 1 + max(run.example for run in first.traced.trace.runs)
    if traced > len(examples):
        raise UsageError(f"channel_map: traced on {traced} examples, got {len(examples)}; give the others too")
    made: list[tuple[Plan, Scores]] = []

    def choose(candidate: ChannelMap) -> Keep:
        scores = importance(model, candidate, settings, stats, gradients, seed)
        made.append((make_plan(candidate, scores, settings, seed=seed), scores))
        return made[-1][0].keep

    with paused_garbage_collection():
        settled = settle(model, first, choose, examples)
    known = set(first.locks)
    added = tuple(
        f"{lock.module} ({lock.operator}): {lock.reason}" for lock in settled.channel_map.locks if lock not in known
    )
    plan, scores = made[-1]
    plan = replace(plan, channel_map=settled.channel_map)  # which also knows what the last trial found out
    return Planned(plan, scores, settled.compact, settled.difference, added)


def feasible(channel_map: ChannelMap, settings: PruneSettings) -> Plan:
    """A plan from equal scores: shows, before anything is trained, whether the budget can be met.

    Raises:
        PlanError: it cannot.
    """
    return make_plan(channel_map, np.ones(channel_map.n_labels), settings)


@dataclass(frozen=True, eq=False)
class Pruned:
    """What `prune` returns.

    Attributes:
        model: the compact model, a new one of the same class.
        plan: what was kept, and why.
        max_relative_difference: between the masked and the compact model, over all operators, in float64.
    """

    model: nn.Module
    plan: Plan
    max_relative_difference: float


def prune(
    model: nn.Module,
    example_inputs: tuple[Any, ...],
    *,
    macs: float | None = None,
    channels: float | None = None,
    criterion: Criterion = "l2",
    scope: Scope = "uniform",
    round_to: int = 1,
    min_channels: int = 1,
    exclude: Sequence[str] = (),
    ratios: Mapping[str, float] | None = None,
    stats: ChannelStats | None = None,
    gradients: TaylorTerms | None = None,
    seed: int = 0,
    more_examples: Sequence[tuple[Any, ...]] = (),
) -> Pruned:
    """Prunes a model in one call: trace, score, plan, trial, compact.

    Args:
        model: any module that runs on `example_inputs`; not changed.
        example_inputs: positional arguments of `forward`, such as `(torch.randn(1, 3, 224, 224),)`.
        macs: share of the multiply-accumulates that may be left, above 0 and below 1.
        channels: share of the channels that may be left; exactly one of `macs` and `channels` is given.
        criterion: as `prunekit list criteria` shows them, each with what it needs.
        scope: `uniform`, the same share of every group; or `global`, ranked over all of them.
        round_to: channel counts become multiples of this where they can.
        min_channels: the fewest channels that any group keeps.
        exclude: globs over module paths whose output channels stay.
        ratios: glob over module paths -> share of their output channels to keep.
        stats: from `prunekit.calibrate`.
        gradients: from `prunekit.collect_gradients`.
        seed: of the random criterion.
        more_examples: further inputs, for branches of the model that the first does not take.

    Raises:
        PlanError: the budget cannot be met or removes nothing, or a glob matches no module.
        UsageError: an argument is out of range.
    """
    settings = PruneSettings(
        budget=BudgetSettings(channels=channels, macs=macs),
        criterion=criterion,
        scope=scope,
        round_to=round_to,
        min_channels=min_channels,
        exclude=tuple(exclude),
        ratios=dict(ratios or {}),
    )
    planned = plan_model(
        model, example_inputs, settings, stats=stats, gradients=gradients, seed=seed, more_examples=more_examples
    )
    return Pruned(planned.compact, planned.plan, planned.max_relative_difference)
