"""Which model to build."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from prunekit.settings.checked import Checked


@dataclass(frozen=True)
class ModelSettings(Checked):
    """Which model: a zoo's constructor, its arguments, and where the weights come from.

    Example:
        >>> import prunekit as pk
        >>> pk.ModelSettings("resnet18", weights="IMAGENET1K_V1").zoo
        'torchvision'
        >>> pk.ModelSettings("resnet56", zoo="cifr")
        Traceback (most recent call last):
        prunekit.errors.SettingsError: ModelSettings: zoo: expected one of ... got 'cifr'; did you mean 'cifar'?
    """

    name: str
    """Name of the model in its zoo; of an own one the factory, `file.py:factory`."""
    zoo: Literal["torchvision", "cifar", "timm", "hf", "own"] = "torchvision"
    """Where the model is from: torchvision, the package's own ResNets, timm, transformers, or your own code. `cifar`:
    ResNets for 32x32 images, `resnet8` to `resnet110`. `timm`: any of its models (extra `timm`). `hf`: the
    image classifier of a transformers model type such as `vit`, in its default configuration (extra `hf`). `own`: what
    `--model file.py:factory` builds."""
    arguments: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the constructor, for `hf` of the configuration; `num_classes` is filled in from the data
    when not given."""
    weights: str | None = None
    """A torchvision weights name such as `IMAGENET1K_V1`, or a path to a `.safetensors` or `.pt`/`.pth`/`.th` state
    dict (the latter read with `weights_only=True`). None: random, to be trained by `baseline`."""
    origin: str | None = None
    """Where weights for this recipe can be had; shown when their file is missing."""
