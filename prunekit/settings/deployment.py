"""Settings of what is timed, and of changes to the compact model for its deployment."""

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
    """Batch sizes."""
    threads: Annotated[tuple[PositiveInt, ...], MinLen(1)] = (1,)
    """Numbers of CPU threads."""
    repeats: Annotated[int, Ge(5)] = 30
    """Timings of each setting."""
    runtimes: Annotated[tuple[RuntimeName, ...], MinLen(1)] = ("eager",)
    """Runtimes."""
    dtypes: Annotated[tuple[DtypeName, ...], MinLen(1)] = ("fp32",)
    """Dtypes; `int8` times the quantized file, in runtimes that have one."""
    memory_formats: Annotated[tuple[MemoryFormat, ...], MinLen(1)] = ("contiguous",)
    """Memory formats; runtimes that choose layouts themselves take `contiguous` alone."""
    explain: bool = True
    """Finds what keeps the pruned model from its ideal speed, in eager mode on the CPU."""


@dataclass(frozen=True)
class DeploySettings(Checked):
    """Changes to a copy of the compact model, which becomes a second model folder; each is verified.

    Budgets of time are met by that copy: `latency_ms` is its time, and a `speedup` is over the dense model with the
    same changes. The report's table of speedups is over the unchanged dense model.

    Example:
        >>> import prunekit as pk
        >>> deploy = pk.DeploySettings(fold_batchnorm=True)
        >>> pk.JobSettings("mine", pk.ModelSettings("resnet18"), deploy=deploy).deploy.wanted
        True
    """

    fold_batchnorm: bool = False
    """Folds BatchNorms into the layers before them, where possible."""
    channels_last: bool = False
    """Gives weights and timed images the channels-last memory format."""

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
    """Dtype of stored values and computations."""
    images: PositiveInt = 256
    """Calibration images for the ranges of activations."""
    max_drop: Annotated[float, Ge(0)] | None = 1.0
    """Points of the main score on validation images (or of a perplexity) that quantization may cost. Layers return to
    float, the most sensitive first, until the cost is within this. null: any cost."""
