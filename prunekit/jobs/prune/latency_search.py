"""The search for a plan that meets a budget of time, by measuring each beside the dense model."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from torch import nn

from prunekit.errors import RunError
from prunekit.jobs.bench import devices
from prunekit.jobs.profile import as_latency
from prunekit.jobs.prune.latency_target import (
    GOAL,
    NEAR,
    TOLERANCE,
    Attempt,
    LatencyTarget,
    Timing,
    distance,
    mean_excess,
    next_share,
)
from prunekit.jobs.run.run_folder import Log
from prunekit.measure.effort import current_effort
from prunekit.measure.latency.comparison import LatencyReport, prepared_latency
from prunekit.measure.latency.row_text import failure_lines
from prunekit.measure.runtimes.session import Inputs
from prunekit.planning.plan import Plan
from prunekit.settings.prune import PruneSettings, facts_of

CERTAIN = 0.0125
"""Half of the 95 % interval of the median over processes, as a share of it, that is small enough (tolerance: 3 %)."""
STUDENT_T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145)
"""97.5 % quantiles of Student's distribution (1908), for 1, 2, ... degrees of freedom."""


class LatencySearch:
    """The search for the share of the time asked for at which to aim plans, by measuring one after the other.

    Args:
        target: the budgets of time.
        log: gets a line for each attempt.

    Attributes:
        attempts: measured plans in order; one that is near the goal is measured twice.
        done: whether a plan near the goal was found, or nothing is left to try.
    """

    def __init__(self, target: LatencyTarget, *, log: Log) -> None:
        self._target, self._log = target, log
        self._share, self._most = target.first_share, current_effort().attempts
        self._plans: list[Plan] = []
        self.attempts: list[Attempt] = []
        self.done = False

    @property
    def aim(self) -> PruneSettings:
        """The settings for the next plan.

        Raises:
            PlanError: no plan is predicted to be faster than the dense model.
        """
        return self._target.aim(self._share)

    def measure(self, plan: Plan, compact: nn.Module) -> None:
        """Measure a plan, twice if it is near the goal, and aim the next one.

        Args:
            plan: made for `aim`.
            compact: the compact model.

        Raises:
            PlanError: the budgets are out of reach; names the best that was measured.
            RunError: the target cannot run the model.
        """
        target, number = self._target, self._number_of(plan)
        for again in (False, True):
            if sum(one.plan == number for one in self.attempts) > 1:
                self.done = True  # no other plan is nearer
                return
            self._attempt(number, plan, compact)
            excess = mean_excess(self.attempts, number)
            near = abs(excess - GOAL) <= NEAR
            if (near and again) or (excess < GOAL and not time_binds(plan)):
                self.done = True
                return
            if excess > 1 and self._share <= target.least_share:
                raise target.out_of_reach(self.attempts[-1].timing)
            if not near or len(self.attempts) >= self._most:
                break
        self.done = len(self.attempts) >= self._most
        self._share = min(max(next_share(self.attempts), target.least_share), target.most_share)

    def best(self) -> Plan:
        """Return the plan nearest to the goal."""
        excesses = [mean_excess(self.attempts, one.plan) for one in self.attempts]
        best = min(range(len(excesses)), key=lambda index: distance(excesses[index]))
        self._log(f"latency: attempt {best + 1} is taken")
        return self._plans[best]

    def _number_of(self, plan: Plan) -> int:
        """Return the index of the first attempt whose plan keeps the same; the next index if there is none."""
        same = (index for index, other in enumerate(self._plans) if np.array_equal(other.keep, plan.keep))
        return next(same, len(self._plans))

    def _attempt(self, number: int, plan: Plan, compact: nn.Module) -> None:
        target, chart = self._target, plan.channel_map
        timing = time_compact(target, compact)
        left = chart.macs_left(plan.keep)
        predicted_ms = float(target.table.at(chart, plan.keep))  # a NumPy number cannot be saved in a checkpoint
        excess = float(timing.excess(target.asked))
        self.attempts.append(Attempt(number, float(self._share), predicted_ms, float(left), excess, timing))
        self._plans.append(plan)
        self._log(f"latency: attempt {len(self.attempts)}: {self.attempts[-1]}")


def time_binds(plan: Plan) -> bool:
    """Return whether a plan is limited by a budget of time."""
    return facts_of(plan.provenance["binding"]).measured


def time_compact(target: LatencyTarget, compact: nn.Module) -> Timing:
    """Measure a compact model during the search, deployed as the target says.

    Raises:
        RunError: the target cannot run it.
    """
    rounds = rounds_of(target.table.dense_ms)
    ready_made = target.transform(compact)
    return time_pair(target.dense, ready_made, target.inputs, target.settings, rounds, current_effort().most_processes)


def time_delivered(target: LatencyTarget, first: Timing, model: nn.Module) -> Timing:
    """Measure the final model, with the most processes, as its figure counts.

    Args:
        target: the budgets of time.
        first: of the first plan, which tells the time of the dense model.
        model: compact and deployed.

    Raises:
        RunError: the target cannot run it.
    """
    rounds = rounds_of(first.ms * first.speedup)
    return time_pair(target.dense, model, target.inputs, target.settings, rounds, current_effort().last_processes)


def rounds_of(dense_ms: float) -> int:
    """Return the number of rounds in each process, given the time of the dense model."""
    effort = current_effort()
    return min(max(effort.rounds, round(effort.rounds_ms / dense_ms)), effort.most_rounds)


def time_pair(
    model: nn.Module, compact: nn.Module, inputs: Inputs, settings: PruneSettings, rounds: int, most: int
) -> Timing:
    """Measure a compact model beside the dense one on the target of the settings, in several new processes.

    The time of a model differs by some percent from process to process, more than its interval in each: addresses in
    memory are random, and other load changes. The less the processes agree, the more of them measure.

    Args:
        model: the dense one.
        compact: the other.
        inputs: that both are timed on.
        settings: target and budgets.
        rounds: in each process.
        most: the largest number of processes.

    Raises:
        RunError: it cannot be measured there.
    """
    effort = current_effort()
    wanted, models = as_latency(settings.target), {"dense": model, "pruned": compact}
    with prepared_latency(models, inputs, wanted, devices(settings.target.device, wanted)) as measured:
        for tried in range(effort.tries):
            each: list[Timing] = []
            while len(each) < effort.processes or (len(each) < most and _uncertainty(each, settings) > CERTAIN):
                each.append(_timing(measured(rounds * 2**tried)))
            found = _median(each, _uncertainty(each, settings))
            if found.stable:
                break
    return found


def _uncertainty(found: Sequence[Timing], settings: PruneSettings) -> float:
    """Return half of the 95 % interval of the median over processes, as a share of it, for normal deviations."""
    if len(found) < 2:
        return 0.0
    in_ms = any(one.measured and not one.share for one in map(facts_of, settings.budget.given))
    figures = np.array([one.ms if in_ms else one.speedup for one in found])
    error = math.sqrt(math.pi / 2 / len(found)) * figures.std(ddof=1)
    return float(STUDENT_T[min(len(found) - 1, len(STUDENT_T)) - 1] * error / np.median(figures))


def _median(found: Sequence[Timing], uncertainty: float = 0.0) -> Timing:
    """Return medians over processes, with the hull of all intervals; stable if most processes are, and agree."""
    most = sum(one.stable for one in found) > len(found) / 2
    doubts = [] if most else [doubt for one in found for doubt in one.doubts]
    if uncertainty > TOLERANCE:
        doubts.append(
            f"{len(found)} processes differ: the 95 % interval of their median is {100 * uncertainty:.1f} % wide to "
            f"either side, at most {100 * TOLERANCE:.0f} % supports a claim; to settle it: an idle machine"
        )
    return Timing(
        ms=float(np.median([one.ms for one in found])),
        ms_low=min(one.ms_low for one in found),
        ms_high=max(one.ms_high for one in found),
        speedup=float(np.median([one.speedup for one in found])),
        speedup_low=min(one.speedup_low for one in found),
        speedup_high=max(one.speedup_high for one in found),
        stable=not doubts,
        doubts=tuple(dict.fromkeys(doubts)),
        notes=tuple(dict.fromkeys(note for one in found for note in one.notes)),
        processes=len(found),
    )


def _timing(found: LatencyReport) -> Timing:
    if found.failures:
        raise RunError(f"latency not measured: {'; '.join(failure_lines(found.failures))}")
    row, ratio = found.rows[1], found.speedup[0]
    doubts = tuple(dict.fromkeys([*row["doubts"], *ratio["doubts"]]))
    ms = (row["median_ms"], row["low_ms"], row["high_ms"])
    return Timing(*ms, ratio["median"], ratio["low"], ratio["high"], not doubts, doubts, found.not_apart)
