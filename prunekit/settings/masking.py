"""Which activations are masked, and which gradients clamped."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Lt, MinLen

from prunekit.settings.checked import Checked


@dataclass(frozen=True)
class ActivationSettings(Checked):
    """Activation masks, while fine-tuning and when the result is measured; exactly one of the last two is given.

    Example:
        >>> import prunekit as pk
        >>> masks = pk.ActivationSettings(modules=("layer1.*",), target=0.5)
        >>> pk.JobSettings("mine", pk.ModelSettings("resnet18"), activations=masks).activations.side
        'output'
    """

    modules: Annotated[tuple[str, ...], MinLen(1)]
    """Globs over the paths of modules whose activations are masked."""
    side: Literal["input", "output"] = "output"
    """Whether what a module reads is masked, or what it gives."""
    threshold: Annotated[float, Ge(0)] | None = None
    """Activations whose absolute value is below it are set to zero."""
    target: Annotated[float, Gt(0), Lt(1)] | None = None
    """Share of zeros behind each mask, for which thresholds are found on the calibration images."""


@dataclass(frozen=True)
class ClampSettings(Checked):
    """A gradient clamp: see `prunekit.clamp_activation_grad` and `prunekit.clamp_weight_grad`.

    Example:
        >>> import prunekit as pk
        >>> pk.TrainSettings(clamp_weight_grad=pk.ClampSettings(limit=1.0, by="norm")).clamp_weight_grad.limit
        1.0
    """

    limit: Annotated[float, Gt(0)]
    """The largest absolute value of a gradient's entry, or with `by: norm` of the norm of the whole gradient."""
    by: Literal["value", "norm"] = "value"
    """Whether each entry is clamped, or the whole is scaled down to a norm."""
    modules: Annotated[tuple[str, ...], MinLen(1)] | None = None
    """Globs over module paths; null: every module that the clamp can act on."""
