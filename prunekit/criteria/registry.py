"""Importance scores by name, each with what it needs. Filled at import, by `criterion`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
from torch import Tensor, nn

from prunekit.calibration import ChannelStats, TaylorTerms
from prunekit.calibration.patch_stats import PatchStats
from prunekit.catalog import CriterionFacts, Need
from prunekit.errors import UsageError, nearest

if TYPE_CHECKING:
    from prunekit.channels import ChannelMap

Scores = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Evidence:
    """All that an importance score may look at."""

    channel_map: ChannelMap
    modules: Mapping[str, nn.Module]
    parameters: Mapping[str, Tensor]
    stats: ChannelStats | None
    gradients: TaylorTerms | None
    seed: int
    patches: PatchStats | None = None


@dataclass(frozen=True)
class Criterion:
    """An importance score: a pure function from the evidence to one score for each label, shape (n_labels,)."""

    facts: CriterionFacts
    function: Callable[[Evidence], Scores]

    @property
    def needs(self) -> tuple[Need, ...]:
        """What it looks at."""
        return self.facts.needs

    @property
    def comparable(self) -> bool:
        """Whether scores of different channel groups can be ranked together as they are."""
        return self.facts.comparable


_CRITERIA: dict[str, Criterion] = {}


def criterion(facts: CriterionFacts) -> Callable[[Callable[[Evidence], Scores]], Callable[[Evidence], Scores]]:
    """Registers an importance score.

    Raises:
        ValueError: the name is taken.
    """

    def register(function: Callable[[Evidence], Scores]) -> Callable[[Evidence], Scores]:
        name = facts.name
        if name in _CRITERIA:
            raise ValueError(f"criterion {name!r} is registered already, as {_CRITERIA[name].function.__qualname__}")
        _CRITERIA[name] = Criterion(facts, function)
        return function

    return register


def get_criterion(name: str) -> Criterion:
    """The criterion of that name.

    Raises:
        UsageError: there is none.
    """
    if name not in _CRITERIA:
        raise UsageError(f"no criterion is called {name!r}; {nearest(name, _CRITERIA)}")
    return _CRITERIA[name]


def criterion_names() -> tuple[str, ...]:
    """Every registered name, sorted."""
    return tuple(sorted(_CRITERIA))
