"""What to time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge, MinLen

PositiveInt = Annotated[int, Ge(1)]


@dataclass(frozen=True)
class LatencySettings:
    """What is timed: every batch with every thread count, on the CPU and on CUDA where there is one."""

    batches: Annotated[tuple[PositiveInt, ...], MinLen(1)] = (1, 16)
    threads: Annotated[tuple[PositiveInt, ...], MinLen(1)] = (1,)
    repeats: Annotated[int, Ge(5)] = 30
