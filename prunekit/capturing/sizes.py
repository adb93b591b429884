"""How much full copies of what layers read and make would take."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from prunekit.capturing.hooks import LayerHooks, What, Where
from prunekit.capturing.layers import Layers
from prunekit.capturing.store import mib
from prunekit.context import same_random_state, training_mode
from prunekit.inputs import call

SAMPLE = 32 * 2**20
"""Bytes: more than caches hold, so that the time of more grows with their number."""


@dataclass(frozen=True)
class Size:
    """What one forward pass would add to a record, without a reducer.

    Attributes:
        tensors: how many.
        bytes: of all of them; gradients count as much as what they are of.
        channels: of all of them together.
        copy_ms: what copying as many bytes takes here, measured; None where that was not.
    """

    tensors: int
    bytes: int
    channels: int
    copy_ms: float | None = None

    def __str__(self) -> str:
        more = "" if self.copy_ms is None else f", about {self.copy_ms:.2g} ms to copy"
        return f"{self.tensors} tensors, {mib(self.bytes)} for each forward pass{more}"


class _Sizes(LayerHooks):
    def __init__(self, model: nn.Module, layers: Layers, what: tuple[What, ...]) -> None:
        super().__init__(model, layers, what)
        self.tensors = self.bytes = self.channels = 0

    def seen(self, where: Where, values: Tensor, axis: int) -> None:
        self.tensors += 1
        self.bytes += values.numel() * values.element_size()
        self.channels += values.shape[axis] if values.dim() else 1


def copy_ms(count: int, device: torch.device) -> float:
    """Milliseconds that copies of so many bytes to the CPU's memory take: the best of three, of 32 MiB at most."""
    sample = torch.ones(max(1, min(count, SAMPLE)), dtype=torch.uint8, device=device)
    taken = []
    for _ in range(3):
        start = time.perf_counter()
        copied = sample.to("cpu", copy=True)
        taken.append(time.perf_counter() - start)
        del copied
    return 1000 * min(taken) * count / len(sample)


def size_of(model: nn.Module, layers: Layers, what: What | Iterable[What], example: tuple[Any, ...]) -> Size:
    """What full copies of one forward pass take: counted in one, in eval mode without gradients.

    Args:
        model, layers, what: as for `capture`.
        example: see `prunekit.inputs.example`.

    Raises:
        UsageError: as for `capture`.
    """
    several: tuple[What, ...] = (what,) if isinstance(what, str) else tuple(what)
    sides: list[tuple[What, ...]] = [("input",) if one in ("input", "grad_input") else ("output",) for one in several]
    with training_mode(model, False), torch.no_grad(), same_random_state():
        counted = []
        for side in dict.fromkeys(sides):
            with _Sizes(model, layers, side) as sizes:
                call(model, example)
            counted += [sizes] * sides.count(side)
    return Size(*(sum(getattr(one, name) for one in counted) for name in ("tensors", "bytes", "channels")))
