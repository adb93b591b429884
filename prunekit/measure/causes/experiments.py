"""Experiments that show causes: a model, or a layer of it, timed against another way of running it."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils import prune as torch_prune

from prunekit.compaction.zero_patterns import zero_patterns
from prunekit.hooks.hook import HOOK_TABLES, is_inert, is_ours
from prunekit.hooks.model_copy import copied
from prunekit.measure.causes.breakdown import IsolatedLayer, Widths
from prunekit.measure.causes.width_causes import KernelTimes, TimedWidths, WidthTimes, relative_macs, rounded
from prunekit.measure.latency.timing import PairedTiming, Times, paired_ratio, time_paired, time_runs
from prunekit.measure.memory_format import difference_in_format, images_channels_last
from prunekit.utils.context import threads as with_threads
from prunekit.utils.inputs import call
from prunekit.utils.tensors import gather, map_tensors

COPIED = (1 << 14, 1 << 17, 1 << 20, 1 << 23, 1 << 26)
"""Bytes moved by copies, from what fits into the first cache to what fits into none."""


def copy_times(device: torch.device) -> Callable[[float], float]:
    """Return a function from bytes moved by a copy, reads and writes together, to milliseconds on this machine."""
    times = []
    for moved in COPIED:
        source = torch.ones(moved // 8, device=device)
        target = torch.empty_like(source)
        times.append(float(time_runs([partial(target.copy_, source)], device).min()))
    sizes, logs = np.log(COPIED), np.log(times)

    def milliseconds(moved: float) -> float:
        beyond = max(1.0, moved / COPIED[-1])  # the largest is at the speed of memory, as are all above it
        return float(np.exp(np.interp(np.log(max(1.0, moved)), sizes, logs)) * beyond)

    return milliseconds


def with_channels_last(model: nn.Module, inputs: tuple[Any, ...], device: torch.device) -> PairedTiming | None:
    """Time the model against a copy with channels last; None without images or convolutions, or if it differs."""
    if not any(tensor.dim() == 4 for tensor in gather(inputs)) or all(p.dim() != 4 for p in model.parameters()):
        return None
    other = copied(model).to(memory_format=torch.channels_last)
    images = images_channels_last(inputs)
    if difference_in_format(model, inputs, other, images):
        return None
    return time_paired(partial(call, model, inputs), partial(call, other, images), device)


SUBNORMAL = 1e-40


def with_flushing(model: nn.Module, inputs: tuple[Any, ...]) -> PairedTiming | None:
    """Time the model on one CPU thread against subnormal numbers taken as 0; None if that cannot be set."""

    def run(flush: bool) -> None:
        torch.set_flush_denormal(flush)
        call(model, inputs)

    with _flushing_restored() as possible, with_threads(1):
        if not possible:
            return None
        return time_paired(partial(run, False), partial(run, True), torch.device("cpu"))


@contextmanager
def _flushing_restored() -> Iterator[bool]:
    """Yield whether flushing can be set, and restore it; whether it is on is measured, as torch does not tell."""
    before = bool((torch.tensor([SUBNORMAL]) * 1.0 == 0).item())
    try:
        yield torch.set_flush_denormal(before)
    finally:
        torch.set_flush_denormal(before)


def with_thread_counts(
    counts: Sequence[int], model: nn.Module, inputs: tuple[Any, ...], now: int
) -> dict[int, PairedTiming]:
    """Time the model with `now` CPU threads against each of the other counts."""

    def run(count: int) -> None:
        torch.set_num_threads(count)
        call(model, inputs)

    with with_threads(now):
        return {count: time_paired(partial(run, now), partial(run, count), torch.device("cpu")) for count in counts}


def with_larger_batch(
    dense: nn.Module, pruned: nn.Module, inputs: tuple[Any, ...], times: int, device: torch.device
) -> PairedTiming:
    """Time the dense against the pruned model on `times` as many samples; the gain is the speedup."""
    more = map_tensors(inputs, lambda tensor: torch.cat([tensor] * times) if tensor.dim() else tensor)
    return time_paired(lambda: dense(*more), lambda: pruned(*more), device)


def mask_hooks(model: nn.Module) -> int:
    """Return the number of hooks of prunekit's and torch's masks, which run with every forward pass."""
    tables = (module._forward_pre_hooks | module._forward_hooks for module in model.modules())
    hooks = [hook for table in tables for hook in table.values()]
    return sum(isinstance(one, torch_prune.BasePruningMethod) or (is_ours(one) and not is_inert(one)) for one in hooks)


def without_masks(model: nn.Module, inputs: tuple[Any, ...], device: torch.device) -> PairedTiming:
    """Time the model against a copy with the same weights and no hooks of masks."""
    bare = copied(model)
    for module in bare.modules():
        for hook in list(module._forward_pre_hooks.values()):
            if isinstance(hook, torch_prune.BasePruningMethod):
                torch_prune.remove(module, hook._tensor_name)  # type: ignore[no-untyped-call]
        for table in (getattr(module, name) for name in HOOK_TABLES):
            for key in [key for key, hook in table.items() if is_ours(hook)]:
                del table[key]
    return time_paired(partial(call, model, inputs), partial(call, bare, inputs), device)


def zero_channels(model: nn.Module, layers: Mapping[str, IsolatedLayer]) -> dict[str, tuple[int, int]]:
    """Return by module path how many output channels have weights that are all 0, and the number of all channels.

    Modules without such channels are left out.
    """
    found = {}
    for path, layer in layers.items():
        weight = getattr(model.get_submodule(path), "weight", None)
        if isinstance(weight, Tensor) and weight.dim() > 1 and weight.shape[0] == layer.widths[1]:
            zeros = int((weight.detach().flatten(1) == 0).all(1).sum())
            if zeros:
                found[path] = zeros, weight.shape[0]
    return found


def with_filled_zeros(model: nn.Module, inputs: tuple[Any, ...], device: torch.device) -> PairedTiming:
    """Time a copy with random numbers in place of the zeros of its weights against the model; the gain is the zeros'.

    The numbers are as large as the weight's other ones, so that activations stay about as large.
    """
    filled = filled_zeros(model)
    return time_paired(partial(call, filled, inputs), partial(call, model, inputs), device)


@torch.no_grad()
def filled_zeros(model: nn.Module) -> nn.Module:
    """Return a copy whose weights of linear layers and convolutions have random numbers in place of zeros."""
    result = copied(model)
    generator = torch.Generator().manual_seed(0)
    for name, zeros in zero_patterns(model).layers.items():
        if zeros.zeros:
            weight = result.get_parameter(name)
            scale = weight.pow(2).mean().sqrt()
            noise = torch.randn(weight.shape, generator=generator).to(weight) * scale
            weight.copy_(torch.where(weight == 0, noise, weight))
    return result


STEPS = (8, 16)


def width_times(
    module: str, row_ms: float, layer: IsolatedLayer, dense: Widths, device: torch.device
) -> Iterator[WidthTimes]:
    """Yield the times of a layer of the pruned model alone, at its widths and at widths rounded to each step."""
    steps = [(step, rounded(layer.widths, dense, step, tied=layer.tied)) for step in STEPS]
    found = [(step, pair) for step, pair in steps if pair is not None]
    if not found:
        return
    widths = [layer.widths, *(one for _, pair in found for one in pair)]
    times, timed = _timed(layer, widths, device)
    for index, (step, _) in enumerate(found):
        below, above = 1 + 2 * index, 2 + 2 * index
        ratio = paired_ratio(times[above], times[0])
        yield WidthTimes(module, row_ms, step, timed[0], timed[below], timed[above], ratio, layer.tied)


def _timed(layer: IsolatedLayer, widths: Sequence[Widths], device: torch.device) -> tuple[Times, list[TimedWidths]]:
    """Run a layer alone at several widths, and return the times (widths, rounds) and their medians."""
    times = time_runs([layer.build(pair) for pair in widths], device)
    return times, [TimedWidths(pair, float(np.median(row))) for pair, row in zip(widths, times, strict=True)]


def kernel_times(
    module: str, row_ms: float, layer: IsolatedLayer, dense: Widths, device: torch.device
) -> KernelTimes | None:
    """Return the times of a layer alone, at its widths and at the dense model's; None if these are the same."""
    if layer.widths == dense:
        return None
    times, (now, whole) = _timed(layer, [layer.widths, dense], device)
    more = relative_macs(dense, tied=layer.tied) / relative_macs(layer.widths, tied=layer.tied)
    return KernelTimes(module, row_ms, now, whole, more, paired_ratio(times[1], times[0]))


def share_without(layer: IsolatedLayer, widths: Widths, device: torch.device) -> float:
    """Return the share of a layer's time that smaller widths save; 0 if it may be noise."""
    found = time_paired(layer.build(layer.widths), layer.build(widths), device)
    return found.saved_ms / found.now_ms
