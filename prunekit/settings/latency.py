"""What to time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge, MinLen

from prunekit.vocabulary import DtypeName, MemoryFormat, PositiveInt, RuntimeName


@dataclass(frozen=True)
class LatencySettings:
    """What is timed: every runtime with every batch, CPU thread count, dtype and memory format that it takes."""

    batches: Annotated[tuple[PositiveInt, ...], MinLen(1)] = (1, 16)
    threads: Annotated[tuple[PositiveInt, ...], MinLen(1)] = (1,)
    repeats: Annotated[int, Ge(5)] = 30
    runtimes: Annotated[tuple[RuntimeName, ...], MinLen(1)] = ("eager",)
    dtypes: Annotated[tuple[DtypeName, ...], MinLen(1)] = ("fp32",)
    memory_formats: Annotated[tuple[MemoryFormat, ...], MinLen(1)] = ("contiguous",)
    """Of the parameters and the input; runtimes that choose layouts themselves know `contiguous` alone."""
    explain: bool = True
    """Whether a job looks for what keeps the pruned model from its ideal speed, in eager on the CPU, first setting."""
