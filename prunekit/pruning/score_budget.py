"""The budget `max_drop`: the smallest or fastest model whose score falls by at most so much on held-out samples.

Idea: statistics and orders of removal are there, so a share of the MACs (of the time, with a target) is a plan and a
fit away. Shares are bisected on one half of the held-out samples, and what held there is confirmed on the other half,
which chose nothing: the widest model first, on to narrower ones until one fails (fixed sequence testing, as in Learn
then Test, Angelopoulos et al. 2021). Up to three further models then lie between the narrowest that was confirmed (the
dense model where none was) and that one, half way each time, and have to hold on both halves. The narrowest confirmed
one is delivered. A model holds where the largest drop that its half cannot rule out at 95 % is within the budget.
One that exceeds it has to pass both halves, by luck in at most 1 of 20 each, so that few searches deliver such.
A function that returns one number for all samples tells no error: then the number itself has to be within.
Invariants: no model is delivered that failed on the second half; other budgets hold for every model that is tried.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar, cast

import numpy as np
import torch
from torch import nn

from prunekit.errors import DataError, PlanError, UsageError
from prunekit.measure.score_drop import FEWEST, Drop, Evaluate, HeldOut, HeldOutScores
from prunekit.planning.feasibility import least_possible
from prunekit.pruning.collected_statistics import Collected
from prunekit.pruning.plan_search import CriterionInputs, Planned, PlanSearch
from prunekit.pruning.sample_statistics import joined_samples
from prunekit.settings.deployment import Target
from prunekit.settings.pruning import WITHOUT_EFFECT, PruneSettings, facts_of
from prunekit.tasks.task import Score, Task
from prunekit.utils.display import share as in_percent
from prunekit.utils.inputs import sample_count, select_samples
from prunekit.utils.progress import Log, stage

ATTEMPTS = 6
"""Models that are tried to bisect the share."""
FURTHER = 3
"""Further ones, at most, between the narrowest that was confirmed and the one that was not."""
CLOSE = 0.02
"""Shares that differ by less are not told apart."""
HELD_OUT = 4096
"""Samples of the calibration data, at most, that are kept apart where no others are given."""
WIDEST = WITHOUT_EFFECT["macs"]
"""The largest share that is tried."""
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


def require_limit(limit: float, about: Score, samples: int) -> None:
    """Raise where a share is not below 1, or no model could be confirmed by so few samples; 0 if they are unknown."""
    if limit >= 1 and (about.unit == "%" or about.lower_is_better):
        raise UsageError(f"max_drop: expected a share below 1, such as 0.01 for one point, got {limit:g}")
    if about.unit == "%" and samples and 3 / (samples // 2) > limit:
        raise PlanError(
            f"max_drop: {samples:,} held-out samples cannot confirm a drop of at most {100 * limit:g} points, even of "
            f"a model that answers all of them alike; expected at least {math.ceil(6 / limit):,}"
        )


def judged(
    model: nn.Module, calibration: Any, images: int, held_out: Any, evaluate: Evaluate | None, task: Task | str | None
) -> tuple[Any, Task | str | None, HeldOut]:
    """Return calibration samples, the task that unpacks them, and what models are judged by.

    That is samples of the calibration data, which are kept apart, where no others are given.
    """
    if held_out is None and (evaluate is None or isinstance(evaluate, (str, Task))):
        if evaluate is not None or calibration is None or isinstance(calibration, Collected):
            got = "what collect found, of which none are kept apart" if calibration is not None else "none"
            got = got if evaluate is None else "none: calibration data is read without its targets"
            kind = "samples" if evaluate is None else "samples with targets"
            raise UsageError(
                f"held_out: expected {kind} that models are judged on, got {got}; give held_out=loader, or evaluate, a "
                "function of the model that returns its score"
            )
        samples = joined_samples(model, calibration, images + HELD_OUT, task)
        count = sample_count(samples)
        apart = torch.linspace(0, count - 1, max(count - images, count // 3)).long()
        if len(apart) < FEWEST:
            raise DataError(
                f"held_out: a third of the {count} calibration samples would be kept apart to judge models on, and at "
                f"least {FEWEST} are needed; give {3 * FEWEST} samples or more, or held_out"
            )
        chosen = torch.ones(count, dtype=torch.bool).index_fill(0, apart, False)
        calibration, held_out, task = select_samples(samples, chosen), select_samples(samples, apart), None
    return calibration, task, HeldOut(model, held_out, evaluate)


def confirmed(drops: Sequence[Drop], limit: float) -> int:
    """Return how many drops are within the limit, in order, before the first that is not: fixed sequence testing."""
    return next((number for number, drop in enumerate(drops) if drop.most > limit), len(drops))


@dataclass(frozen=True, eq=False)
class Tried(Generic[Made]):
    """A model that was tried."""

    share: float  # of the MACs or the time that the plan was made for
    planned: Planned
    made: Made | None  # None if it does not hold
    scores: HeldOutScores
    first: Drop  # on the half that chooses


@dataclass(frozen=True, eq=False)
class ScoreSearch(Generic[Made]):
    """The search for the narrowest model whose score falls by at most `limit`."""

    search: PlanSearch
    inputs: CriterionInputs
    held_out: HeldOut
    limit: float
    make: Callable[[Planned], tuple[Made, HeldOutScores]]  # repairs, compacts and scores what is delivered
    log: Log = stage
    _tried: list[Tried[Made]] = field(default_factory=list, init=False)

    def run(self) -> tuple[Planned, Made, Drop]:
        """Return the plan, what was made by it, and its drop on the half that confirmed it; PlanError if none is."""
        require_limit(self.limit, self.held_out.about, sum(self.held_out.dense.samples))
        low, high = share_range(self.search)
        if low >= high:
            raise PlanError(f"max_drop: plans leave no less than {self._left(low)}, and {self._left(high)} is the most")
        if self._others and not self._holds(self._try(high)):
            raise self._contradiction(self._tried[-1])
        low, narrow = low * (1 + 1e-6), PlanError("max_drop: no plan is narrower")
        while len(self._tried) < ATTEMPTS and high - low >= CLOSE * high:
            share = (low + high) / 2
            try:
                low, high = (low, share) if self._holds(self._try(share)) else (share, high)
            except PlanError as error:  # the trial of a plan locked more than is known
                low, narrow = share, error
        if not self._tried:
            raise narrow
        held = sorted((one for one in self._tried if self._holds(one)), key=lambda one: -one.share)
        count = self._confirmed(held)
        found = held[count - 1] if count else None
        largest = found.share if found else high if self._others else WIDEST
        refused = held[count].share if count < len(held) else largest  # nothing is between where none was refused
        for _ in range(FURTHER):
            if largest - refused >= CLOSE * largest:
                one = self._try(share := (largest + refused) / 2)
                holds = self._holds(one) and self._confirmed([one]) == 1
                largest, refused, found = (share, refused, one) if holds else (largest, share, found)
        if found is None:
            raise self._unconfirmed()
        return self._noted(found)

    @property
    def _others(self) -> dict[str, float]:
        """Budgets besides the score that were given."""
        return self.search.settings.budget.asked_for

    def _try(self, share: float) -> Tried[Made]:
        """Return what a share leads to: a model that was tried already, where the plan is the same, or another one."""
        planned = at_share(self.search, self.inputs, share)
        for known in self._tried:
            if np.array_equal(known.planned.plan.keep, planned.plan.keep):
                return known
        made, scores = self.make(planned)
        first = self.held_out.drop(scores, self.held_out.halves[0])
        found = Tried(share, planned, made if first.most <= self.limit else None, scores, first)
        self._tried.append(found)
        if len(self._tried) == 1 and first.most - first.drop > self.limit / 2:
            self.log(f"max_drop: {self._resolved(first)}")
        verdict = "holds" if self._holds(found) else "too much"
        self.log(f"max_drop: {self._left(share)}: {first}; {self._bounded(first)}: {verdict}")
        return found

    def _holds(self, one: Tried[Made]) -> bool:
        return one.first.most <= self.limit

    def _confirmed(self, held: list[Tried[Made]]) -> int:
        """Return how many hold on the second half, the widest first; none after one that fails."""
        drops = [self._second(one) for one in held]
        count = confirmed(drops, self.limit)
        for number, (one, drop) in enumerate(zip(held, drops, strict=True)):
            if drop.error is not None and number <= count:
                said = "confirmed" if number < count else "not confirmed"
                self.log(f"max_drop: {self._left(one.share)}: {drop}; {self._bounded(drop)}: {said}")
        return count

    def _second(self, one: Tried[Made]) -> Drop:
        return self.held_out.drop(one.scores, self.held_out.halves[1])

    def _noted(self, one: Tried[Made]) -> tuple[Planned, Made, Drop]:
        drop = self._second(one)
        figures = {name: getattr(drop, name) for name in ("drop", "most", "score", "dense", "samples")}
        said = f"{drop}; at most {drop.in_words(self.limit)} may be lost"
        note = {"asked": self.limit, **figures, "said": said, "narrows": axis_of(self.search.settings)}
        provenance = {**one.planned.plan.provenance, "max_drop": note}
        plan = replace(one.planned.plan, provenance=provenance)
        return replace(one.planned, plan=plan), cast("Made", one.made), drop

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

    def _resolved(self, drop: Drop) -> str:
        """Return what drops the samples tell apart, and how many would tell half of what is allowed."""
        half, told = f"{drop.samples:,} held-out samples, half of all", drop.in_words(drop.most - drop.drop)
        wanted = f"about {2 * drop.samples_for(self.limit):,} in all would settle {drop.in_words(self.limit)}"
        return f"{half}, tell drops apart by {told}; {wanted}"

    def _unconfirmed(self) -> PlanError:
        widest = max(self._tried, key=lambda one: one.share)
        worst = max(widest.first, self._second(widest), key=lambda one: one.most)
        why = "" if worst.error is None else f"; {self._resolved(worst)}"
        return PlanError(
            f"max_drop: at most {worst.in_words(self.limit)} was asked for, but even {self._left(widest.share)} may "
            f"lose more: {worst}, {self._bounded(worst)}{why}; give more held-out samples, or raise max_drop"
        )
