"""Budgets by name: what each counts, the decorator that registers one, and the limits that a plan must meet."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from prunekit import known_names
from prunekit.channels.labels.label_union import Labels
from prunekit.channels.tracing.channel_map import ChannelMap
from prunekit.errors import PlanError, UsageError
from prunekit.planning.budgets.cost_model import CostModel, GroupPart, Numbers, Term, cost_model
from prunekit.planning.budgets.latency_table import LatencyTable
from prunekit.settings.deployment import Target
from prunekit.settings.pruning import BudgetFacts, PruneSettings, noted_facts
from prunekit.utils.registry import Registry

BUDGETS: Registry[Budget] = known_names.BUDGETS
BITS = 40
"""Bits of the largest term, where a sum has fractions: costs are counted in whole numbers."""


@dataclass(frozen=True, eq=False)
class Countable:
    """Everything that a budget may count."""

    channel_map: ChannelMap  # of the model
    parts: Sequence[GroupPart]  # groups of labels whose number a plan decides
    target: Target = field(default_factory=Target)  # device and runtime that costs are counted for
    latency: LatencyTable | None = None  # table that predicts times on the target; None if no budget is one of time

    def terms(self, name: str) -> list[Term]:
        """Return the terms that another budget counts; multiply one with `Term.times`."""
        budget = BUDGETS.get(name)
        sums = budget.sums(self)
        if budget.facts.peak:
            raise PlanError(f"budget {name}: expected one that is a single sum; it is the largest of {len(sums)}")
        return sums[0]


Terms = Callable[[Countable], Sequence[Term] | Sequence[Sequence[Term]]]


@dataclass(frozen=True, eq=False)
class Budget:
    """A limit on what a plan leaves: what its figures mean, and the function that returns the terms to count."""

    facts: BudgetFacts
    terms: Terms

    def sums(self, countable: Countable) -> list[list[Term]]:
        """Return the sums of terms that are counted, the largest of which is limited; mostly one."""
        name = self.facts.name
        if self.facts.measured and countable.latency is None:
            raise PlanError(f"budget {name}: expected a latency table of the target; `prunekit.profile` measures one")
        found = self.terms(countable)
        sums = [list(one) for one in cast(Sequence[Sequence[Term]], found if self.facts.peak else [found])]
        for term in (term for one in sums for term in one):
            if not isinstance(term, Term):
                raise UsageError(
                    f"budget {name}: expected a list of prunekit.Term from the function that counts it, got one that "
                    f"holds {type(term).__name__} {term!r}"
                )
            if not math.isfinite(term.constant):
                raise UsageError(f"budget {name}: expected finite constants in its terms, got {term.constant}")
        return sums


def register_budget(
    name: str,
    *,
    about: str,
    unit: str = "",
    figure: str = "",
    share: bool = False,
    least: bool = False,
    measured: bool = False,
    per_unit: float = 1.0,
    peak: bool = False,
    each_group: bool = False,
    counted_as: str = "",
    found_as: str = "",
) -> Callable[[Terms], Terms]:
    """Register a budget: something that a plan limits, such as multiply-accumulates, bytes, or energy.

    The decorated function returns what is counted as a list of `prunekit.Term`, each a constant times widths. The name
    is then a budget like any other: a keyword of `prune` and `plan`, and a key of `prune.budget` in recipes.

    Args:
        name: as settings, recipes and messages call it.
        about: what is limited, in one line.
        unit: of the figures, such as "MB"; empty for a bare share.
        figure: what a figure is, in words, for messages; by default "number of" and the unit.
        share: whether the figure is a share of what the dense model has, above 0 and at most 1; else it is an amount in
            the unit, above 0.
        least: whether the figure is a minimum, and the reciprocal of what is counted, as a speedup is of a share of the
            time: above 1 for a `share`.
        measured: whether it is a budget of time: terms count nanoseconds as `countable.terms("latency_ms")` does, and
            plans are measured on the target until they meet it.
        per_unit: how much of what the terms count is one unit, such as 1e6 for bytes and "MB".
        peak: whether the function returns several such lists, the largest of which is limited.
        each_group: whether scope `uniform` applies it to each channel group.
        counted_as: its name among the figures that a run counts on the loaded models; if one exceeds the budget, the
            run reports a shortfall.
        found_as: a sentence that reports it, with `{}` in place of the figure as reports show it.

    Returns:
        A decorator that returns the function as it is.

    Raises:
        ValueError: the name is taken.

    Example:
        >>> import prunekit as pk, torch
        >>> @pk.register_budget("energy", share=True, about="Energy of a sample: arithmetic, and reading the weights.")
        ... def energy(countable):
        ...     arithmetic = [term.times(4.6) for term in countable.terms("macs")]
        ...     return arithmetic + [term.times(640) for term in countable.terms("params")]
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))
        >>> pk.prune(model, (torch.randn(1, 4),), energy=0.5).model[0].out_features
        6
    """
    facts = BudgetFacts(
        name, about, unit, figure, share, least, measured, per_unit, peak, each_group, counted_as, found_as
    )

    def register(terms: Terms) -> Terms:
        BUDGETS.add(name, Budget(facts, terms), terms)
        return terms

    return register


def accept(reference: str, found: Any) -> Budget:
    """Return the budget that `file.py:object` names: one that the file registers, or a function, as a share."""
    registered = next((each for each in BUDGETS.imported if each.terms is found), None)
    if registered is not None:
        return replace(registered, facts=replace(registered.facts, name=reference))
    if not callable(found):
        raise UsageError(
            f"{reference}: expected a function that is decorated by prunekit.register_budget, or one that returns "
            f"terms, got {type(found).__name__}"
        )
    about = (found.__doc__ or "").strip().partition("\n")[0]
    return Budget(BudgetFacts(reference, about, share=True), found)


@dataclass(frozen=True, eq=False)
class Budgets:
    """The budgets as functions of counts, in their units: shares of the dense model, megabytes, and milliseconds.

    A figure that is a minimum is here its reciprocal: a speedup as the share of the time. A budget may have several
    limits: memory is the maximum of what is alive at several moments.
    """

    facts: tuple[BudgetFacts, ...]  # of the budgets that were asked for
    asked: Numbers  # (budgets,) the most of each that may be left
    dense: Numbers  # (budgets,) the dense model's amount of each; 1 where it is a share
    left: Callable[[Labels], Numbers]  # counts (..., parts) -> the amount that is left of each budget, (..., budgets)
    # counts (..., parts) -> the amounts that are limited, (..., limits), without those that stay below their limit at
    # any counts
    limited: Callable[[Labels], Numbers]
    limits: Numbers  # (limits,) the most of each that may be left
    owner: Labels  # (limits,) index of the budget of each limit
    steps: tuple[int, ...]  # that widths are rounded up to where time is counted
    non_monotonic: bool  # whether more channels may take less time, as another kernel takes over at some width
    # for each part, the counts at which one does; none of widths that several parts decide
    breakpoints: tuple[tuple[int, ...], ...]

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the budgets that were asked for."""
        return tuple(one.name for one in self.facts)

    @property
    def timed(self) -> NDArray[np.bool_]:
        """Which budgets are of time: bool (budgets,)."""
        return np.array([one.measured for one in self.facts], dtype=np.bool_)

    @property
    def smooth(self) -> bool:
        """True if costs have neither steps nor breakpoints."""
        return not self.steps and not self.non_monotonic

    def fits(self, counts: Labels) -> Any:
        """Return whether counts (..., parts) meet every budget: bool (...)."""
        return (self.limited(counts) <= self.limits).all(axis=-1)

    def found(self, counts: Labels) -> dict[str, Any]:
        """Return a plan's provenance: what of each budget was asked for and is left, and which budget binds."""
        left = self.left(counts)
        each = {
            one.name: {
                "asked": one.as_cost(asked),
                "left": one.as_cost(value),
                "dense": one.as_cost(dense),
                **noted_facts(one),
            }
            for one, asked, value, dense in zip(self.facts, self.asked, left, self.dense, strict=True)
        }
        return {"budgets": each, "binding": self.facts[int(np.argmax(left / self.asked))].name}


def budgets_of(
    channel_map: ChannelMap, parts: list[GroupPart], settings: PruneSettings, latency: LatencyTable | None = None
) -> Budgets:
    """Return the budgets of a job as functions of the parts' counts; those of time by the target's `latency`."""
    settings.budget.require_sound()
    asked = settings.budget.given
    budgets = [BUDGETS.get(name) for name in asked]
    facts = [budget.facts for budget in budgets]
    countable = Countable(channel_map, parts, settings.target, latency)
    each = [_finer(budget.sums(countable), budget.facts) for budget in budgets]
    terms = [one for several, _ in each for one in several]
    starts = np.cumsum([0, *(len(several) for several, _ in each)], dtype=np.int64)[:-1]
    owner = np.repeat(np.arange(len(each)), [len(several) for several, _ in each])
    model = cost_model(channel_map, parts, terms)
    dense = model(np.array([part.labels.size for part in parts]))
    units = [finer * one.per_unit for one, (_, finer) in zip(facts, each, strict=True)]
    wholes = zip(facts, dense[starts], units, strict=True)
    scale = np.array([whole if one.share else unit for one, whole, unit in wholes])[owner]
    scale = np.maximum(scale, 1)
    most = np.array([one.as_cost(value) for one, value in zip(facts, asked.values(), strict=True)])
    # sums that may exceed their limit, and the largest sum of each budget in any case: it tells how much is left
    largest = [int(np.argmax(np.where(owner == index, dense / scale, -1.0))) for index in range(most.size)]
    above = dense / scale > most[owner]
    above[largest] = True
    within = np.flatnonzero(above)
    each_group = [index for index, one in enumerate(facts) if one.each_group and settings.scope == "uniform"]
    worst = _worst(parts) if each_group else None

    def counted(of: CostModel, scale: Numbers, owner: Labels, counts: Labels) -> Numbers:
        result: Numbers = of(counts) / scale
        if worst is not None:
            result[..., np.isin(owner, each_group)] = worst(counts)[..., None]
        return result

    every = partial(counted, model, scale, owner)
    return Budgets(
        facts=tuple(facts),
        asked=most,
        dense=np.maximum.reduceat(dense / scale, starts),
        left=lambda counts: np.maximum.reduceat(every(counts), starts, axis=-1),
        limited=partial(counted, model.of(within), scale[within], owner[within]),
        limits=most[owner[within]],
        owner=owner[within],
        steps=tuple(sorted({step for one in terms for term in one for step in term.steps if step > 1})),
        non_monotonic=model.non_monotonic,
        breakpoints=tuple(tuple(sorted(found)) for found in model.breakpoints([part.labels.size for part in parts])),
    )


def _finer(sums: list[list[Term]], facts: BudgetFacts) -> tuple[list[list[Term]], float]:
    """Return terms scaled so that their sums are precise as whole numbers, and the factor.

    Whole constants stay as they are, and so do times, which are in nanoseconds.
    """
    terms = [term for one in sums for term in one]
    if facts.measured or all(float(term.constant).is_integer() for term in terms):
        return sums, 1.0
    most = max(abs(term.constant) * math.prod(factor.size for factor in term.factors) for term in terms) or 1.0
    finer = 2.0 ** (BITS - math.ceil(math.log2(most)))
    return [[term.times(finer) for term in one] for one in sums], finer


def _worst(parts: list[GroupPart]) -> Callable[[Labels], Numbers]:
    """Return a function of counts: the largest share that a part keeps, of those that are not at their minimum."""
    sizes = np.array([part.labels.size for part in parts])
    free = np.array([len(part.counts) > 1 for part in parts])
    floor = np.array([part.at_most(0) for part in parts]) / sizes

    def worst(counts: Labels) -> Numbers:
        share = counts / sizes
        most: Numbers = np.where(free & (share > floor), share, 0.0).max(axis=-1)
        return most

    return worst
