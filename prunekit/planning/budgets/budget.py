"""Budgets by name: what each counts, and the decorator that registers one."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

from prunekit import known_names
from prunekit.channels.channel_map import ChannelMap
from prunekit.errors import PlanError, UsageError
from prunekit.planning.candidates import GroupPart
from prunekit.planning.costs import Term
from prunekit.planning.latency_table import LatencyTable
from prunekit.settings.pruning import BudgetFacts, Target
from prunekit.utils.registry import Registry

BUDGETS: Registry[Budget] = known_names.BUDGETS


@dataclass(frozen=True, eq=False)
class Countable:
    """Everything that a budget may count.

    Attributes:
        channel_map: of the model.
        parts: groups of labels whose number a plan decides.
        target: device and runtime that costs are counted for.
        latency: table that predicts times on the target; None if no budget is one of time.
    """

    channel_map: ChannelMap
    parts: Sequence[GroupPart]
    target: Target = field(default_factory=Target)
    latency: LatencyTable | None = None

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
        found_as: a sentence that reports it, with `{}` in place of the figure.

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
        7
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
