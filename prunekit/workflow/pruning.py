"""Pruning as plain functions: trace, score, plan with its trial, compact. What the recipe and the API both call."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from torch import nn

from prunekit.calibration import CalibrationWarning, ChannelStats, TaylorTerms
from prunekit.calibration.patch_stats import PatchStats
from prunekit.channels import ChannelMap, trace
from prunekit.channels.belonging import require_model
from prunekit.channels.fusing import is_inside
from prunekit.channels.map import Keep
from prunekit.channels.trial import settle, with_unseen_sizes
from prunekit.context import paused_garbage_collection
from prunekit.criteria import get_criterion, normalize, score
from prunekit.criteria.elimination import outputs_reading
from prunekit.errors import UsageError
from prunekit.planning import Plan, PruneSettings, SensitivityCurve, cumulated, make_plan
from prunekit.planning.latency import LatencyTable
from prunekit.planning.select import Scores
from prunekit.settings.pruning import Scope
from prunekit.workflow.planned import Planned, within_memory
from prunekit.wrappers import require_values, unwrapped


def importance(
    model: nn.Module,
    channel_map: ChannelMap,
    settings: PruneSettings,
    stats: ChannelStats | None,
    gradients: TaylorTerms | None,
    seed: int,
    patches: PatchStats | None = None,
) -> Scores:
    """Scores of a criterion; but for scope `uniform` normalized within each group, unless comparable as they are."""
    scores = raw_importance(model, channel_map, settings, stats, gradients, seed, patches)
    return ranked(scores, channel_map, settings)


def ranked(scores: Scores, channel_map: ChannelMap, settings: PruneSettings) -> Scores:
    """Scores of a criterion as plans rank them: normalized within each group where they have to be."""
    as_it_is = settings.scope == "uniform" or get_criterion(settings.criterion).comparable
    return scores if as_it_is else normalize(scores, channel_map)


def raw_importance(
    model: nn.Module,
    channel_map: ChannelMap,
    settings: PruneSettings,
    stats: ChannelStats | None,
    gradients: TaylorTerms | None,
    seed: int,
    patches: PatchStats | None = None,
) -> Scores:
    """Scores of a criterion as it gives them."""
    with warnings.catch_warnings():  # the log of a job and `Pruned.notes` say it
        warnings.simplefilter("ignore", CalibrationWarning)
        return score(
            settings.criterion, model, channel_map, stats=stats, gradients=gradients, patches=patches, seed=seed
        )


def plan_model(
    model: nn.Module,
    example_inputs: tuple[Any, ...],
    settings: PruneSettings,
    *,
    stats: ChannelStats | None = None,
    gradients: TaylorTerms | None = None,
    patches: PatchStats | None = None,
    seed: int = 0,
    channel_map: ChannelMap | None = None,
    more_examples: Sequence[tuple[Any, ...]] = (),
    latency: LatencyTable | None = None,
) -> Planned:
    """Traces a model, scores its channels, plans for a budget, and tries the plan until masked == compact.

    Args:
        model: the dense model; not changed.
        example_inputs: an example, see `prunekit.inputs.example`.
        settings: criterion, scope, budget and limits.
        stats: channel statistics, for criteria that need them.
        gradients: Taylor terms, for criteria that need them.
        patches: Gram matrices of patches, for criteria that need them.
        seed: for the random criterion.
        channel_map: of this model, when it has been traced already, on the same examples in the same order.
        more_examples: further inputs, for branches that the first does not take: what only those use is known to
            nobody else, and may fail in the compact model.
        latency: of the target, for budgets of time: what they leave is predicted, not measured.

    Memory is counted on the compact model itself; where that is not what was predicted, the plan is made again.

    Raises:
        PlanError: the budget cannot be met, or nothing would be removed; or the channel map is that of another model.
        UsageError: the channel map was traced on more examples.
    """
    model = unwrapped(model)
    require_values(model, "plan_model")
    examples = [example_inputs, *more_examples]
    if channel_map is not None:
        require_model(channel_map, model, "the channel map")
    with paused_garbage_collection():
        first = channel_map or trace(model, *examples)
    traced = 1 + max(run.example for run in first.traced.trace.runs)
    if traced > len(examples):
        raise UsageError(f"channel_map: traced on {traced} examples, got {len(examples)}; give the others too")
    known = set(first.locks)

    def planner(wanted: PruneSettings, chart: ChannelMap) -> Planned:
        made: list[tuple[Plan, Scores]] = []

        def choose(candidate: ChannelMap) -> Keep:
            scores = importance(model, candidate, settings, stats, gradients, seed, patches)
            made.append((make_plan(candidate, scores, wanted, seed=seed, latency=latency), scores))
            return made[-1][0].keep

        with paused_garbage_collection():
            settled = settle(model, chart, choose, examples, plain=settings.plain_classes)
            settled, unseen = with_unseen_sizes(model, settled, examples)
        added = tuple(
            f"{lock.module} ({lock.operator}): {lock.reason}" for lock in settled.channel_map.locks if lock not in known
        )
        plan, scores = made[-1]
        plan = replace(plan, channel_map=settled.channel_map)  # which also knows what the last trial found out
        return Planned(plan, scores, settled.compact, settled.difference, added, unseen + _uncounted(first))

    return within_memory(planner, model, example_inputs, settings, first)


def _uncounted(channel_map: ChannelMap) -> tuple[str, ...]:
    """Which multiply-accumulates of the pass in eval mode no budget counts, in a sentence."""
    trace = channel_map.traced.trace
    parts = [part for part in trace.fused_away if any(is_inside(term.module, [part]) for term in trace.flow.macs)]
    if not parts:
        return ()
    return (f"MACs do not count {', '.join(parts)}: the model's own fuse() takes them out of the deployed model",)


def plan_curves(planned: Planned, patches: PatchStats) -> dict[str, SensitivityCurve]:
    """The curves that a plan by elimination was made from, by a group's name: the lower convex hulls of the errors.

    Args:
        patches: that it was made with.
    """
    chart = planned.plan.channel_map
    groups = {group.name: group for group in chart.groups}
    return {
        name: replace(curve, outputs=outputs_reading(groups[name], chart, patches))
        for name, curve in cumulated(chart, planned.scores).items()
    }


def feasible(channel_map: ChannelMap, settings: PruneSettings, latency: LatencyTable | None = None) -> Plan:
    """A plan from equal scores: shows, before anything is trained, whether the budgets can be met.

    Args:
        latency: of the target, for budgets of time, which are predicted.

    Raises:
        PlanError: they cannot.
    """
    scope: Scope = "uniform" if settings.scope == "uniform" else "global"  # as wide, and quicker
    return make_plan(channel_map, np.ones(channel_map.n_labels), replace(settings, scope=scope), latency=latency)
