"""The layout of weights in memory: it is random, and may change a time by more than the effect that is measured.

A process lays a model out once, and all that it measures is of that layout, however narrow the interval is (Mytkowicz
et al., "Producing wrong data without doing anything obviously wrong!", 2009). If the weights are moved every other
round, a process measures many layouts (Curtsinger and Berger, "Stabilizer", 2013). How much faster mobilenet_v2 at a
quarter of its width is in eager came out 2.6 % apart between twelve processes with a layout each, 12 % between eight in
another hour, and 1.0 % between ten that moved it (standard deviations; AMD EPYC, one thread, batch 1, 224 px).
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

MOST_BYTES = 2**21
"""Largest gap before a model's tensors. There are none between them, as in a model that was just built: small tensors
would need more pages."""


class WeightMover:
    """Moves a module's parameters and buffers to other addresses in memory when it is called; nothing else changes.

    The gap before them stays allocated until the next call, so that they are moved elsewhere again.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module, self.random, self.gap = module, random.Random(), torch.empty(0)

    def __call__(self) -> None:
        """Move them, behind a gap of random size."""
        self.gap = torch.empty(self.random.randrange(MOST_BYTES), dtype=torch.uint8)
        tensors = list(_movable(self.module))
        with torch.no_grad():
            elsewhere = [_copy(tensor) for tensor in tensors]  # all before any is free: none takes the place of another
        for tensor, data in zip(tensors, elsewhere, strict=True):
            tensor.data = data


def _copy(tensor: Tensor) -> Tensor:
    with torch.inference_mode(tensor.is_inference()):
        return tensor.data.clone()


@contextmanager
def weight_movers(*modules: nn.Module) -> Iterator[list[WeightMover]]:
    """Yield the movers of a user's modules, and put the tensors back afterwards, as others may share them."""
    before = {tensor: tensor.data for module in modules for tensor in _movable(module)}
    try:
        yield [WeightMover(module) for module in modules]
    finally:
        for tensor, data in before.items():
            tensor.data = data


def _movable(module: nn.Module) -> Iterator[Tensor]:
    """Yield the tensors on the CPU that share their memory with no other and have no gaps, which copies would lose."""
    for tensor in (*module.parameters(), *module.buffers()):
        plain = tensor.layout == torch.strided and type(tensor.data) is Tensor and tensor.device.type == "cpu"
        if plain and torch.ops.aten.is_non_overlapping_and_dense(tensor):
            yield tensor
