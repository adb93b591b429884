"""Optimizer and learning-rate schedule from settings."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from prunekit.errors import UsageError
from prunekit.settings.training import TrainSettings

MakeOptimizer = Callable[..., Optimizer]
"""The user's own: called as `make(groups, lr=lr)`, such as an optimizer's class. Groups carry their weight decay."""


def build_optimizer(model: nn.Module, settings: TrainSettings, own: MakeOptimizer | None = None) -> Optimizer:
    """SGD with momentum, Adam, AdamW or the user's own over the trainable parameters.

    Weight decay acts on weights of two or more axes; norms and biases are left alone (He et al. 2019, "Bag of Tricks").

    Raises:
        UsageError: the user's own is asked for and not given, or given and not asked for, or is no optimizer; Nesterov
            momentum is asked for where there is none.
    """
    if (settings.optimizer == "own") != (own is not None):
        given = "was given" if own is not None else "was not given"
        raise UsageError(
            f"optimizer is {settings.optimizer!r} and one of your own {given}: expected 'own' together with one"
        )
    if settings.nesterov and (settings.optimizer != "sgd" or settings.momentum == 0):
        raise UsageError(f"nesterov: expected sgd with momentum, got {settings.optimizer} with {settings.momentum:g}")
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in trainable if p.ndim >= 2], "weight_decay": settings.weight_decay},
        {"params": [p for p in trainable if p.ndim < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if own is None:
        return _OPTIMIZERS[settings.optimizer](groups, settings)
    optimizer = own(groups, lr=settings.lr)
    if not isinstance(optimizer, Optimizer):
        raise UsageError(f"your own optimizer: expected a torch.optim.Optimizer, got {type(optimizer).__name__}")
    return optimizer


def _fused(settings: TrainSettings) -> bool:
    """One pass over weight, gradient and momentum instead of several, on the CPU as on CUDA.

    Not with a loss scale: when the first step is skipped, fused SGD goes on with a momentum that nobody has written.
    Nor of shards: torch 2.15 has no fused SGD of them.
    """
    return settings.precision != "fp16" and settings.sharding != "full"


_OPTIMIZERS: dict[str, Callable[[list[dict[str, Any]], TrainSettings], Optimizer]] = {
    "sgd": lambda groups, s: SGD(groups, lr=s.lr, momentum=s.momentum, nesterov=s.nesterov, fused=_fused(s)),
    "adam": lambda groups, s: Adam(groups, lr=s.lr, fused=_fused(s)),
    "adamw": lambda groups, s: AdamW(groups, lr=s.lr, fused=_fused(s)),
}


def build_schedule(optimizer: Optimizer, steps: int, warmup: float, restarts: Sequence[int] = ()) -> LambdaLR:
    """Linear warm-up over the first `warmup` share of `steps`, then a cosine to zero (Loshchilov & Hutter 2017).

    Args:
        restarts: steps before which all of this begins anew, ascending, each round with its own share of warm-up: the
            learning rate is rewound (Renda et al. 2020).
    """
    edges = [0, *restarts, steps]

    def factor(step: int) -> float:
        which = min(bisect_right(edges, step), len(edges) - 1)
        begin, length = edges[which - 1], edges[which] - edges[which - 1]
        step, rising = step - begin, round(length * warmup)
        if step < rising:
            return (step + 1) / (rising + 1)
        return 0.5 * (1 + math.cos(math.pi * (step - rising) / max(1, length - rising)))

    return LambdaLR(optimizer, factor)
