"""The search for a plan that meets a budget of time, by measuring each beside the dense model."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from time import perf_counter
from typing import Self

import numpy as np
from torch import nn

from prunekit.backends.session import Inputs, inputs_like
from prunekit.deploy.deployment_transform import transform_of
from prunekit.errors import NotMeasuredError, RunError, UsageError
from prunekit.measure.latency.comparison import LatencyReport, devices, prepared_latency
from prunekit.measure.latency.row_text import failure_lines
from prunekit.measure.measurement_effort import current_effort
from prunekit.planning.feasibility import require_unmeasured_met
from prunekit.planning.plan import Plan
from prunekit.planning.solver import feasible_plan
from prunekit.pruning.latency.device_clock import DeviceClock, Timing
from prunekit.pruning.latency.latency_target import (
    FINAL_SHARE,
    GOAL,
    NEAR,
    PROFILE_SHARE,
    SEARCH_SHARE,
    TOLERANCE,
    Attempt,
    LatencyResult,
    LatencyTarget,
    distance,
    mean_excess,
    next_share,
)
from prunekit.pruning.latency.profiling import REMEDY, Profile, profile
from prunekit.pruning.plan_search import WEIGHTS_ALONE, CriterionInputs, Planned, PlanSearch
from prunekit.settings.deployment import DeploySettings
from prunekit.settings.pruning import PruneSettings, facts_of
from prunekit.utils.display import plural, share
from prunekit.utils.files import json_values
from prunekit.utils.progress import Log

CERTAIN = 0.0125
"""Half of the 95 % interval of the median over processes, as a share of it, that is small enough (tolerance: 3 %)."""
STUDENT_T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145)
"""97.5 % quantiles of Student's distribution (1908), for 1, 2, ... degrees of freedom."""


AS_IT_IS = DeploySettings()
TRIPS, CANDIDATES = 3, 7
"""Kits of candidates for a budget on another machine, at most, and the candidates in each."""
LEAST_SPAN, MOST_SPAN = 0.06, 0.25
"""The span of the times of the first candidates to either side of the time asked for."""
BLIND = 0.25
"""A median error on networks that were held out, beyond which a table of doubtful times tells no plans apart."""
DOUBT = 0.05
"""How wrong a latency table may be: a budget that is predicted to be met by less than this is measured first."""


@dataclass(frozen=True, eq=False)
class TimedPlanSearch(PlanSearch):
    """The search for a plan within budgets of time, which a profile predicts and measurements decide."""

    latency: LatencyTarget = field(kw_only=True)

    def with_weights(self, model: nn.Module) -> Self:
        """Return the search for the same network with other weights, as training changes no structure."""
        return replace(super().with_weights(model), latency=replace(self.latency, model=model))

    def require_reachable(self) -> None:
        """Raise if the budgets cannot be met; the fastest plan is measured where the prediction is in doubt."""
        target = self.latency
        if target.least_share > 1 - DOUBT and not self.settings.target.elsewhere:
            by_norm = replace(target.aim(target.least_share), criterion="l2", scope="global")
            fastest = self.aimed(by_norm)
            timing = time_compact(target, fastest.compact, SEARCH_SHARE * self.settings.target.limit_s, self.log)
            if timing.excess(target.asked) > 1:
                raise target.out_of_reach(timing)
        if target.least_share <= 1:
            feasible_plan(self.channel_map, self.settings.in_blocks, target.table)

    def find(self, inputs: CriterionInputs = WEIGHTS_ALONE) -> Planned:
        """Return a plan within all budgets, by measuring one after the other, or on another machine several at once."""
        if self.settings.target.elsewhere:
            return self._find_elsewhere(inputs)
        timed, search, found = LatencySearch(self.latency, log=self.log), self, list[Planned]()
        while not timed.done:
            planned = search.aimed(timed.aim, inputs)
            found.append(planned)
            search = replace(search, channel_map=planned.plan.channel_map)  # the trial's locks hold for the next too
            timed.measure(planned.plan, planned.compact)
        best = timed.best()
        planned = next(one for one in found if one.plan is best)
        return replace(self.as_asked(planned, self.latency.asked_figures), attempts=tuple(timed.attempts))

    def _find_elsewhere(self, inputs: CriterionInputs) -> Planned:
        """Return the plan nearest to the time asked for, of candidates around it that the device measures in one kit.

        The span of their times is that of the table's error on networks that it was not fitted to. Where none is within
        the tolerance, a further kit has candidates around the time at which those before were right.
        """
        target, device, search = self.latency, self.settings.target.device, self
        found, attempts = list[Planned](), list[Attempt]()
        center, span = target.first_share, min(max(2 * target.profile.error, LEAST_SPAN), MOST_SPAN)
        for trip in range(1, TRIPS + 1):
            aims, made = center * np.linspace(1 - span, 1 + span, CANDIDATES), list[tuple[float, Planned]]()
            for aim in dict.fromkeys(np.clip(aims, target.least_share, target.most_share).tolist()):
                planned = search.aimed(target.aim(aim), inputs)
                search = replace(search, channel_map=planned.plan.channel_map)
                if not any(np.array_equal(planned.plan.keep, one.plan.keep) for one in found):
                    found.append(planned)
                    made.append((aim, planned))
            if not made:  # plans come in steps, and those around the time are measured
                break
            compacts = [target.transform(planned.compact) for _, planned in made]
            what = f"candidates {trip} for {target.called}"
            timings = DeviceClock(self.settings.target, self.log).timings(target.dense, compacts, target.inputs, what)
            for (aim, planned), timing in zip(made, timings, strict=True):
                if timing is not None:
                    attempts.append(attempt_of(target, found.index(planned), aim, planned.plan, timing))
                    self.log(f"latency: on {device}: {attempts[-1]}")
            if not attempts:
                raise RunError(f"no candidate for {target.called} runs on {device}")
            attempts.sort(key=lambda one: -abs(math.log(one.excess / GOAL)))  # the last is scaled by, if all are alike
            best, narrowest = (
                min(attempts, key=lambda one: distance(one.excess)),
                min(attempts, key=lambda one: one.share),
            )
            if best.excess > 1 + TOLERANCE and narrowest.share <= target.least_share:
                raise target.out_of_reach(narrowest.timing)
            if abs(best.excess - 1) <= TOLERANCE or not time_binds(found[best.plan].plan):
                break
            center, span = next_share(attempts), span / 2
            if trip < TRIPS:
                self.log(f"latency: none is within {share(TOLERANCE)}: {best}; a further kit has plans around it")
        attempts.append(attempts.pop(attempts.index(best)))  # the last is the one that is taken
        planned, where = self.as_asked(found[best.plan], target.asked_figures), self.settings.target
        setting = {name: getattr(where, name) for name in ("device", "runtime", "batch", "threads", "dtype")}
        provenance = {**planned.plan.provenance, "timed": json_values({**setting, **asdict(best.timing)})}
        plan = replace(planned.plan, provenance=provenance)
        return replace(planned, plan=plan, attempts=tuple(attempts))

    def predict(self, inputs: CriterionInputs = WEIGHTS_ALONE) -> Planned:
        """Return a plan within budgets of time by prediction, or else the fastest one."""
        aim = self.latency.aim(self.latency.first_share)
        return self.as_asked(self.aimed(aim, inputs), self.latency.asked_figures)

    def aimed(self, settings: PruneSettings, inputs: CriterionInputs = WEIGHTS_ALONE) -> Planned:
        """Return a plan for other settings than those that were asked for, not measured."""
        return PlanSearch.find(replace(self, settings=settings), inputs)

    def deliver(self, planned: Planned, model: nn.Module) -> LatencyResult:
        """Measure the final model beside the dense one in fresh processes: the most, as its figure counts.

        The figure of another machine is that of the candidate, which has the same structure; a model that was no
        candidate, as the score decided, is measured there.
        """
        if self.settings.target.elsewhere:
            binding, taken = time_binds(planned.plan), planned.attempts[-1].timing if planned.attempts else None
            if taken is None:
                clock = DeviceClock(self.settings.target, self.log)
                (taken,) = clock.timings(self.latency.dense, [model], self.latency.inputs, "the final model")
            if taken is None:
                raise RunError(f"the final model does not run on {self.settings.target.device}")
            return LatencyResult(self.latency, planned.attempts, bool(planned.attempts) and binding, taken)
        first = planned.attempts[0].timing if planned.attempts else None  # none where the score decided
        dense_ms = self.latency.table.dense_ms if first is None else first.ms * first.speedup
        limit_s = FINAL_SHARE * self.latency.settings.target.limit_s
        final = _time_beside_dense(self.latency, model, dense_ms, current_effort().last_processes, limit_s, self.log)
        found = LatencyResult(self.latency, planned.attempts, first is not None and time_binds(planned.plan), final)
        of = f": {share(found.excess)} of the time asked for" if final.stable and self.latency.given else ""
        self.log(f"latency: measured last: {final}{of}")
        return found


def with_profile(
    search: PlanSearch, deploy: DeploySettings = AS_IT_IS, *, measure: bool = True, again: bool = False
) -> PlanSearch:
    """Return the search with a latency profile of its target, where a budget is one of time.

    The dense model and every compact one are deployed as `deploy` says before they are timed. Without `measure` the
    profile is of networks in the cache alone; of too few it is a `NotMeasuredError`. Before anything is measured, a
    budget that is not one of time and cannot be met is a `PlanError`. `again` measures doubtful networks anew. Where a
    time was asked for, a profile of mostly doubtful times that predicts badly is a `RunError`, or without `measure` a
    `NotMeasuredError`: plans would be searched for by chance.
    """
    if not search.settings.budget.measured:
        return search
    model, example, settings = search.model, search.examples[0], search.settings
    transform = transform_of(model, example, deploy)
    try:
        inputs = inputs_like(example)
    except UsageError as error:
        timed = " and ".join(name for name in settings.budget.given if facts_of(name).measured)
        raise UsageError(f"budget {timed}: {error}; give macs, params, channels or size_mb instead") from error
    require_unmeasured_met(search.channel_map, settings.in_blocks)
    found = profile(
        model,
        example,
        settings=settings,
        channel_map=search.channel_map,
        more_examples=search.examples[1:],
        measure=measure,
        again=again,
        limit_s=PROFILE_SHARE * settings.target.limit_s,
        transform=transform,
        log=search.log,
        progress=False,
    )
    search.log("; ".join((f"profile: {found.accuracy}", *found.notes)))
    target = LatencyTarget(model, search.channel_map, inputs, settings, found, transform)
    blind = found.error > BLIND and 2 * len(found.doubts) > len(found.samples)
    if blind and target.given and current_effort().heeds_doubts:
        raise (RunError if measure else NotMeasuredError)(_untold(found))
    parts = {one.name: getattr(search, one.name) for one in fields(search) if one.name != "latency"}
    return TimedPlanSearch(**parts, latency=target)


def _untold(found: Profile) -> str:
    """Return why no budget of time is met by a profile that is too noisy to tell plans apart, and what to do."""
    return (
        f"times cannot be predicted here, and no plan was searched for: {found.noise}, and those held out are "
        f"predicted with a median error of {share(found.error)}, at most {share(BLIND)} tells plans apart. The first "
        f"doubt: {found.doubts[0]}. What helps: an idle machine, fewer threads (target.threads) or a larger "
        f"target.limit_s; then {REMEDY}"
    )


class LatencySearch:
    """The search for the share of the time asked for at which to aim plans, by measuring one after the other."""

    def __init__(self, target: LatencyTarget, *, log: Log) -> None:
        self._target, self._log = target, log
        self._share, self._most = target.first_share, current_effort().attempts
        self._over = perf_counter() + SEARCH_SHARE * target.settings.target.limit_s
        self._plans: list[Plan] = []
        self.attempts: list[Attempt] = []  # in order; a plan near the goal is measured twice
        self.done = False  # a plan near the goal was found, or nothing is left to try

    @property
    def aim(self) -> PruneSettings:
        """The settings for the next plan."""
        return self._target.aim(self._share)

    def measure(self, plan: Plan, compact: nn.Module) -> None:
        """Measure a plan, twice if it is near the goal, and aim the next one."""
        target = self._target
        same = (index for index, other in enumerate(self._plans) if np.array_equal(other.keep, plan.keep))
        number = next(same, len(self._plans))  # of the first attempt whose plan keeps the same
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
            if not near or len(self.attempts) >= self._most or self._is_late:
                break
        self.done = len(self.attempts) >= self._most or self._is_late
        if self._is_late:
            tried = plural(len(self.attempts), "measurement")
            ended = f"the search for a plan ended after {tried}: {_limit(target.settings)}"
            self.attempts[-1] = replace(self.attempts[-1], ended=ended)
            self._log(f"latency: {ended}")
        self._share = min(max(next_share(self.attempts), target.least_share), target.most_share)

    def best(self) -> Plan:
        """Return the plan nearest to the goal."""
        excesses = [mean_excess(self.attempts, one.plan) for one in self.attempts]
        best = min(range(len(excesses)), key=lambda index: distance(excesses[index]))
        self._log(f"latency: attempt {best + 1} is taken")
        return self._plans[best]

    @property
    def _is_late(self) -> bool:
        return perf_counter() >= self._over

    def _attempt(self, number: int, plan: Plan, compact: nn.Module) -> None:
        target = self._target
        left_s = max(0.0, self._over - perf_counter())
        timing = time_compact(target, compact, left_s / 2, self._log)  # half of it is for the plans that follow
        self.attempts.append(attempt_of(target, number, self._share, plan, timing))
        self._plans.append(plan)
        self._log(f"latency: attempt {len(self.attempts)}: {self.attempts[-1]}")


def attempt_of(target: LatencyTarget, number: int, share: float, plan: Plan, timing: Timing) -> Attempt:
    """Return a plan that was measured, with what was predicted."""
    chart = plan.channel_map  # a NumPy number cannot be saved in a checkpoint
    predicted_ms, left = float(target.table.at(chart, plan.keep)), float(chart.macs_left(plan.keep))
    return Attempt(number, float(share), predicted_ms, left, float(timing.excess(target.asked)), timing)


def time_binds(plan: Plan) -> bool:
    """Return whether a plan is limited by a budget of time."""
    return facts_of(plan.provenance["binding"]).measured


def time_compact(target: LatencyTarget, compact: nn.Module, limit_s: float, log: Log) -> Timing:
    """Measure a compact model during the search, deployed as the target says."""
    most = current_effort().most_processes
    return _time_beside_dense(target, target.transform(compact), target.table.dense_ms, most, limit_s, log)


def _time_beside_dense(
    target: LatencyTarget, model: nn.Module, dense_ms: float, most: int, limit_s: float, log: Log
) -> Timing:
    effort = current_effort()
    rounds = min(max(effort.rounds, round(effort.rounds_ms / dense_ms)), effort.most_rounds)
    return time_pair(target.dense, model, target.inputs, target.settings, rounds, most, limit_s=limit_s, log=log)


def time_pair(
    model: nn.Module,
    compact: nn.Module,
    inputs: Inputs,
    settings: PruneSettings,
    rounds: int,
    most: int,
    *,
    limit_s: float = math.inf,
    log: Log = lambda text: None,
) -> Timing:
    """Measure a compact model beside the dense one on the target of the settings, in several new processes.

    The time of a model differs by some percent from process to process, more than its interval in each: addresses in
    memory are random, and other load changes. The less the processes agree, the more of them measure.
    """
    effort, over = current_effort(), perf_counter() + limit_s
    wanted, models = settings.target.as_latency, {"dense": model, "pruned": compact}
    best: list[Timing] = []
    with prepared_latency(models, inputs, wanted, devices(settings.target.device, wanted)) as measured:
        for tried in range(effort.tries):
            each: list[Timing] = []
            while len(each) < effort.processes or (len(each) < most and _uncertainty(each, settings) > CERTAIN):
                left = over - perf_counter()
                if best and left <= 0:
                    break
                of = f"{effort.processes}" if most <= effort.processes else f"{effort.processes} to {most}"
                limit = "" if left == math.inf else f", at most {max(0.0, left):.0f} s more"
                log(f"latency: timing both models in process {len(each) + 1} of {of}{limit}")
                each.append(as_timing(measured(rounds * 2**tried, max(0.0, left))))
                best = each if len(each) >= min(len(best), effort.processes) else best
            found = _median(best, _uncertainty(best, settings))
            if found.stable and len(best) >= effort.processes:
                return found
            if perf_counter() >= over:
                doubt = f"measured in {plural(found.processes, 'process', 'es')}: {_limit(settings)}"
                return replace(found, stable=False, doubts=(*found.doubts, doubt))
            if tried + 1 < effort.tries:
                log(f"latency: both models are timed again, with twice the rounds: {found.doubts[0]}")
    return found


def _limit(settings: PruneSettings) -> str:
    return (
        f"target.limit_s, {settings.target.limit_s:g} s for all measurements, left no time for more; to settle it: an "
        "idle machine, or a larger target.limit_s"
    )


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


def as_timing(found: LatencyReport) -> Timing:
    """Return the times of a measured plan, and what makes them doubtful."""
    if found.failures:
        raise RunError(f"latency not measured: {'; '.join(failure_lines(found.failures))}")
    row, ratio = found.rows[1], found.speedup[0]
    doubts = tuple(dict.fromkeys([*row["doubts"], *ratio["doubts"]]))
    ms = (row["median_ms"], row["low_ms"], row["high_ms"])
    return Timing(*ms, ratio["median"], ratio["low"], ratio["high"], not doubts, doubts, found.not_apart)
