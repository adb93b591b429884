"""Which model to build."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True)
class ModelSettings:
    """Which model: a zoo's constructor, its arguments, and where the weights come from."""

    name: str
    zoo: Literal["torchvision"] = "torchvision"
    arguments: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the constructor; `num_classes` is filled in from the data when not given."""
    weights: str | None = None
    """A torchvision weights name such as `IMAGENET1K_V1`, or a path to a `.safetensors` or `.pt`/`.pth` state dict
    (the latter read with `weights_only=True`). None: random, to be trained by `baseline`."""
