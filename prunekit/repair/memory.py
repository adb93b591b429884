"""How a repair is fitted into memory: images at a time, where passes go on from, positions of each layer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from prunekit.calibration.layers import Layer
from prunekit.calibration.patches import gram_bytes
from prunekit.planning import Plan
from prunekit.repair.grouped import CHUNK, MOST_GROUPS
from prunekit.repair.lifetimes import Lifetimes
from prunekit.settings.repair import RepairSettings

FIT, HELD, RUNNING = 3 / 8, 1 / 2, 1 / 8
"""Shares of the limit: of one layer's fit, of what is kept of all images between passes, and of a batch that runs."""
SAMPLES = 2
"""Images that show what a pass takes."""
MOST_IMAGES = 256
FEWEST_ROWS = 64
ROOM = 2
"""A running batch takes so many times what its tensors do: operators have buffers of their own."""
GRAMS = 5
"""Matrices of a Gram matrix's size that a fit holds: itself, what its factors are made of, the best one so far."""
OUTPUTS = 9
"""Float64 values that it holds for each sampled output: as it is, as it should be, and what they are made of."""
CHUNKS = 3
"""Blocks of rows that a fit of many groups holds."""

PAIR_ROWS = 2**18
PAIR_PRODUCTS = 2**30
"""Multiply-accumulates of a derivative of two layers, and again of its transpose, taken about twenty times a pair."""
EQUATIONS = 16
"""Sampled outputs for each weight of two layers, at least, for them to be fitted together."""
HALO = 2
"""Positions that the first layer of a pair makes for each that the second does, at borders of windows and behind."""
COPIES = 3
"""Blocks of a pair's inputs that its fit holds; what its layers give is held twice as often."""


def kept_groups(layer: Layer, plan: Plan) -> list[int]:
    """Groups of a convolution of which any output is kept."""
    size = plan.channel_map.shapes[layer.weight][layer.axes[0]] // layer.reading.groups
    return sorted(set((np.asarray(plan.kept(layer.weight, layer.axes[0])) // size).tolist()))


def kept_channels(layer: Layer, plan: Plan) -> torch.Tensor:
    """Kept channels of a layer's input, group after group."""
    axis = layer.axes[1]
    columns, width = np.asarray(plan.kept(layer.weight, axis)), plan.channel_map.shapes[layer.weight][axis]
    parts = [columns + group * width for group in kept_groups(layer, plan)]
    return torch.from_numpy(np.concatenate([np.zeros(0, dtype=np.int64), *parts]))


@dataclass(frozen=True)
class FitSize:
    """Memory of a layer's fit: `fixed` bytes and `each` for every row, of which there are `most`."""

    fixed: int
    each: int
    most: int

    def rows(self, settings: RepairSettings) -> int:
        """How many rows to fit on there are, and is memory for."""
        free = settings.memory_bytes * FIT - self.fixed
        return int(np.clip(free / self.each / (1 + settings.held_out), FEWEST_ROWS, min(settings.rows, self.most)))

    def bytes(self, rows: int, settings: RepairSettings) -> int:
        """What that many rows take."""
        return self.fixed + int(self.each * rows * (1 + settings.held_out))


def chunk_values(settings: RepairSettings) -> int:
    """Values of a block of rows of a fit of many groups."""
    return min(CHUNK, int(settings.memory_bytes * FIT / 2 / CHUNKS / 8))


def fit_size(layer: Layer, plan: Plan, images: int, item: int, settings: RepairSettings) -> FitSize:
    """Rows are held as they are and again with a constant, of one group; outputs a few times in float64.

    Args:
        layer: found with `SAMPLES` images.
        images: how many there are.
        item: bytes of a value that the model computes.
    """
    outputs, width = (plan.channel_map.shapes[layer.weight][axis] for axis in layer.axes)
    groups = max(1, len(kept_groups(layer, plan)))
    columns = len(kept_channels(layer, plan)) * layer.reading.taps
    sampled, most = item * (columns + 2 * outputs), max(FEWEST_ROWS, layer.rows * images // SAMPLES)
    if groups > MOST_GROUPS:
        return FitSize(CHUNKS * 8 * chunk_values(settings), sampled, most)
    pair = pair_size(layer, plan, item, most, settings)
    by_channels = too_wide(layer, plan, settings)
    kept_outputs = -(-len(np.asarray(plan.kept(layer.weight, layer.axes[0]))) // groups)
    wide = width * layer.reading.groups if by_channels else columns // groups
    gram = gram_bytes(width if by_channels else columns // groups)
    fixed = GRAMS * gram + pair.rows * pair.each
    return FitSize(fixed, sampled + (16 if by_channels else 8) * (wide + 1) + 8 * OUTPUTS * kept_outputs, most)


class PairSize(NamedTuple):
    """Rows on which a layer and the one before it are fitted together, and the bytes of each; 0: they are not."""

    rows: int
    each: int


def pair_size(layer: Layer, plan: Plan, item: int, most: int, settings: RepairSettings) -> PairSize:
    """See `fit_size`; `most` is how many rows there are."""
    source = layer.source
    wanted = settings.joint_steps and settings.sequential and settings.fit == "patch"
    if source is None or not wanted or source.reading.groups * layer.reading.groups > 1:
        return PairSize(0, 0)
    read, hidden = (len(kept_channels(each, plan)) for each in (source, layer))
    columns, taps = read * source.reading.taps + 1, layer.reading.taps
    outputs = len(np.asarray(plan.kept(layer.weight, layer.axes[0])))
    each = item * COPIES * (HALO * (read + 2 * hidden) + 4 * outputs)
    products = hidden * (columns + 2 * taps * outputs)
    free = settings.memory_bytes * FIT / 2
    rows = int(min(PAIR_ROWS, most, PAIR_PRODUCTS / products, free / each / (1 + settings.held_out)))
    enough = rows * outputs >= EQUATIONS * (hidden * columns + outputs * (taps * hidden + 1))
    return PairSize(rows, each) if enough else PairSize(0, 0)


def too_wide(layer: Layer, plan: Plan, settings: RepairSettings) -> bool:
    """Whether a layer is fitted by channels: asked for, or because of the memory that patches would take."""
    columns = len(np.asarray(plan.kept(layer.weight, layer.axes[1]))) * layer.reading.taps
    wide = GRAMS * gram_bytes(columns) > settings.memory_bytes * FIT
    return settings.fit == "channel" or (settings.fit == "patch" and wide)


def cuts(firsts: Sequence[int], lifetimes: Lifetimes, images: int, limit: float) -> list[int]:
    """For each layer in turn the number of the call from which passes go on to it; 0 is the start.

    Only where what is live of all images is within the limit: the last such call that is not behind what is wanted.

    Args:
        firsts: for each layer the first call that is still wanted of it.
    """
    held, found, last = lifetimes.held_bytes(), list[int](), 0
    affordable = sorted(number for number, size in held.items() if size * images <= limit)
    for i in range(len(firsts)):
        earliest = min(firsts[i:])
        last = max([last, *(number for number in affordable if number <= earliest)])
        found.append(last)
    return found


def held(cuts_: Iterable[int], lifetimes: Lifetimes, images: int) -> int:
    """The most that is kept of all images at some cuts."""
    sizes = lifetimes.held_bytes()
    return int(max((sizes.get(cut, 0.0) for cut in cuts_), default=0.0) * images)


def batch_size(lifetimes: Iterable[Lifetimes], images: int, settings: RepairSettings) -> int:
    """Images at a time."""
    each = ROOM * max(one.peak_bytes() for one in lifetimes)
    return int(np.clip(settings.memory_bytes * RUNNING / max(1.0, each), 1, min(images, MOST_IMAGES)))
