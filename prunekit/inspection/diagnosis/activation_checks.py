"""Units that carry nothing: dead, saturated, constant.

BatchNorm in the wrong mode, and with next to no variance.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from prunekit.inspection.diagnosis.findings import NAMED, Finding, check
from prunekit.inspection.diagnosis.observation import Observation, Units
from prunekit.statistics.layer_stats import LayerStats, StatsKey
from prunekit.utils.display import listed

DEAD = 0.5
"""Share of a ReLU's channels that are dead from which on it is a fault. Some always are in a trained network, up to
half of a layer with weight decay (Mehta et al. 2019, "On implicit filter level sparsity"); pruning removes them."""
SATURATED = 0.9
"""Share of values on a sigmoid's flat parts from which on it passes hardly any gradient. Gates of trained networks
are open or closed for many inputs, not for nearly all."""
CONSTANT = 0.25
"""Share of a layer's channels that are constant from which on it is a fault; a few come with training, as dead ReLUs
do."""
Channels = npt.NDArray[np.bool_]


@check("dead_relu", "forward")
def dead_relu(seen: Observation) -> Iterator[Finding]:
    """ReLUs whose inputs vary and are never above 0. What is constant before them is not theirs: masked channels."""
    for (path, _, _), units in seen.units.items():
        varying = units.low < units.high
        dead = varying & (units.high <= 0)
        behind = units.after or "the input"
        if units.function == "relu" and dead.sum() >= max(1, DEAD * varying.sum()):
            yield Finding(
                "dead_relu",
                path,
                _place(seen, path, units),
                f"fewer than {DEAD:.0%} of a ReLU's channels without any value above 0",
                f"{dead.sum()} of {len(dead)} channels behind {behind} are 0 for all {seen.images} inputs",
                "lower the learning rate that led there, look at the biases and the initialization before it, or use "
                "a leaky activation",
                {"dead": int(dead.sum()), "channels": len(dead), "highest": float(units.high[dead].max())},
            )


@check("saturated_sigmoid", "forward")
def saturated_sigmoid(seen: Observation) -> Iterator[Finding]:
    """Sigmoids and tanhs whose inputs are nearly all on their flat parts."""
    for (path, name, _), units in seen.units.items():
        share, low, high = units.flat / units.count, float(units.low.min()), float(units.high.max())
        if units.function != "relu" and share >= SATURATED:
            yield Finding(
                "saturated_sigmoid",
                path,
                _place(seen, path, units),
                f"fewer than {SATURATED:.0%} of the inputs of {name} where it is flat",
                f"{share:.1%} behind {units.after or 'the input'}, with inputs from {low:.3g} to {high:.3g}",
                "scale down the weights before it, normalize what it is given, or use another activation",
                {"share": share, "low": low, "high": high},
            )


@check("constant_channels", "forward")
def constant_channels(seen: Observation) -> Iterator[Finding]:
    """Yield channels that a layer makes constant out of inputs that are not.

    Those are left out whose weights are exactly 0 and that give exactly 0: masked, or zero-initialized on purpose.
    """
    modules = dict(seen.model.named_modules())
    for key, layer in seen.stats.items():
        module = modules.get(key.module)  # None for a weight that attention uses by itself
        if (
            key.side != "output"
            or module is None
            or getattr(module, "weight", None) is None
            or not layer.constant.any()
        ):
            continue
        given = seen.stats.get(StatsKey(key.module, "input", key.call))
        free = ~(_on_purpose(module, layer) | _passed_on(module, layer, given))
        constant = layer.constant & free
        if constant.sum() >= max(1, CONSTANT * free.sum()):
            values, first = layer.mean[constant], np.flatnonzero(constant)[:8].tolist()
            yield Finding(
                "constant_channels",
                key.module,
                seen.place(key.module),
                f"fewer than {CONSTANT:.0%} of the channels constant",
                f"{constant.sum()} of {layer.channels} channels{_again(key.call)} never change, at {values.min():.3g} "
                f"to {values.max():.3g}",
                "look at its weights, and at values so large that what varies is rounded away",
                {
                    "constant": int(constant.sum()),
                    "channels": layer.channels,
                    "first": first,
                },
            )


def _place(seen: Observation, path: str, units: Units) -> int:
    """Behind the module that ran last before it: a function has no place of its own, and a module may run again."""
    return max(seen.order.get(path, 0), seen.place(units.after))


def _on_purpose(module: nn.Module, layer: LayerStats) -> Channels:
    """Return the channels of zero weights that give zeros."""
    weight = module.weight
    assert isinstance(weight, Tensor)
    rows = weight.detach().movedim(1, 0) if isinstance(module, _ConvTransposeNd) and module.groups == 1 else weight
    zero: Channels = layer.constant & (layer.min == 0)
    if len(rows) != layer.channels:
        return np.zeros(layer.channels, bool)
    used: Channels = (rows != 0).reshape(len(rows), -1).any(1).cpu().numpy()
    return zero & ~used


def _passed_on(module: nn.Module, layer: LayerStats, given: LayerStats | None) -> Channels:
    """Return channels that are constant because what they are made from is."""
    if given is None:
        return np.zeros(layer.channels, bool)
    alone = isinstance(module, _NormBase) or (isinstance(module, _ConvNd) and module.groups == given.channels)
    if alone and layer.channels % given.channels == 0:
        return np.repeat(given.constant, layer.channels // given.channels)
    return np.full(layer.channels, bool(given.constant.all()))


def _again(call: int) -> str:
    return f" in call {call + 1} of a pass" if call else ""


TINY = 1e-3
"""Variance, as a share of the layer's own eps, below which a channel is no longer normalized: its standard deviation
behind the layer, that of gamma = 1, is sqrt(TINY) = 0.03 at most (Ioffe & Szegedy 2015, algorithm 1). Untrained healthy
models with a large eps have down to 0.02."""
MOST = 0.5
"""Share of the channels that are so from which on it is a fault; a few are where training has given channels up."""


@check("batchnorm_mode", "model")
def batchnorm_mode(seen: Observation) -> Iterator[Finding]:
    """BatchNorms that are not in the mode of their model: as it came, after `train()` and after `eval()`.

    In eval mode while the model trains, and with its weights frozen, is a frozen BatchNorm, as one has it on purpose.
    """
    modules = dict(seen.model.named_modules())
    wrong: dict[str, list[str]] = {"eval": [], "train": []}
    for path, modes in seen.modes.items():
        frozen = not any(parameter.requires_grad for parameter in modules[path].parameters(recurse=False))
        stays = not modes.training or (seen.training and not modes.found)
        if stays and not frozen:
            wrong["eval"].append(path)
        if modes.evaluating or (modes.found and not seen.training):
            wrong["train"].append(path)
    for mode, paths in wrong.items():
        if paths:
            yield _wrong_mode(seen, mode, sorted(paths, key=seen.place))


def _wrong_mode(seen: Observation, mode: str, paths: list[str]) -> Finding:
    other = "train" if mode == "eval" else "eval"
    result = (
        "it normalizes by running statistics that no longer move, while its weights are trained"
        if mode == "eval"
        else "it normalizes by the batch, so that an output depends on what else is in its batch"
    )
    return Finding(
        "batchnorm_mode",
        paths[0],
        seen.place(paths[0]),
        f"BatchNorm in {other} mode while the model is",
        f"{listed(paths, NAMED)} in {mode} mode: {result}",
        "call model.train() before training and model.eval() before evaluation, and let the model's own train() reach "
        "every module; to freeze a BatchNorm, freeze its weights too",
        {"modules": paths, "mode": mode},
    )


@check("batchnorm_variance", "forward")
def batchnorm_variance(seen: Observation) -> Iterator[Finding]:
    """BatchNorms whose inputs, or running statistics, hardly vary beside eps. Constant inputs are not theirs."""
    for path, module in seen.model.named_modules():
        given = seen.stats.get(StatsKey(path, "input", 0))
        if not isinstance(module, _BatchNorm) or given is None or given.channels != module.num_features:
            continue
        varying = ~given.constant
        running = module.running_var
        running_variance = given.variance if running is None else running.double().cpu().numpy()
        least = TINY * module.eps
        batch = given.variance < least
        tiny = varying & (batch | (running_variance < least))
        if tiny.sum() >= max(1, MOST * varying.sum()):
            smallest = np.minimum(given.variance, running_variance)[tiny]
            which = "of its inputs" if batch[tiny].any() else "in its running statistics"
            yield Finding(
                "batchnorm_variance",
                path,
                seen.place(path),
                f"variances above {least:g}, {TINY:g} of eps",
                f"{tiny.sum()} of {len(tiny)} channels have less {which}, down to {smallest.min():.2g}",
                "look at what comes before it, which hardly depends on the input, or recalibrate the statistics "
                "(prunekit.recalibrate_batchnorm)",
                {"tiny": int(tiny.sum()), "channels": len(tiny), "smallest": float(np.min(smallest))},
            )
