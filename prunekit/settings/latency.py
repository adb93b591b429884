"""What to time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge, MinLen

from prunekit.settings.checked import Checked
from prunekit.vocabulary import DtypeName, MemoryFormat, PositiveInt, RuntimeName


@dataclass(frozen=True)
class LatencySettings(Checked):
    """What is timed: every runtime with every batch, CPU thread count, dtype and memory format that it takes.

    Example:
        >>> import prunekit as pk
        >>> timed = pk.LatencySettings(batches=(1, 8), dtypes=("fp32", "bf16"))
        >>> pk.JobSettings("mine", pk.ModelSettings("resnet18"), latency=timed).latency.runtimes
        ('eager',)
    """

    batches: Annotated[tuple[PositiveInt, ...], MinLen(1)] = (1, 16)
    """Batch sizes to time."""
    threads: Annotated[tuple[PositiveInt, ...], MinLen(1)] = (1,)
    """Numbers of CPU threads to time with."""
    repeats: Annotated[int, Ge(5)] = 30
    """How often each is timed."""
    runtimes: Annotated[tuple[RuntimeName, ...], MinLen(1)] = ("eager",)
    """Runtimes to time in."""
    dtypes: Annotated[tuple[DtypeName, ...], MinLen(1)] = ("fp32",)
    """Types of numbers to time in."""
    memory_formats: Annotated[tuple[MemoryFormat, ...], MinLen(1)] = ("contiguous",)
    """Memory formats of the parameters and the input; runtimes that choose layouts themselves know `contiguous`
    alone."""
    explain: bool = True
    """Whether a job looks for what keeps the pruned model from its ideal speed, in eager on the CPU, first setting."""
