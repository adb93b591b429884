"""Weight and gradient masks together, and how much they remove."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from prunekit.masking.gradients import GradientMasks
from prunekit.masking.weights import WeightMasks
from prunekit.planning import Plan


@contextmanager
def masked(
    model: nn.Module, plan: Plan, optimizer: Optimizer | None = None, *, restore: bool = False
) -> Iterator[nn.Module]:
    """Runs with a plan's weight masks and gradient masks; yields the model.

    Args:
        model, plan, optimizer, restore: as for `WeightMasks`.
    """
    weights = WeightMasks(model, plan, optimizer, restore=restore)
    with weights, GradientMasks(model, plan, entries=weights.entries):
        yield model


@dataclass(frozen=True)
class Sparsity:
    """How much of a model is gone."""

    weights: float
    """Share of exact zeros among the entries of all weights with two or more axes, in 0..1."""
    channels: float
    """Share of the prunable channels that the plan removes, in 0..1; channels that go together count once."""


def sparsity(model: nn.Module, plan: Plan) -> Sparsity:
    """Measures the sparsity of a masked model.

    Biases and the parameters of norms are left out of `weights`: fresh ones are zero without being pruned.
    """
    weights = [parameter.detach() for parameter in model.parameters() if parameter.ndim >= 2]
    zeros = sum(weight.numel() - int(torch.count_nonzero(weight)) for weight in weights)
    free = np.concatenate([group.labels for group in plan.channel_map.groups] or [np.zeros(0, np.int64)])
    removed = int(np.count_nonzero(~plan.keep[free]))
    total = sum(weight.numel() for weight in weights)
    return Sparsity(weights=zeros / total if total else 0.0, channels=removed / len(free) if len(free) else 0.0)
