"""The memory budget of a repair: images at a time, calls from which passes continue, positions of each layer."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from prunekit.planning.plan import Plan
from prunekit.repair.least_squares import CHUNK, MOST_GROUPS
from prunekit.settings.calibration import RepairSettings
from prunekit.statistics.linear_layers import LayerCall
from prunekit.statistics.patches import gram_bytes
from prunekit.statistics.resumable_forward import Lifetimes

FIT, HELD, RUNNING = 3 / 8, 1 / 2, 1 / 8
"""Shares of the limit: for one layer's fit, for tensors of all images between passes, and for a running batch."""
SAMPLES = 2
"""Images on which the memory of a pass is measured."""
MOST_IMAGES = 256
FEWEST_ROWS = 64
ROOM = 2
"""Memory of a running batch, by that of its tensors: operators have buffers of their own."""
GRAMS = 5
"""Matrices of a Gram matrix's size that a fit holds: itself, its damped copy, its factor, the best one so far."""
OUTPUTS = 9
"""Float64 values that a fit holds for each sampled output: as it is, as it should be, and intermediate ones."""
CHUNKS = 3
"""Blocks of rows that a fit of many groups holds."""

PAIR_ROWS = 2**18
PAIR_PRODUCTS = 2**30
"""Multiply-accumulates of a derivative of two layers, or of its transpose; a pair takes about twenty of each."""
EQUATIONS = 16
"""Sampled outputs for each weight of two layers, at least, for them to be fitted together."""
HALO = 2
"""Positions of a pair's first layer for each of the second's, with those at the borders of windows."""
COPIES = 3
"""Blocks of a pair's inputs that its fit holds; it holds twice as many of outputs."""


def kept_groups(layer: LayerCall, plan: Plan) -> list[int]:
    """Return the groups of a convolution of which any output is kept."""
    size = plan.channel_map.shapes[layer.weight][layer.axes[0]] // layer.geometry.groups
    return sorted(set((np.asarray(plan.kept(layer.weight, layer.axes[0])) // size).tolist()))


def kept_channels(layer: LayerCall, plan: Plan) -> torch.Tensor:
    """Return the kept channels of a layer's input, group after group."""
    axis = layer.axes[1]
    columns, width = np.asarray(plan.kept(layer.weight, axis)), plan.channel_map.shapes[layer.weight][axis]
    if layer.weight in plan.lost:  # what it reads is gone, but a sample has channels
        return torch.zeros(1, dtype=torch.int64)
    parts = [columns + group * width for group in kept_groups(layer, plan)]
    return torch.from_numpy(np.concatenate([np.zeros(0, dtype=np.int64), *parts]))


@dataclass(frozen=True)
class FitSize:
    """Memory of a layer's fit: `fixed` bytes, and `each` for every row, of which there are at most `most`.

    The row's sample takes `sampled` of the bytes of `each`.
    """

    fixed: int
    each: int
    most: int
    sampled: int

    def rows(self, settings: RepairSettings) -> int:
        """Return the number of rows to fit on: as many as there are and memory allows."""
        free = settings.memory_bytes * FIT - self.fixed
        return int(np.clip(free / self.each / (1 + settings.held_out), FEWEST_ROWS, min(settings.rows, self.most)))

    def bytes(self, rows: int, settings: RepairSettings) -> int:
        """Return the bytes of a fit with this number of rows."""
        return self.fixed + int(self.each * rows * (1 + settings.held_out))

    def sample_bytes(self, rows: int, settings: RepairSettings) -> int:
        """Return the bytes of a sample with this number of rows to fit on."""
        return int(self.sampled * rows * (1 + settings.held_out))


def chunk_values(settings: RepairSettings) -> int:
    """Return the number of values in a block of rows, for a fit of many groups."""
    return min(CHUNK, int(settings.memory_bytes * FIT / 2 / CHUNKS / 8))


def fit_size(layer: LayerCall, plan: Plan, images: int, item: int, settings: RepairSettings) -> FitSize:
    """Return the memory of a layer's fit: rows of one group with and without a constant, and outputs in float64."""
    outputs, width = (plan.channel_map.shapes[layer.weight][axis] for axis in layer.axes)
    groups = max(1, len(kept_groups(layer, plan)))
    columns = len(kept_channels(layer, plan)) * layer.geometry.taps
    sampled, most = item * (columns + 2 * outputs), max(FEWEST_ROWS, layer.rows * images // SAMPLES)
    if groups > MOST_GROUPS:
        return FitSize(CHUNKS * 8 * chunk_values(settings), sampled, most, sampled)
    pair = pair_size(layer, plan, item, most, settings)
    by_channels = too_wide(layer, plan, images, settings)
    kept_outputs = -(-len(np.asarray(plan.kept(layer.weight, layer.axes[0]))) // groups)
    wide = width * layer.geometry.groups if by_channels else columns // groups
    gram = gram_bytes(width if by_channels else _products(columns // groups, layer, images, settings))
    fixed = GRAMS * gram + pair.rows * pair.each
    return FitSize(fixed, sampled + (16 if by_channels else 8) * (wide + 1) + 8 * OUTPUTS * kept_outputs, most, sampled)


class PairSize(NamedTuple):
    """Rows on which a layer and the one before it are fitted together, and bytes of each; 0 if they are not."""

    rows: int
    each: int


def pair_size(layer: LayerCall, plan: Plan, item: int, most: int, settings: RepairSettings) -> PairSize:
    """Return the memory of a pair's fit, as `fit_size` does for a layer; `most` is the number of rows."""
    source = layer.source
    wanted = settings.joint_steps and settings.sequential and settings.fit == "patch"
    if source is None or not wanted or source.geometry.groups * layer.geometry.groups > 1:
        return PairSize(0, 0)
    read, hidden = (len(kept_channels(each, plan)) for each in (source, layer))
    columns, taps = read * source.geometry.taps + 1, layer.geometry.taps
    outputs = len(np.asarray(plan.kept(layer.weight, layer.axes[0])))
    each = item * COPIES * (HALO * (read + 2 * hidden) + 4 * outputs)
    products = hidden * (columns + 2 * taps * outputs)
    free = settings.memory_bytes * FIT / 2
    rows = int(min(PAIR_ROWS, most, PAIR_PRODUCTS / products, free / each / (1 + settings.held_out)))
    enough = rows * outputs >= EQUATIONS * (hidden * columns + outputs * (taps * hidden + 1))
    return PairSize(rows, each) if enough else PairSize(0, 0)


def _products(columns: int, layer: LayerCall, images: int, settings: RepairSettings) -> int:
    """Return how many columns have products in a fit; or rows, where these are fewer."""
    rows = min(max(FEWEST_ROWS, layer.rows * images // SAMPLES), settings.rows)
    return min(columns, rows)


def too_wide(layer: LayerCall, plan: Plan, images: int, settings: RepairSettings) -> bool:
    """Return whether a layer is fitted by channels: by the settings, or because patches take too much memory."""
    columns = len(np.asarray(plan.kept(layer.weight, layer.axes[1]))) * layer.geometry.taps
    wide = GRAMS * gram_bytes(_products(columns, layer, images, settings)) > settings.memory_bytes * FIT
    return settings.fit == "channel" or (settings.fit == "patch" and wide)


def cuts(firsts: Sequence[int], lifetimes: Lifetimes, images: int, limit: float) -> list[int]:
    """Return for each layer in turn the number of the call from which passes continue; 0 is the start.

    It is the last call at which the live tensors of all images are within the limit, and behind which lie all layers
    that are still to be fitted.
    """
    held, found, last = lifetimes.held_bytes(), list[int](), 0
    affordable = sorted(number for number, size in held.items() if size * images <= limit)
    for i in range(len(firsts)):
        earliest = min(firsts[i:])
        last = max([last, *(number for number in affordable if number <= earliest)])
        found.append(last)
    return found


def held_bytes(cuts_: Iterable[int], lifetimes: Lifetimes, images: int) -> int:
    """Return the most bytes that are held of all images at some cuts."""
    sizes = lifetimes.held_bytes()
    return int(max((sizes.get(cut, 0.0) for cut in cuts_), default=0.0) * images)


def batch_size(lifetimes: Iterable[Lifetimes], images: int, settings: RepairSettings) -> int:
    """Return the number of images that run at a time."""
    each = ROOM * max(one.peak_bytes() for one in lifetimes)
    return int(np.clip(settings.memory_bytes * RUNNING / max(1.0, each), 1, min(images, MOST_IMAGES)))
