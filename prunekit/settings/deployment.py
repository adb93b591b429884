"""Settings of what is timed, and of changes to the compact model for its deployment."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge, MinLen

from prunekit.known_names import DtypeName, MemoryFormat, PositiveInt, RuntimeName
from prunekit.settings.validation import Checked


@dataclass(frozen=True)
class LatencySettings(Checked):
    """Settings to time: every runtime with every batch, CPU thread count, dtype and memory format that it supports.

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
    """Number of timings of each."""
    runtimes: Annotated[tuple[RuntimeName, ...], MinLen(1)] = ("eager",)
    """Runtimes to time in."""
    dtypes: Annotated[tuple[DtypeName, ...], MinLen(1)] = ("fp32",)
    """Dtypes to time in; `int8` is that of the quantized file, in runtimes that have one."""
    memory_formats: Annotated[tuple[MemoryFormat, ...], MinLen(1)] = ("contiguous",)
    """Memory formats of the parameters and the input; runtimes that choose layouts themselves know `contiguous`
    alone."""
    explain: bool = True
    """Whether a job looks for what keeps the pruned model from its ideal speed, in eager mode on the CPU."""


@dataclass(frozen=True)
class DeploySettings(Checked):
    """Changes to a copy of the compact model, which becomes a second model folder; each is verified.

    Budgets of time are then met by that model: every plan is timed as it would be deployed, beside the dense model with
    the same changes, so that a speedup is that of pruning alone; `latency_ms` is of the deployed model. The table of
    speedups in the report is over the unchanged dense model, and has the effect of both.

    Example:
        >>> import prunekit as pk
        >>> deploy = pk.DeploySettings(fold_batchnorm=True)
        >>> pk.JobSettings("mine", pk.ModelSettings("resnet18"), deploy=deploy).deploy.wanted
        True
    """

    fold_batchnorm: bool = False
    """Whether every BatchNorm that can be is folded into the layer before it."""
    channels_last: bool = False
    """Whether weights are in channels-last memory format, and the model is timed on such images."""

    @property
    def wanted(self) -> bool:
        """True if any change is asked for."""
        return self.fold_batchnorm or self.channels_last


@dataclass(frozen=True)
class QuantizeSettings(Checked):
    """Quantization of the exported file to int8, after pruning: weights per channel, activations calibrated.

    Example:
        >>> import prunekit as pk
        >>> pk.QuantizeSettings(max_drop=0.5).dtype
        'int8'
    """

    dtype: Literal["int8"] = "int8"
    """What is stored and computed in."""
    images: PositiveInt = 256
    """Number of calibration images, without labels, that ranges of activations are taken from."""
    max_drop: Annotated[float, Ge(0)] | None = 1.0
    """The most points of the main score that quantization may cost, on validation images: layers are returned to float,
    the most sensitive first, until it costs no more. A score in another unit may fall by so much of that, and a
    perplexity may rise by so much. null: however much it costs."""
