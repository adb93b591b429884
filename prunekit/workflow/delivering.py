"""Budgets of time, delivered: a plan is predicted, measured and made anew until what is measured is what was asked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np
from torch import nn

from prunekit.channels import ChannelMap
from prunekit.deploy.transform import transform_of
from prunekit.errors import NotMeasuredError, PlanError, UsageError
from prunekit.measure.effort import current_effort
from prunekit.planning import PruneSettings
from prunekit.planning.reach import in_the_way
from prunekit.planning.solve import plain
from prunekit.settings.budgets import facts_of
from prunekit.workflow.attempts import GOAL, NEAR, Attempt, Timing, distance, mean_excess, next_share
from prunekit.workflow.delivered import Delivered, Frozen, in_words_all
from prunekit.workflow.goal import LatencyGoal, goal_for
from prunekit.workflow.planned import Planned
from prunekit.workflow.prepared import Prepared
from prunekit.workflow.profiling import in_blocks
from prunekit.workflow.pruning import feasible, plan_model
from prunekit.workflow.runs import Log
from prunekit.workflow.timed import rounds_of, timed

DOUBT = 0.05
"""How wrong a latency table may be: what is predicted to be possible by less is measured before it is promised."""
Planner = Callable[[PruneSettings, ChannelMap], Planned]


def freeze(goal: LatencyGoal, planner: Planner, *, log: Log) -> Frozen:
    """Plans for budgets of time: predicts, measures, and corrects the aim until what is measured fits.

    Args:
        planner: makes a plan for settings from a channel map, and tries it.
        log: gets a line for each attempt.

    Raises:
        PlanError: the budgets cannot be met; with the best that can be, measured.
        RunError: the target cannot run the model.
    """
    attempts, made = _searched(goal, planner, log)
    best = min(range(len(attempts)), key=lambda index: distance(mean_excess(attempts, attempts[index].plan)))
    log(f"latency: attempt {best + 1} is taken")
    return Frozen(goal, as_asked(made[best], goal), tuple(attempts), _time_binds(made[best]))


def delivered(frozen: Frozen, handed_over: nn.Module, *, log: Log) -> Delivered:
    """Measures the model that is handed over beside the dense one in fresh processes.

    Args:
        handed_over: compacted by the frozen plan, and transformed as the goal says.

    Raises:
        RunError: the target cannot run it.
    """
    first, goal = frozen.attempts[0].timing, frozen.goal
    rounds = rounds_of(first.ms * first.speedup)
    final = timed(goal.dense, handed_over, goal.inputs, goal.settings, rounds, current_effort().last_processes)
    found = Delivered(frozen, final)
    log(f"latency: measured last: {found.final}: {100 * found.excess:.1f} % of the time asked for")
    return found


def _searched(goal: LatencyGoal, planner: Planner, log: Log) -> tuple[list[Attempt], list[Planned]]:
    """Attempts, and the plan of each: until one is near the goal when it is measured twice, or none is left to try."""
    channel_map, narrowest = goal.channel_map, goal.least_share
    widest = _whole_share(goal)
    attempts: list[Attempt] = []
    made: list[Planned] = []
    share, again, most = _first_share(goal), False, current_effort().attempts
    while len(attempts) < most:
        planned = made[-1] if again else planner(aiming(goal, share), channel_map)
        channel_map = planned.plan.channel_map  # the trial's locks hold for the next attempt as well
        plan = _number(planned, made)
        if sum(one.plan == plan for one in attempts) > 1:
            break  # no other plan lies nearer
        attempts.append(_attempt(planned, plan, share, goal))
        made.append(planned)
        log(f"latency: attempt {len(attempts)}: {attempts[-1]}")
        excess = mean_excess(attempts, plan)
        near = abs(excess - GOAL) <= NEAR
        if (near and again) or (excess < GOAL and not _time_binds(planned)):
            break
        if excess > 1 and share <= narrowest:
            raise PlanError(_out_of_reach(goal, attempts[-1].timing))
        share, again = (share, True) if near else (min(max(next_share(attempts), narrowest), widest), False)
    return attempts, made


def _number(planned: Planned, made: Sequence[Planned]) -> int:
    """Of a plan among those that were made: that of the first which keeps the same."""
    same = (index for index, other in enumerate(made) if np.array_equal(other.plan.keep, planned.plan.keep))
    return next(same, len(made))


def reachable_goal(prepared: Prepared, channel_map: ChannelMap, *, log: Log) -> LatencyGoal | None:
    """What a job asks of time, once its budgets are known to be within reach; None where none is one of time.

    Args:
        channel_map: of the job's model.
        log: gets a line for each network of the profile.

    Raises:
        UsageError: as for `goal_for`.
        PlanError: a budget cannot be met; with the best that can be.
    """
    example, prune = prepared.example_inputs, prepared.job.prune
    transform = transform_of(prepared.model, example, prepared.job.deploy)
    goal = goal_for(prepared.model, example, channel_map, prune, transform=transform, log=log)
    if goal is None:
        feasible(channel_map, prune)
    else:
        require_reachable(goal, example)
    return goal


def predicted_goal(prepared: Prepared, channel_map: ChannelMap, *, log: Log) -> LatencyGoal | None:
    """What a job asks of time by what was measured before; None where no profile was. Measures nothing, and refuses
    nothing: what is out of reach is said to be so by prediction.

    Args:
        channel_map: of the job's model.
        log: is told which.

    Raises:
        UsageError, PlanError: as for `goal_for`.
    """
    example, prune = prepared.example_inputs, prepared.job.prune
    transform = transform_of(prepared.model, example, prepared.job.deploy)
    try:
        goal = goal_for(prepared.model, example, channel_map, prune, transform=transform, measure=False, log=log)
    except NotMeasuredError as error:
        log(f"profile: {error}")
        return None
    if goal is not None and goal.least_share > 1 - DOUBT:
        fastest = f"the fastest plan is predicted to take {goal.least_share:.2f} of the time asked for"
        log(f"latency: budget {in_words_all(goal.asked)}: {fastest}; a run measures whether it can be had")
    return goal


def by_macs(settings: PruneSettings) -> PruneSettings:
    """Settings with a budget of multiply-accumulates in the place of a speedup: as if time fell as they do.

    Raises:
        UsageError: milliseconds are asked for, of which they say nothing.
    """
    budget = settings.budget
    for name, value in budget.given.items():
        facts = facts_of(name)
        if facts.measured and not facts.share:
            raise UsageError(
                f"budget {name} {value:g}: without a measurement nothing says what this model takes; run `prunekit "
                "profile RECIPE` first (minutes), or leave out --no-measure"
            )
        if facts.measured:
            macs = min(facts.as_cost(value), 1.0 if budget.macs is None else budget.macs)
            budget = budget.changed(macs=macs, **{name: None})
    return replace(in_blocks(settings), budget=budget)


def require_reachable(goal: LatencyGoal, example_inputs: tuple[Any, ...]) -> None:
    """Refuses budgets that cannot be met; where that is predicted for budgets of time, or nearly, the fastest plan is
    measured.

    Args:
        example_inputs: an example, see `prunekit.inputs.example`.

    Raises:
        PlanError: they cannot be met; with the best that can be.
    """
    narrowest = goal.least_share
    if narrowest > 1 - DOUBT:
        by_norm = replace(aiming(goal, narrowest), criterion="l2", scope="global")
        planned = plan_model(goal.model, example_inputs, by_norm, channel_map=goal.channel_map, latency=goal.table)
        timing = _timed(goal, planned.compact)
        if timing.excess(goal.asked) > 1:
            raise PlanError(_out_of_reach(goal, timing))
    if narrowest <= 1:
        feasible(goal.channel_map, in_blocks(goal.settings), goal.table)


def _timed(goal: LatencyGoal, compact: nn.Module) -> Timing:
    rounds = rounds_of(goal.table.dense_ms)
    most = current_effort().most_processes
    return timed(goal.dense, goal.transform(compact), goal.inputs, goal.settings, rounds, most)


def first_aim(goal: LatencyGoal) -> PruneSettings:
    """What is planned for before anything was measured: what is asked for, or the fastest that is predicted."""
    return aiming(goal, _first_share(goal))


def aiming(goal: LatencyGoal, share: float) -> PruneSettings:
    """The goal's settings in blocks, with multiplied budgets of time: plans take that share of the time, as predicted.

    Raises:
        PlanError: no plan is predicted to be faster than the dense model, so that there is nothing to aim at.
    """
    settings = in_blocks(goal.settings)
    aims = {name: facts_of(name).loosened(value, share) for name, value in goal.asked.items()}
    if any(facts_of(name).problem(aim) is not None for name, aim in aims.items()):
        feasible(goal.channel_map, settings, goal.table)
    return replace(settings, budget=settings.budget.changed(**aims))


def _first_share(goal: LatencyGoal) -> float:
    return max(1.0, goal.least_share)


def _whole_share(goal: LatencyGoal) -> float:
    """Just less than the dense model is predicted to take, over what was asked for."""
    dense_ms = goal.table.at(goal.channel_map)
    shares = (facts_of(name).excess(value, dense_ms, 1.0) for name, value in goal.asked.items())
    return min(shares) * (1 - 1e-6)


def _attempt(planned: Planned, plan: int, share: float, goal: LatencyGoal) -> Attempt:
    """Measures a plan."""
    chart, keep, timing = planned.plan.channel_map, planned.plan.keep, _timed(goal, planned.compact)
    left = chart.macs(keep) / chart.macs()
    predicted_ms = float(goal.table.at(chart, keep))  # of numpy, which checkpoints do not take
    return Attempt(plan, float(share), predicted_ms, float(left), float(timing.excess(goal.asked)), timing)


def _time_binds(planned: Planned) -> bool:
    return facts_of(planned.plan.provenance["binding"]).measured


def as_asked(planned: Planned, goal: LatencyGoal) -> Planned:
    """The plan with settings and budgets of time as they were given, not as they were aimed at; left is predicted."""
    budgets = {
        name: found | {"asked": goal.asked.get(name, found["asked"])}
        for name, found in planned.plan.provenance.get("budgets", {}).items()
    }
    provenance = {**planned.plan.provenance, "prune": plain(asdict(goal.settings)), "budgets": budgets}
    return replace(planned, plan=replace(planned.plan, provenance=provenance))


def _out_of_reach(goal: LatencyGoal, timing: Timing) -> str:
    obstacles = in_the_way(goal.channel_map, in_blocks(goal.settings), goal.table)
    return (
        f"budget {in_words_all(goal.asked)}: the plan predicted to be fastest takes {timing.ms:.4g} ms, "
        f"{timing.speedup:.3g}x the dense model's speed (measured), and no other is predicted to be faster{obstacles}; "
        "raise the budget, or relax ignore, ratios, min_channels, round_to and target.block"
    )
