"""Which channels go, and how many may stay."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Le

Share = Annotated[float, Gt(0), Le(1)]
PositiveInt = Annotated[int, Ge(1)]
Criterion = Literal[
    "l1",
    "l2",
    "lamp",
    "fpgm",
    "bn_scale",
    "activation",
    "activation_rms",
    "apoz",
    "wanda",
    "obs",
    "elimination",
    "chip",
    "hrank",
    "taylor",
    "taylor2",
    "obd",
    "random",
]
Megabytes = Annotated[float, Gt(0)]
Scope = Literal["uniform", "global", "per_mac"]
"""Of each group the same share; the lowest scores of all groups; or the lowest for what they cost: MACs, where the
budget is one of MACs, and else whatever the budget that binds counts."""
SHARES = ("channels", "macs", "params")
"""Budgets that are shares of the dense model."""


@dataclass(frozen=True)
class BudgetSettings:
    """What may be left; at least one is given, and a plan meets all of them."""

    channels: Share | None = None
    """Share of the channels that are not locked."""
    macs: Share | None = None
    """Share of the multiply-accumulates of one sample."""
    params: Share | None = None
    """Share of the parameters."""
    size_mb: Megabytes | None = None
    """Bytes of all parameters and buffers as they are saved, in units of 10^6."""


@dataclass(frozen=True)
class PruneSettings:
    """Which channels go."""

    budget: BudgetSettings = field(default_factory=lambda: BudgetSettings(macs=0.5))
    criterion: Criterion = "l2"
    scope: Scope = "uniform"
    round_to: PositiveInt = 1
    """Channel counts of every pruned axis are multiples of this where the axis allows it."""
    min_channels: PositiveInt = 1
    exclude: tuple[str, ...] = ()
    """Globs over module paths whose output channels stay whole."""
    ratios: dict[str, Share] = field(default_factory=dict)
    """Glob over module paths -> share of their output channels to keep."""
