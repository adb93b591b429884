"""The budget `max_drop`: the smallest or fastest model whose score falls by at most so much on held-out samples.

Idea: statistics and orders of removal are there, so a share of the MACs (of the time, with a target) is a plan and a
fit away. Shares are bisected on one half of the held-out samples, and what held there is confirmed on the other half,
which chose nothing: the widest model first, on to narrower ones until one fails (fixed sequence testing, as in Learn
then Test, Angelopoulos et al. 2021). The narrowest before that is delivered. A model holds where the largest drop that
its half cannot rule out at 95 % is within the budget, so that a delivered one exceeds it in at most 1 of 20 searches.
A function that returns one number for all samples tells no error: then the number itself has to be within.
Invariants: no model is delivered that failed on the second half; other budgets hold for every model that is tried.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch import nn

from prunekit.errors import PlanError, UsageError
from prunekit.measure.score_drop import Drop, Evaluate, HeldOut, HeldOutScores
from prunekit.planning.feasibility import least_possible
from prunekit.pruning.collected_statistics import Collected
from prunekit.pruning.plan_search import CriterionInputs, Planned, PlanSearch
from prunekit.pruning.sample_statistics import joined_samples
from prunekit.settings.pruning import PruneSettings, Target, facts_of
from prunekit.tasks.task import Task
from prunekit.utils.display import share as in_percent
from prunekit.utils.inputs import sample_count, select_samples
from prunekit.utils.progress import Log, stage

ATTEMPTS = 6
"""Models that are tried to bisect the share."""
WIDER = 2
"""Further ones, wider, where none was confirmed."""
CLOSE = 0.02
"""Shares that differ by less are not told apart."""
HELD_OUT = 4096
"""Samples of the calibration data, at most, that are kept apart where no others are given."""
WIDEST = 0.98
"""The largest share that is tried."""
WITHOUT_EFFECT = {"macs": WIDEST, "speedup": 1 / WIDEST}
"""Budgets by which models are narrowed, where they are not asked for."""
Made = TypeVar("Made")


def axis_of(settings: PruneSettings) -> str:
    """Return the budget by which models are narrowed: of time where it is budgeted or a target is given, else MACs."""
    return "speedup" if settings.budget.measured or settings.target != Target() else "macs"


def with_axis(settings: PruneSettings) -> PruneSettings:
    """Return settings without `max_drop` that have the budget by which models are narrowed, if without effect."""
    axis = axis_of(settings)
    budget = settings.budget.changed(**{axis: settings.budget.given.get(axis, WITHOUT_EFFECT[axis])})
    return replace(settings, budget=budget)


def at_share(search: PlanSearch, inputs: CriterionInputs, share: float) -> Planned:
    """Return a plan of a search that leaves a share of the MACs, or of the time by prediction, within other budgets.

    Raises:
        PlanError: there is none.
    """
    axis, settings = axis_of(search.settings), search.settings
    figure = share if axis == "macs" else 1 / share
    aimed = replace(settings, budget=settings.budget.changed(**{axis: figure}))
    return PlanSearch.find(replace(search, settings=aimed if axis == "macs" else aimed.in_blocks), inputs)


def share_range(search: PlanSearch) -> tuple[float, float]:
    """Return the least share that plans can leave, and the largest that the budgets allow."""
    axis, settings = axis_of(search.settings), search.settings
    settings = settings.in_blocks if axis == "speedup" else settings
    table = None if search.latency is None else search.latency.table
    least, asked = least_possible(search.channel_map, settings, table)[axis], settings.budget.given[axis]
    return least, min(WIDEST, facts_of(axis).as_cost(asked))


def judged(
    model: nn.Module, calibration: Any, images: int, held_out: Any, evaluate: Evaluate | None, task: Task | str | None
) -> tuple[Any, HeldOut]:
    """Return the calibration samples, and what models are judged by: samples apart from these where none are given."""
    if held_out is None and not callable(evaluate):
        if evaluate is not None or calibration is None or isinstance(calibration, Collected):
            given = "none" if calibration is None else "what collect found, which keeps none apart"
            also = " with targets" if evaluate is not None else ""
            raise UsageError(
                f"held_out: expected samples{also} that models are judged on, got {given}; give held_out=loader, or "
                "evaluate, a function of the model that returns its score"
            )
        samples = joined_samples(model, calibration, images + HELD_OUT, task)
        count = sample_count(samples)
        apart = torch.linspace(0, count - 1, max(count - images, count // 3)).long()
        chosen = torch.ones(count, dtype=torch.bool).index_fill(0, apart, False)
        calibration, held_out = select_samples(samples, chosen), select_samples(samples, apart)
    return calibration, HeldOut(model, held_out, evaluate)


def confirmed(drops: Sequence[Drop], limit: float) -> int:
    """Return how many drops are within the limit, in order, before the first that is not: fixed sequence testing."""
    return next((number for number, drop in enumerate(drops) if drop.most > limit), len(drops))


@dataclass(frozen=True, eq=False)
class Tried(Generic[Made]):
    """A model that was tried."""

    share: float  # of the MACs or the time that the plan was made for
    planned: Planned
    made: Made
    scores: HeldOutScores
    first: Drop  # on the half that chooses


@dataclass(frozen=True, eq=False)
class ScoreSearch(Generic[Made]):
    """The search for the narrowest model whose score falls by at most `limit`."""

    search: PlanSearch
    inputs: CriterionInputs
    held_out: HeldOut
    limit: float
    make: Callable[[Planned], tuple[Made, nn.Module]]  # repairs and compacts; the model is judged
    log: Log = stage

    def run(self) -> tuple[Planned, Made, Drop]:
        """Return the plan, what was made by it, and its drop on the half that confirmed it.

        Raises:
            PlanError: no model was confirmed, or another budget allows none.
            UsageError: the limit is a share, and not below 1.
        """
        about = self.held_out.about
        if self.limit >= 1 and (about.unit == "%" or about.lower_is_better):
            raise UsageError(f"max_drop: expected a share below 1, such as 0.01 for one point, got {self.limit:g}")
        low, high = share_range(self.search)
        if low >= high:
            raise PlanError(f"max_drop: plans leave no less than {self._left(low)}, and {self._left(high)} is the most")
        tried: list[Tried[Made]] = []
        if self._others and not self._holds(self._try(high, tried)):
            raise self._contradiction(tried[-1])
        low = low * (1 + 1e-6)
        for _ in range(ATTEMPTS):
            share = (low + high) / 2
            if high - low < CLOSE * high or (tried and self._same_plan(share, tried)):
                break
            low, high = (low, share) if self._holds(self._try(share, tried)) else (share, high)
        held = sorted((one for one in tried if self._holds(one)), key=lambda one: -one.share)
        for _ in range(WIDER + 1):
            found = self._confirmed(held)
            if found is not None:
                return found
            most = max((one.share for one in held), default=high)
            if self._others or most >= WIDEST - CLOSE or (held and len(held) > WIDER + ATTEMPTS):
                break
            wider = self._try((most + WIDEST) / 2, tried)
            held = [wider] if self._holds(wider) else []
        raise self._unconfirmed(tried)

    @property
    def _others(self) -> dict[str, float]:
        """Budgets besides the score that were given."""
        given = self.search.settings.budget.given
        return {name: value for name, value in given.items() if WITHOUT_EFFECT.get(name) != value}

    def _try(self, share: float, tried: list[Tried[Made]]) -> Tried[Made]:
        planned = at_share(self.search, self.inputs, share)
        made, model = self.make(planned)
        scores = self.held_out.score(model)
        found = Tried(share, planned, made, scores, self.held_out.drop(scores, self.held_out.halves[0]))
        tried.append(found)
        told = found.first.most - found.first.drop
        if not tried[1:] and told > self.limit / 2:
            self.log(f"max_drop: {self._resolved(told, found.first)}")
        verdict = "holds" if self._holds(found) else "too much"
        self.log(f"max_drop: {self._left(share)}: {found.first}; {self._bounded(found.first)}: {verdict}")
        return found

    def _same_plan(self, share: float, tried: list[Tried[Made]]) -> bool:
        """Return whether a plan for a share was tried already, as widths are rounded."""
        keep = at_share(self.search, self.inputs, share).plan.keep
        return any(np.array_equal(keep, one.planned.plan.keep) for one in tried)

    def _holds(self, one: Tried[Made]) -> bool:
        return one.first.most <= self.limit

    def _confirmed(self, held: list[Tried[Made]]) -> tuple[Planned, Made, Drop] | None:
        """Return the narrowest that holds on the second half, as do all that are wider; None if the widest fails."""
        drops = [self.held_out.drop(one.scores, self.held_out.halves[1]) for one in held]
        count = confirmed(drops, self.limit)
        for number, (one, drop) in enumerate(zip(held, drops, strict=True)):
            if drop.error is not None and number <= count:
                said = "confirmed" if number < count else "not confirmed"
                self.log(f"max_drop: {self._left(one.share)}: {drop}; {self._bounded(drop)}: {said}")
        return self._noted(held[count - 1], drops[count - 1]) if count else None

    def _noted(self, one: Tried[Made], drop: Drop) -> tuple[Planned, Made, Drop]:
        figures = {name: getattr(drop, name) for name in ("drop", "most", "score", "dense", "samples")}
        said = f"{drop}; at most {drop.in_words(self.limit)} may be lost"
        provenance = {**one.planned.plan.provenance, "max_drop": {"asked": self.limit, **figures, "said": said}}
        plan = replace(one.planned.plan, provenance=provenance)
        return replace(one.planned, plan=plan), one.made, drop

    def _left(self, share: float) -> str:
        what = "MACs" if axis_of(self.search.settings) == "macs" else "time"
        return f"{in_percent(share)} of the {what}"

    def _bounded(self, drop: Drop) -> str:
        return "at most " + drop.in_words(drop.most) if drop.error is not None else "no interval"

    def _contradiction(self, one: Tried[Made]) -> PlanError:
        others = " and ".join(facts_of(name).asked(value) for name, value in self._others.items())
        return PlanError(
            f"max_drop: at most {one.first.in_words(self.limit)} was asked for together with {others}, where the score "
            f"falls by more: {one.first}; raise max_drop or the other budget"
        )

    def _resolved(self, told: float, drop: Drop) -> str:
        """Return what drops the samples tell apart, and how many would tell half of what is allowed."""
        count = sum(self.held_out.dense.samples)
        wanted = round(count * (2 * told / self.limit) ** 2, -1)
        return (
            f"half of {count:,} held-out samples tells drops apart by {drop.in_words(told)}; about {wanted:,.0f} "
            f"samples would settle {drop.in_words(self.limit)}"
        )

    def _unconfirmed(self, tried: list[Tried[Made]]) -> PlanError:
        widest = max(tried, key=lambda one: one.share)
        drops = [widest.first, self.held_out.drop(widest.scores, self.held_out.halves[1])]
        worst = max(drops, key=lambda drop: drop.most)
        why = "" if worst.error is None else f"; {self._resolved(max(drop.most - drop.drop for drop in drops), worst)}"
        return PlanError(
            f"max_drop: at most {worst.in_words(self.limit)} was asked for, but even {self._left(widest.share)} may "
            f"lose more: {worst}, {self._bounded(worst)}{why}; give more held-out samples, or raise max_drop"
        )
