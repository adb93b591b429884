"""What figures of budgets mean and how they are said, known without importing what counts them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, get_args

from annotated_types import Gt, Le

from prunekit import numbers
from prunekit.registries import BUDGETS
from prunekit.user_code import is_reference

Share = Annotated[float, Gt(0), Le(1)]
Times = Annotated[float, Gt(1)]
Amount = Annotated[float, Gt(0)]
NS_PER_MS = 1e6


@dataclass(frozen=True)
class BudgetFacts:
    """What is known of a budget without counting it; see `prunekit.register_budget`, which takes the same.

    Attributes:
        name: as settings and recipes have it.
        about: what is limited, in one line.
        unit: of the figures; empty for a bare share.
        figure: what a figure is, in words, such as "number of milliseconds"; made from the unit where it is empty.
        share: whether what is left is compared with the dense model's, not with so many units.
        least: whether the figure is the least that is asked for, and one over what is counted.
        measured: whether it is one of time, and plans are measured on the target until they meet it.
        per_unit: how much of what is counted is one unit.
        peak: whether several sums are counted, of which the largest is limited.
        each_group: whether scope `uniform` asks it of each channel group.
        counted_as: what it is called among the figures of models that are loaded again; empty: it is not counted again.
        found_as: a sentence on that figure, in place of `{}`.
    """

    name: str
    about: str = ""
    unit: str = ""
    figure: str = ""
    share: bool = False
    least: bool = False
    measured: bool = False
    per_unit: float = 1.0
    peak: bool = False
    each_group: bool = False
    counted_as: str = ""
    found_as: str = ""

    @property
    def annotation(self) -> Any:
        """Type and bounds of its figures."""
        if self.share:
            return Times if self.least else Share
        return Amount

    def problem(self, value: object) -> str | None:
        """What is wrong with a figure, as "expected ..., got ..."; None if nothing is."""
        bounds: tuple[Any, ...] = get_args(self.annotation)
        above: Any = next(bound.gt for bound in bounds if isinstance(bound, Gt))
        most: Any = next((bound.le for bound in bounds if isinstance(bound, Le)), math.inf)
        if (
            isinstance(value, (int, float))
            and not isinstance(value, bool)
            and above < value <= most
            and value < math.inf
        ):
            return None
        if self.share and not self.least:
            return f"expected a share above {above} and at most {most}, got {value!r}"
        figure = self.figure or f"number of {self.unit}".removesuffix(" of ")
        return f"expected a {figure} above {above}, got {value!r}"

    def as_cost(self, value: float) -> float:
        """Turns a figure into what is limited, of which less is better, and that into a figure."""
        return float(1 / value if self.least else value)

    def in_words(self, value: float) -> str:
        """A figure with its unit."""
        gap = " " if self.unit and not self.share else ""
        return f"{value:.4g}{gap}{self.unit}"

    def shown(self, value: float) -> str:
        """A figure as tables and reports show it: rounded, a share in percent, and bytes in the unit that fits them."""
        if self.share:
            return f"{value:.3g}{self.unit}" if self.least else numbers.share(value, 2)
        return numbers.size(1e6 * value) if self.unit == "MB" else f"{numbers.digits(value)} {self.unit}".rstrip()

    @property
    def limit(self) -> str:
        """How the figure limits what is left."""
        return "at least" if self.least else "at most"

    def left_of(self, value: float, dense: float) -> float:
        """Which share of the dense model a figure leaves, given that model's."""
        return dense / value if self.least else value / dense

    def loosened(self, value: float, times: float) -> float:
        """The figure that allows so many times as much."""
        return value / times if self.least else value * times

    def excess(self, asked: float, ms: float, speedup: float) -> float:
        """How many times as long as asked for a model takes that was measured; for budgets that are."""
        if self.share:
            found = speedup if self.least else 1 / speedup
        else:
            found = self.as_cost(ms / (self.per_unit / NS_PER_MS))
        return asked / found if self.least else found / asked


def facts_of(name: str) -> BudgetFacts:
    """What is known of a budget; of a built-in one without importing it.

    Raises:
        UsageError: there is none of that name.
    """
    declared = BUDGETS.declared.get(name)
    if declared is not None:
        return BudgetFacts(name, **declared.facts)
    found: BudgetFacts = BUDGETS.get(name).facts
    return found


def facts_before(name: str) -> BudgetFacts:
    """What is known of a budget without running anybody's code: of `file.py:object`, that figures are above 0."""
    return BudgetFacts(name) if is_reference(name) else facts_of(name)


NOTED = ("unit", "share", "least", "measured")


def noted(facts: BudgetFacts) -> dict[str, Any]:
    """What a plan notes of a budget for readers that do not know it: nothing of a built-in one."""
    return {} if facts.name in BUDGETS.declared else {key: getattr(facts, key) for key in NOTED}


def facts_from(name: str, note: Mapping[str, Any]) -> BudgetFacts:
    """What is known of a budget of a plan, by what the plan notes of it, without running anybody's code."""
    if name in BUDGETS.declared:
        return facts_of(name)
    return BudgetFacts(name, **{key: note[key] for key in NOTED if key in note})
