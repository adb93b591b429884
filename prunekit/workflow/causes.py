"""Looks for every cause: makes the experiment that would show it, and keeps those that it shows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from prunekit.deploy import fold_batchnorm
from prunekit.errors import PrunekitError
from prunekit.inputs import call
from prunekit.measure import causes, experiments
from prunekit.measure.beside import beside
from prunekit.measure.breakdown import Breakdown
from prunekit.measure.causes import Cause
from prunekit.measure.layers import Layer
from prunekit.measure.operator_costs import subnormals

LAYERS = 12
"""How many layers are run alone: the slowest."""
LARGER, LONG_MS = (8, 4, 2), 1500.0
"""How many times larger a batch is tried: the most at which the dense model may be expected not to take longer."""


@dataclass(frozen=True)
class Search:
    """What there is to look at.

    Attributes:
        dense, pruned: on the device, in eval mode.
        inputs: an example, see `prunekit.inputs.example`, on the device.
        batch: samples in them.
        device: where they run.
        found: the time of both by operator.
    """

    dense: nn.Module
    pruned: nn.Module
    inputs: tuple[Any, ...]
    batch: int
    device: torch.device
    found: Breakdown

    @property
    def on_cpu(self) -> bool:
        """Whether the CPU computes."""
        return self.device.type == "cpu"

    def slowest(self) -> Iterator[tuple[str, float, Layer, Layer | None]]:
        """The pruned model's slowest layers: path, milliseconds, the layer, and the dense model's at the same path."""
        keys = [(row.module, row.operator) for row in self.found.rows]
        there = [key for key in keys if key in self.found.pruned_calls]
        layers = [(key, self.found.pruned_calls[key].layer) for key in there]
        ms = {(row.module, row.operator): row.pruned.ms for row in self.found.rows if row.pruned is not None}
        for key, layer in [(key, layer) for key, layer in layers if layer is not None][:LAYERS]:
            dense = self.found.dense_calls.get(key)
            yield key[0], ms[key], layer, None if dense is None else dense.layer


def find_causes(search: Search, log: Callable[[str], None]) -> tuple[Cause, ...]:
    """The causes that experiments on this machine show, the most milliseconds first.

    Threads come first: where they have to wait for cores, nothing else can be measured.
    """
    log("measuring: fewer threads")
    threads = _fewer_threads(search)
    if threads is not None and search.found.contention is not None and search.found.contention.oversubscribed:
        return (threads,)
    found = [] if threads is None else [threads]
    for name, look in _LOOKS:
        log(f"measuring: {name}")
        found += [cause for cause in look(search) if cause is not None]
    return tuple(sorted(found, key=lambda cause: -cause.ms))


def _overheads(search: Search) -> Iterator[Cause | None]:
    found = search.found
    copies = experiments.copy_times(search.device)
    yield causes.launch_bound(found, cuda=not search.on_cpu)
    yield causes.memory_bound(found.rows, copies, found.floor_ms, found.pruned_ms, search.batch)
    yield causes.copying(found.rows, found.pruned_ms)
    yield causes.without_macs(found.rows, found.macs_ratio, found.pruned_ms)


def _norms(search: Search) -> Iterator[Cause | None]:
    found = search.found
    shown = causes.unfused_norms(found.rows, found.pruned_ms, None)
    if shown is None or not search.on_cpu:
        yield shown
        return
    try:
        folded = fold_batchnorm(search.pruned, search.inputs).model
    except PrunekitError:  # what cannot be folded has its time alone
        yield shown
        return
    gain = beside(lambda: call(search.pruned, search.inputs), lambda: call(folded, search.inputs), search.device)
    yield causes.unfused_norms(found.rows, found.pruned_ms, gain)


def _widths(search: Search) -> Iterator[Cause | None]:
    times = [
        one
        for path, ms, layer, dense in search.slowest()
        if dense is not None
        for one in experiments.width_times(path, ms, layer, dense.widths, search.device)
    ]
    yield causes.off_step_widths(times, search.found.pruned_ms)


def _kernels(search: Search) -> Iterator[Cause | None]:
    times = [
        experiments.kernel_times(path, ms, layer, dense.widths, search.device)
        for path, ms, layer, dense in search.slowest()
        if dense is not None
    ]
    yield causes.slower_kernels([one for one in times if one is not None], search.found.pruned_ms)


def _masks(search: Search) -> Iterator[Cause | None]:
    hooks = experiments.mask_hooks(search.pruned)
    bare = experiments.without_masks(search.pruned, search.inputs, search.device) if hooks else None
    layers = {key[0]: call.layer for key, call in search.found.pruned_calls.items() if call.layer is not None}
    zeros = experiments.zero_channels(search.pruned, layers)
    saved = 0.0
    for path, ms, layer, _ in search.slowest():
        if path in zeros:
            left = max(1, layer.widths[1] - zeros[path][0])
            widths = (left, left) if layer.tied else (layer.widths[0], left)
            saved += ms * experiments.share_without(layer, widths, search.device)
    yield causes.masks_attached(hooks, zeros, bare, saved, search.found.pruned_ms)


def _small_numbers(search: Search) -> Iterator[Cause | None]:
    if not search.on_cpu:
        return
    weights = {
        path: count
        for path, module in search.pruned.named_modules()
        if (count := subnormals([*module.parameters(recurse=False), *module.buffers(recurse=False)]))
    }
    activations: dict[str, int] = {}
    for (path, _), seen in search.found.pruned_calls.items():
        if seen.subnormal:
            activations[path] = activations.get(path, 0) + seen.subnormal
    if weights or activations:
        flushed = experiments.with_flushing(search.pruned, search.inputs)
        yield causes.subnormal_numbers(weights, activations, flushed)


def _memory_format(search: Search) -> Iterator[Cause | None]:
    yield causes.other_layout(experiments.with_channels_last(search.pruned, search.inputs, search.device))


def _larger_batch(search: Search) -> Iterator[Cause | None]:
    found = search.found
    times = next((times for times in LARGER if times * found.dense_ms <= LONG_MS), LARGER[-1])
    try:
        larger = experiments.with_larger_batch(search.dense, search.pruned, search.inputs, times, search.device)
    except Exception:  # a model's own code may take one batch only, and memory may not last
        return
    yield causes.small_batch(found.speedup, found.pruned_ms, larger, search.batch, times * search.batch)


def _fewer_threads(search: Search) -> Cause | None:
    now, contention = torch.get_num_threads(), search.found.contention
    if contention is None or now == 1:
        return None
    fewer = experiments.with_threads_of(sorted({1, now // 2}), search.pruned, search.inputs, now)
    return causes.too_many_threads(contention, fewer)


_LOOKS: tuple[tuple[str, Callable[[Search], Iterator[Cause | None]]], ...] = (
    ("operators beside copies and beside operators that do nothing", _overheads),
    ("BatchNorm folded", _norms),
    ("the slowest layers at rounded widths", _widths),
    ("the slowest layers at the dense model's widths", _kernels),
    ("masks and channels of zeros", _masks),
    ("subnormal numbers", _small_numbers),
    ("channels last", _memory_format),
    ("a larger batch", _larger_batch),
)
