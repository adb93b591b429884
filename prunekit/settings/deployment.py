"""Settings of what is timed, where, and of changes to the compact model for its deployment."""

import re
from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge, MinLen

from prunekit.errors import SettingsError
from prunekit.known_names import DtypeName, MemoryFormat, PositiveFloat, PositiveInt, RuntimeName
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


HERE = ("auto", "cpu", "cuda", "mps")
"""Devices of this machine, without their numbers."""
DEVICE = (
    r"(auto|mps|cpu|cuda(:\d+)?)|(?!(?i:auto|mps|cpu|cuda|gpu|xpu|hip|npu)\d*$)"
    r"[A-Za-z0-9](?:[A-Za-z0-9_.-]{0,40}[A-Za-z0-9])?"
)
"""Names of devices; those of other machines are names of folders as well."""
DEVICE_MEANT = "cpu, cuda, cuda:n, or the name of another machine, such as pi5, of letters, digits and _.-"


def is_elsewhere(device: str) -> bool:
    """Return whether a device is another machine."""
    return device.partition(":")[0] not in HERE


@dataclass(frozen=True)
class Target(Checked):
    """The target of budgets of time and memory: runtime, device and batch; memory depends on batch and dtype alone.

    Example:
        >>> import prunekit as pk
        >>> target = pk.Target("onnxruntime", batch=16)  # for pk.prune(model, x, speedup=2.0, target=target)
        >>> target.runtime, target.threads
        ('onnxruntime', 1)
        >>> pk.Target("onnx")
        Traceback (most recent call last):
        prunekit.errors.SettingsError: Target: runtime: expected the name of ... did you mean 'onnxruntime'...
    """

    runtime: RuntimeName = "eager"
    """Runtime."""
    device: str = "cpu"
    """Device: cpu, cuda or cuda:n; or a name of your own for another machine, such as pi5, which measures kits."""
    batch: PositiveInt = 1
    """Images in a batch."""
    threads: PositiveInt = 1
    """CPU threads."""
    dtype: DtypeName = "fp32"
    """Dtype of weights and activations; `int8` means the quantized file, in runtimes that have one."""
    memory_format: MemoryFormat = "contiguous"
    """Memory format; runtimes that choose layouts themselves take `contiguous` alone."""
    block: PositiveInt = 8
    """Channel counts are multiples of this and of `round_to`, where possible: kernels compute in blocks."""
    limit_s: PositiveFloat = 600.0
    """Seconds for measuring a budget of time: profile, plans and final model together; of another machine, each kit."""
    command: str | None = None
    """For another machine: what takes the kit in the folder {kit} there, times it, and brings `times.json`, for the
    shell. null: that is done by hand. It is code: recipes need --allow-code."""

    def __post_init__(self) -> None:
        """Check the values."""
        super().__post_init__()
        if not re.fullmatch(DEVICE, self.device):
            raise SettingsError(f"Target: device: expected {DEVICE_MEANT}, got {self.device!r}")
        if self.command and "{kit}" not in self.command:
            raise SettingsError(f"Target: command: expected {{kit}} in it, where the folder goes, got {self.command!r}")

    @property
    def elsewhere(self) -> bool:
        """True if the device is another machine, which times what a kit holds."""
        return is_elsewhere(self.device)

    @property
    def as_latency(self) -> LatencySettings:
        """The settings of a measurement on the target."""
        return LatencySettings(
            (self.batch,),
            (self.threads,),
            runtimes=(self.runtime,),
            dtypes=(self.dtype,),
            memory_formats=(self.memory_format,),
        )
