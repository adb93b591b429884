"""How to train."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Lt

from prunekit.masking.settings import ClampSettings

Count = Annotated[int, Ge(0)]
Precision = Literal["fp32", "bf16", "fp16"]


@dataclass(frozen=True)
class TrainSettings:
    """One training run: `baseline` and `finetune` both have this form."""

    epochs: Count = 5
    optimizer: Literal["sgd", "adam", "adamw"] = "sgd"
    lr: Annotated[float, Gt(0)] = 0.05
    momentum: Annotated[float, Ge(0), Lt(1)] = 0.9
    weight_decay: Annotated[float, Ge(0)] = 5e-4
    warmup: Annotated[float, Ge(0), Lt(1)] = 0.1
    """Share of the steps with a linear warm-up; then a cosine to zero (Loshchilov & Hutter 2017), or to a little above
    it where steps are skipped: those do not move the schedule."""
    label_smoothing: Annotated[float, Ge(0), Lt(1)] = 0.0
    mixup: Annotated[float, Ge(0)] = 0.0
    """Images of a batch are blended in shares drawn from Beta(mixup, mixup), labels likewise (Zhang et al. 2018)."""
    cutmix: Annotated[float, Ge(0)] = 0.0
    """A rectangle of each image is from another, its area drawn by Beta(cutmix, cutmix) (Yun et al. 2019). With both,
    each batch draws one of them."""
    precision: Precision = "fp32"
    """Of the forward pass while training: mixed precision (Micikevicius et al. 2018), with a loss scale for fp16."""
    accumulate: Annotated[int, Ge(1)] = 1
    """Batches whose gradients make one optimizer step."""
    clamp_activation_grad: ClampSettings | None = None
    clamp_weight_grad: ClampSettings | None = None


@dataclass(frozen=True)
class CheckpointSettings:
    """When training is written down so that it can be resumed, and how much of that is kept."""

    every_seconds: Annotated[float, Gt(0)] | None = 60.0
    """Less often where writing would take more than a twentieth of the time. The end of a training is always kept."""
    every_steps: Annotated[int, Ge(1)] | None = None
    """Optimizer steps; as often as it says, whatever that costs."""
    keep: Annotated[int, Ge(1)] = 2
    """How many; the best weights are in each."""
