"""Small nets written by hand, each with one thing in it that pruning gets wrong easily."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

Case = tuple[nn.Module, tuple[Any, ...]]
Factory = Callable[[], Case]
CASES: dict[str, tuple[Factory, tuple[str, ...]]] = {}
"""Name -> how to make the net with its example input, and parameters whose first axis must stay prunable."""


def case(*prunable: str) -> Callable[[Factory], Factory]:
    """Registers a net; `prunable` names parameters whose outputs must be free even after the trial."""

    def register(factory: Factory) -> Factory:
        CASES[factory.__name__] = (factory, prunable)
        return factory

    return register


def tokens(width: int = 6, length: int = 5) -> tuple[Tensor]:
    return (torch.randn(2, length, width, generator=torch.Generator().manual_seed(1)),)


def conv(inputs: int, outputs: int, kernel: int = 3, **options: Any) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, kernel, **options)


def weight(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.zeros(shape))
