"""How a repair is fitted into memory: images at a time, where passes go on from, positions of each layer.

How long the results of a forward pass are needed, and how much memory they take at each of its calls.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from prunekit.planning.plan import Plan
from prunekit.repair.least_squares import CHUNK, MOST_GROUPS
from prunekit.settings.calibration import RepairSettings
from prunekit.statistics.layers.linear_layers import LayerCall
from prunekit.statistics.layers.patches import gram_bytes

Key = tuple[int, int]
"""Where a tensor was made: the step of the call, 0 for the model's inputs, and a number among those made there."""


@dataclass
class Lifetimes:
    """Births and last uses of the tensors of one forward pass.

    A step is one call of any of torch's functions.

    Attributes:
        samples: how many the pass was over.
        steps: by the number of a call, as `CallWatch` counts them, the steps before it.
    """

    samples: int = 1
    steps: dict[int, int] = field(default_factory=dict)
    _last: dict[Key, int] = field(default_factory=dict)
    _pinned: set[Key] = field(default_factory=set)
    _memory: dict[Key, int] = field(default_factory=dict)
    _sizes: list[int] = field(default_factory=list)

    def born(self, key: Key, tensor: Tensor, inputs: Iterable[tuple[Key, Tensor]] = ()) -> None:
        """Take note of a tensor as it is made; it may be a view of one of the inputs."""
        storage = tensor.untyped_storage()
        shared = [self._memory[other] for other, given in inputs if given.untyped_storage()._cdata == storage._cdata]
        if not shared:
            self._sizes.append(storage.nbytes())
        self._memory[key] = shared[0] if shared else len(self._sizes) - 1
        self._last[key] = key[0]

    def read(self, keys: Iterable[Key], step: int) -> None:
        """Take note of tensors that a call reads."""
        for key in keys:
            self._last[key] = max(step, self._last.get(key, 0))

    def pin(self, key: Key) -> None:
        """Take note of a tensor that is read again whenever a pass goes on: from then on it is always live."""
        self._pinned.add(key)

    def live(self, step: int) -> Iterator[Key]:
        """Return tensors made by then that are read later."""
        return (key for key, last in self._last.items() if key[0] <= step and (step < last or key in self._pinned))

    def held_bytes(self) -> dict[int, float]:
        """Memory of a sample's live tensors before each call, by its number."""
        held = self._summed(0)
        return {number: float(held[step]) / self.samples for number, step in self.steps.items()}

    def peak_bytes(self) -> float:
        """Return the most memory that a sample's tensors take while any call runs, its result included."""
        return float(self._summed(1).max()) / self.samples

    def _summed(self, beyond: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """Memory at each step of what is needed from its birth until `beyond` its last use."""
        spans: dict[int, tuple[int, int]] = {}
        end = 1 + max([0, *self._last.values(), *self.steps.values()])
        for key, memory in self._memory.items():
            first, last = spans.get(memory, (key[0], key[0]))
            until = end if key in self._pinned else self._last[key] + beyond
            spans[memory] = (min(first, key[0]), max(last, until))
        changes = np.zeros(2 + max((last for _, last in spans.values()), default=0), dtype=np.int64)
        for memory, (first, last) in spans.items():
            changes[first] += self._sizes[memory]
            changes[last] -= self._sizes[memory]
        total: np.ndarray[tuple[int], np.dtype[np.int64]] = np.cumsum(changes)
        padding = max(0, 1 + max(self.steps.values(), default=0) - len(total))
        return np.pad(total, (0, padding))


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


def kept_groups(layer: LayerCall, plan: Plan) -> list[int]:
    """Return the groups of a convolution of which any output is kept."""
    size = plan.channel_map.shapes[layer.weight][layer.axes[0]] // layer.geometry.groups
    return sorted(set((np.asarray(plan.kept(layer.weight, layer.axes[0])) // size).tolist()))


def kept_channels(layer: LayerCall, plan: Plan) -> torch.Tensor:
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
        """Return how many rows to fit on there are, and is memory for."""
        free = settings.memory_bytes * FIT - self.fixed
        return int(np.clip(free / self.each / (1 + settings.held_out), FEWEST_ROWS, min(settings.rows, self.most)))

    def bytes(self, rows: int, settings: RepairSettings) -> int:
        """Return what that many rows take."""
        return self.fixed + int(self.each * rows * (1 + settings.held_out))


def chunk_values(settings: RepairSettings) -> int:
    """Return the values of a block of rows of a fit of many groups."""
    return min(CHUNK, int(settings.memory_bytes * FIT / 2 / CHUNKS / 8))


def fit_size(layer: LayerCall, plan: Plan, images: int, item: int, settings: RepairSettings) -> FitSize:
    """Rows are held as they are and again with a constant, of one group; outputs a few times in float64.

    Args:
        layer: found with `SAMPLES` images.
        images: how many there are.
        item: bytes of a value that the model computes.
    """
    outputs, width = (plan.channel_map.shapes[layer.weight][axis] for axis in layer.axes)
    groups = max(1, len(kept_groups(layer, plan)))
    columns = len(kept_channels(layer, plan)) * layer.geometry.taps
    sampled, most = item * (columns + 2 * outputs), max(FEWEST_ROWS, layer.rows * images // SAMPLES)
    if groups > MOST_GROUPS:
        return FitSize(CHUNKS * 8 * chunk_values(settings), sampled, most)
    pair = pair_size(layer, plan, item, most, settings)
    by_channels = too_wide(layer, plan, settings)
    kept_outputs = -(-len(np.asarray(plan.kept(layer.weight, layer.axes[0]))) // groups)
    wide = width * layer.geometry.groups if by_channels else columns // groups
    gram = gram_bytes(width if by_channels else columns // groups)
    fixed = GRAMS * gram + pair.rows * pair.each
    return FitSize(fixed, sampled + (16 if by_channels else 8) * (wide + 1) + 8 * OUTPUTS * kept_outputs, most)


class PairSize(NamedTuple):
    """Rows on which a layer and the one before it are fitted together, and the bytes of each; 0: they are not."""

    rows: int
    each: int


def pair_size(layer: LayerCall, plan: Plan, item: int, most: int, settings: RepairSettings) -> PairSize:
    """See `fit_size`; `most` is how many rows there are."""
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


def too_wide(layer: LayerCall, plan: Plan, settings: RepairSettings) -> bool:
    """Return whether a layer is fitted by channels: asked for, or because of the memory that patches would take."""
    columns = len(np.asarray(plan.kept(layer.weight, layer.axes[1]))) * layer.geometry.taps
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
    """Return the most that is kept of all images at some cuts."""
    sizes = lifetimes.held_bytes()
    return int(max((sizes.get(cut, 0.0) for cut in cuts_), default=0.0) * images)


def batch_size(lifetimes: Iterable[Lifetimes], images: int, settings: RepairSettings) -> int:
    """Return images at a time."""
    each = ROOM * max(one.peak_bytes() for one in lifetimes)
    return int(np.clip(settings.memory_bytes * RUNNING / max(1.0, each), 1, min(images, MOST_IMAGES)))
