"""Budgets of time, delivered: a plan is predicted, measured and made anew until what is measured is what was asked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np
from torch import nn

from prunekit.channels import ChannelMap
from prunekit.errors import PlanError
from prunekit.planning import PruneSettings
from prunekit.planning.budgets import as_given
from prunekit.planning.latency import LatencyTable
from prunekit.planning.settings import LATENCIES
from prunekit.planning.solve import least_left, plain
from prunekit.workflow.attempts import GOAL, NEAR, Attempt, Timing, distance, mean_excess, next_share
from prunekit.workflow.delivered import Delivered, Frozen, in_words_all
from prunekit.workflow.planned import Planned
from prunekit.workflow.profiling import in_blocks
from prunekit.workflow.pruning import feasible, plan_model
from prunekit.workflow.runs import Log
from prunekit.workflow.timed import LAST_REPEATS, REPEATS, rounds_of, timed

ATTEMPTS = 8
Planner = Callable[[PruneSettings, ChannelMap], Planned]


def freeze(
    model: nn.Module,
    channel_map: ChannelMap,
    sample_shape: Sequence[int],
    settings: PruneSettings,
    table: LatencyTable,
    planner: Planner,
    *,
    log: Log,
) -> Frozen:
    """Plans for budgets of time: predicts, measures, and corrects the aim until what is measured fits.

    Args:
        model: dense; on the CPU.
        channel_map: of it, traced.
        sample_shape: of one input without the batch.
        settings: budgets, of which at least one is of time, and the target.
        table: of the target, or of the runtime that stands in for it.
        planner: makes a plan for settings from a channel map, and tries it.
        log: gets a line for each attempt.

    Raises:
        PlanError: the budgets cannot be met; with the best that can be, measured.
        RunError: the target cannot run the model.
    """
    attempts, made = _searched(model, channel_map, sample_shape, settings, table, planner, log)
    best = min(range(len(attempts)), key=lambda index: distance(mean_excess(attempts, attempts[index].plan)))
    log(f"latency: attempt {best + 1} is taken")
    planned = made[best]
    return Frozen(_as_asked(planned, settings), time_budgets(settings), tuple(attempts), _time_binds(planned))


def delivered(
    frozen: Frozen, model: nn.Module, compact: nn.Module, sample_shape: Sequence[int], settings: PruneSettings, log: Log
) -> Delivered:
    """Measures the model that is handed over, compacted by a frozen plan, beside the dense one in a fresh process.

    Raises:
        RunError: the target cannot run it.
    """
    first = frozen.attempts[0].timing
    rounds = rounds_of(LAST_REPEATS, first.ms * first.speedup)
    found = Delivered(frozen, timed(model, compact, sample_shape, settings, rounds))
    log(f"latency: measured last: {found.final}: {100 * found.excess:.1f} % of the time asked for")
    return found


def _searched(
    model: nn.Module,
    channel_map: ChannelMap,
    sample_shape: Sequence[int],
    settings: PruneSettings,
    table: LatencyTable,
    planner: Planner,
    log: Log,
) -> tuple[list[Attempt], list[Planned]]:
    """Attempts, and the plan of each: until one is near the goal when it is measured twice, or none is left to try."""
    asked = time_budgets(settings)
    narrowest = _least_share(channel_map, settings, table, asked)
    widest = _whole_share(table.at(channel_map), asked)
    attempts: list[Attempt] = []
    made: list[Planned] = []
    share, again = max(1.0, narrowest), False
    while len(attempts) < ATTEMPTS:
        planned = made[-1] if again else planner(aiming(settings, share), channel_map)
        channel_map = planned.plan.channel_map  # the trial's locks hold for the next attempt as well
        plan = _number(planned, made)
        if sum(one.plan == plan for one in attempts) > 1:
            break  # no other plan lies nearer
        timing = timed(model, planned.compact, sample_shape, settings, rounds_of(REPEATS, table.dense_ms))
        attempts.append(_attempt(planned, plan, table, share, timing, asked))
        made.append(planned)
        log(f"latency: attempt {len(attempts)}: {attempts[-1]}")
        excess = mean_excess(attempts, plan)
        near = abs(excess - GOAL) <= NEAR
        if (near and again) or (excess < GOAL and not _time_binds(planned)):
            break
        if excess > 1 and share <= narrowest:
            raise PlanError(_out_of_reach(asked, timing))
        share, again = (share, True) if near else (min(max(next_share(attempts), narrowest), widest), False)
    return attempts, made


def _number(planned: Planned, made: Sequence[Planned]) -> int:
    """Of a plan among those that were made: that of the first which keeps the same."""
    same = (index for index, other in enumerate(made) if np.array_equal(other.plan.keep, planned.plan.keep))
    return next(same, len(made))


def time_budgets(settings: PruneSettings) -> dict[str, float]:
    """The budgets of time that are given."""
    given = {name: getattr(settings.budget, name) for name in LATENCIES}
    return {name: value for name, value in given.items() if value is not None}


def require_reachable(
    model: nn.Module,
    example_inputs: tuple[Any, ...],
    channel_map: ChannelMap,
    settings: PruneSettings,
    table: LatencyTable,
) -> None:
    """Refuses budgets that cannot be met; where that is predicted for budgets of time, the narrowest plan is measured.

    Args:
        model: dense, with or without weights: time does not depend on them.
        example_inputs: one tensor, (1, ...).

    Raises:
        PlanError: they cannot be met; with the best that can be.
    """
    asked = time_budgets(settings)
    narrowest = _least_share(channel_map, settings, table, asked)
    if narrowest <= 1:
        feasible(channel_map, in_blocks(settings), table)
        return
    by_norm = replace(aiming(settings, narrowest), criterion="l2", scope="global")
    planned = plan_model(model, example_inputs, by_norm, channel_map=channel_map, latency=table)
    rounds = rounds_of(REPEATS, table.dense_ms)
    timing = timed(model, planned.compact, tuple(example_inputs[0].shape[1:]), settings, rounds)
    if timing.excess(asked) > 1:
        raise PlanError(_out_of_reach(asked, timing))


def aiming(settings: PruneSettings, share: float) -> PruneSettings:
    """Settings in blocks whose budgets of time are multiplied: plans take that share of the time, as predicted."""
    budget = settings.budget
    if budget.latency_ms is not None:
        budget = replace(budget, latency_ms=budget.latency_ms * share)
    if budget.speedup is not None:
        budget = replace(budget, speedup=budget.speedup / share)
    return replace(in_blocks(settings), budget=budget)


def _least_share(
    channel_map: ChannelMap, settings: PruneSettings, table: LatencyTable, asked: dict[str, float]
) -> float:
    """The least time that any plan is predicted to take, over what was asked for."""
    least = least_left(channel_map, in_blocks(settings), table)
    shares = [least[name] / as_given(name, value) for name, value in asked.items()]
    return max(shares) * (1 + 1e-9)


def _whole_share(dense_ms: float, asked: dict[str, float]) -> float:
    """Just less than the dense model is predicted to take, over what was asked for."""
    shares = (dense_ms / value if name == "latency_ms" else value for name, value in asked.items())
    return min(shares) * (1 - 1e-6)


def _attempt(
    planned: Planned, plan: int, table: LatencyTable, share: float, timing: Timing, asked: dict[str, float]
) -> Attempt:
    chart, keep = planned.plan.channel_map, planned.plan.keep
    return Attempt(plan, share, table.at(chart, keep), chart.macs(keep) / chart.macs(), timing.excess(asked), timing)


def _time_binds(planned: Planned) -> bool:
    return planned.plan.provenance["binding"] in LATENCIES


def _as_asked(planned: Planned, settings: PruneSettings) -> Planned:
    """The plan with settings and budgets of time as they were given, not as they were aimed at; left is predicted."""
    given = time_budgets(settings)
    budgets = {
        name: found | {"asked": given.get(name, found["asked"])}
        for name, found in planned.plan.provenance.get("budgets", {}).items()
    }
    provenance = {**planned.plan.provenance, "prune": plain(asdict(settings)), "budgets": budgets}
    return replace(planned, plan=replace(planned.plan, provenance=provenance))


def _out_of_reach(asked: dict[str, float], timing: Timing) -> str:
    return (
        f"budget {in_words_all(asked)}: the narrowest plan takes {timing.ms:.4g} ms, {timing.speedup:.3g}x the dense "
        "model's speed (measured), and that is the best that can be had; raise the budget, or relax exclude, ratios, "
        "min_channels and round_to"
    )
