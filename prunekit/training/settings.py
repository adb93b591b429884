"""How to train."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Lt

Count = Annotated[int, Ge(0)]


@dataclass(frozen=True)
class TrainSettings:
    """One training run: `baseline` and `finetune` both have this form."""

    epochs: Count = 5
    optimizer: Literal["sgd", "adam", "adamw"] = "sgd"
    lr: Annotated[float, Gt(0)] = 0.05
    momentum: Annotated[float, Ge(0), Lt(1)] = 0.9
    weight_decay: Annotated[float, Ge(0)] = 5e-4
    warmup: Annotated[float, Ge(0), Lt(1)] = 0.1
    """Share of the steps with a linear warm-up; then a cosine to zero (Loshchilov & Hutter 2017)."""
    label_smoothing: Annotated[float, Ge(0), Lt(1)] = 0.0
    shift: Annotated[float, Ge(0), Lt(1)] = 0.0
    """Augmentation: every training image is moved by up to this share of its size, each way; edges are repeated."""
