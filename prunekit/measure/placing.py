"""Where weights lie in memory: a matter of chance, which may be worth more than what is measured.

A process lays a model out once, and all that it measures is of that layout, however narrow the interval is (Mytkowicz
et al., "Producing wrong data without doing anything obviously wrong!", 2009). Laid out anew every other round, what a
process measures is of many layouts (Curtsinger and Berger, "Stabilizer", 2013). How much faster mobilenet_v2 at a
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
"""Of the gap before a model's tensors, which lie one after the other as those of a model that was just built do: with
gaps between them small ones would need more pages than they do."""


class Placement:
    """Called, it lays a module's parameters and buffers elsewhere in memory; nothing but their addresses changes.

    The gap before them stays until the next call: that the next ones lie elsewhere is up to it.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module, self.random, self.gap = module, random.Random(), torch.empty(0)

    def __call__(self) -> None:
        self.gap = torch.empty(self.random.randrange(MOST_BYTES), dtype=torch.uint8)
        tensors = list(_movable(self.module))
        with torch.no_grad():
            elsewhere = [_copy(tensor) for tensor in tensors]  # all before any is free: none goes where one was
        for tensor, data in zip(tensors, elsewhere, strict=True):
            tensor.data = data


def _copy(tensor: Tensor) -> Tensor:
    with torch.inference_mode(tensor.is_inference()):
        return tensor.data.clone()


@contextmanager
def placements(*modules: nn.Module) -> Iterator[list[Placement]]:
    """Of a user's own modules: their tensors are back where they were when it is left, as others may share them."""
    before = {tensor: tensor.data for module in modules for tensor in _movable(module)}
    try:
        yield [Placement(module) for module in modules]
    finally:
        for tensor, data in before.items():
            tensor.data = data


def _movable(module: nn.Module) -> Iterator[Tensor]:
    """Tensors on the CPU that have their memory for themselves; a copy of others would be laid out otherwise."""
    for tensor in (*module.parameters(), *module.buffers()):
        plain = tensor.layout == torch.strided and type(tensor.data) is Tensor and tensor.device.type == "cpu"
        if plain and torch.ops.aten.is_non_overlapping_and_dense(tensor):
            yield tensor
