"""Checks on activations: channels that carry nothing, and BatchNorms in the wrong mode or without variance."""

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from prunekit.inspection.diagnosis.findings import MAX_NAMES, Finding, NonlinearityInputs, Observation, check
from prunekit.statistics.layer_stats import LayerStats, StatsKey
from prunekit.utils import display as numbers
from prunekit.utils.display import listed

DEAD = 0.5
"""Share of dead channels from which on a ReLU is a fault. Trained networks always have some, with weight decay up to
half of a layer (Mehta et al. 2019, "On implicit filter level sparsity"); pruning removes them."""
SATURATED = 0.9
"""Share of values on the flat parts of a sigmoid from which on it is a fault, as it passes hardly any gradient. Gates
of trained networks are open or closed for many inputs, but not for nearly all."""
CONSTANT = 0.25
"""Share of constant channels from which on a layer is a fault; training causes a few, like dead ReLUs."""
TINY = 1e-3
"""Variance, as a share of the layer's eps, below which a channel is no longer normalized: with gamma = 1 the standard
deviation of its output is sqrt(TINY) = 0.03 at most (Ioffe & Szegedy 2015, algorithm 1). Untrained healthy
models with a large eps have down to 0.02."""
MOST = 0.5
"""Share of such channels from which on a BatchNorm is a fault; training gives up a few."""
Channels = npt.NDArray[np.bool_]


@check("dead_relu", "forward")
def dead_relu(observation: Observation) -> Iterator[Finding]:
    """Yield ReLUs with channels whose inputs vary and are never above 0; constant (masked) inputs do not count."""
    for (path, _, _), units in observation.nonlinearities.items():
        varying = units.low < units.high
        dead = varying & (units.high <= 0)
        behind = units.after or "the input"
        if units.function == "relu" and dead.sum() >= max(1, DEAD * varying.sum()):
            yield Finding(
                path,
                _place(observation, path, units),
                f"fewer than {numbers.share(DEAD, 0)} of a ReLU's channels without any value above 0",
                f"{dead.sum()} of {len(dead)} channels behind {behind} are 0 for all {observation.images} inputs",
                "lower the learning rate that led there, look at the biases and the initialization before it, or use "
                "a leaky activation",
                {"dead": int(dead.sum()), "channels": len(dead), "highest": float(units.high[dead].max())},
            )


@check("saturated_sigmoid", "forward")
def saturated_sigmoid(observation: Observation) -> Iterator[Finding]:
    """Yield sigmoids and tanhs whose inputs are nearly all on their flat parts."""
    for (path, name, _), units in observation.nonlinearities.items():
        share, low, high = units.flat / units.count, float(units.low.min()), float(units.high.max())
        if units.function != "relu" and share >= SATURATED:
            yield Finding(
                path,
                _place(observation, path, units),
                f"fewer than {numbers.share(SATURATED, 0)} of the inputs of {name} where it is flat",
                f"{numbers.share(share)} behind {units.after or 'the input'}, with inputs from {low:.3g} to {high:.3g}",
                "scale down the weights before it, normalize what it is given, or use another activation",
                {"share": share, "low": low, "high": high},
            )


def _place(observation: Observation, path: str, units: NonlinearityInputs) -> int:
    """Return the place of the module before a nonlinearity: a function has none, and modules may run repeatedly."""
    return max(observation.order.get(path, 0), observation.place(units.after))


@check("constant_channels", "forward")
def constant_channels(observation: Observation) -> Iterator[Finding]:
    """Yield layers with constant output channels although their inputs vary.

    Channels that are exactly 0 by weights of exactly 0 do not count: they are masked, or zero-initialized on purpose.
    """
    modules = dict(observation.model.named_modules())
    for key, layer in observation.stats.items():
        module = modules.get(key.module)  # None for a weight that attention uses by itself
        if (
            key.side != "output"
            or module is None
            or getattr(module, "weight", None) is None
            or not layer.constant.any()
        ):
            continue
        given = observation.stats.get(StatsKey(key.module, "input", key.call))
        free = ~(_on_purpose(module, layer) | _passed_on(module, layer, given))
        constant = layer.constant & free
        if constant.sum() >= max(1, CONSTANT * free.sum()):
            values, first = layer.mean[constant], np.flatnonzero(constant)[:8].tolist()
            again = f" in call {key.call + 1} of a pass" if key.call else ""
            yield Finding(
                key.module,
                observation.place(key.module),
                f"fewer than {numbers.share(CONSTANT, 0)} of the channels constant",
                f"{constant.sum()} of {layer.channels} channels{again} never change, at {values.min():.3g} "
                f"to {values.max():.3g}",
                "look at its weights, and at values so large that what varies is rounded away",
                {"constant": int(constant.sum()), "channels": layer.channels, "first": first},
            )


def _on_purpose(module: nn.Module, layer: LayerStats) -> Channels:
    """Return the channels that are 0 by weights of 0."""
    weight = module.weight
    assert isinstance(weight, Tensor)
    rows = weight.detach().movedim(1, 0) if isinstance(module, _ConvTransposeNd) and module.groups == 1 else weight
    zero: Channels = layer.constant & (layer.min == 0)
    if len(rows) != layer.channels:
        return np.zeros(layer.channels, bool)
    used: Channels = (rows != 0).reshape(len(rows), -1).any(1).cpu().numpy()
    return zero & ~used


def _passed_on(module: nn.Module, layer: LayerStats, given: LayerStats | None) -> Channels:
    """Return the channels that are constant because their inputs are."""
    if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):  # rows that differ, of which the same is always read
        found: Channels = (module.weight.detach() != module.weight[:1].detach()).any(0).cpu().numpy()
        return found
    if given is None:
        return np.zeros(layer.channels, bool)
    alone = isinstance(module, _NormBase) or (isinstance(module, _ConvNd) and module.groups == given.channels)
    if alone and layer.channels % given.channels == 0:
        return np.repeat(given.constant, layer.channels // given.channels)
    return np.full(layer.channels, bool(given.constant.all()))


@check("batchnorm_mode", "model")
def batchnorm_mode(observation: Observation) -> Iterator[Finding]:
    """Yield BatchNorms that are not in the mode of their model: as it was given, after `train()` and after `eval()`.

    One in eval mode while the model trains, with frozen weights, is frozen on purpose and no fault.
    """
    modules = dict(observation.model.named_modules())
    wrong: dict[str, list[str]] = {"eval": [], "train": []}
    for path, modes in observation.modes.items():
        frozen = not any(parameter.requires_grad for parameter in modules[path].parameters(recurse=False))
        stays = not modes.training or (observation.training and not modes.found)
        if stays and not frozen:
            wrong["eval"].append(path)
        if modes.evaluating or (modes.found and not observation.training):
            wrong["train"].append(path)
    for mode, paths in wrong.items():
        if paths:
            yield _wrong_mode(observation, mode, sorted(paths, key=observation.place))


def _wrong_mode(observation: Observation, mode: str, paths: list[str]) -> Finding:
    other = "train" if mode == "eval" else "eval"
    result = (
        "it normalizes by running statistics that no longer move, while its weights are trained"
        if mode == "eval"
        else "it normalizes by the batch, so that an output depends on the other samples of its batch"
    )
    return Finding(
        paths[0],
        observation.place(paths[0]),
        f"BatchNorm in {other} mode while the model is",
        f"{listed(paths, MAX_NAMES)} in {mode} mode: {result}",
        "call model.train() before training and model.eval() before evaluation, and let the model's own train() reach "
        "every module; to freeze a BatchNorm, freeze its weights too",
        {"modules": paths, "mode": mode},
    )


@check("batchnorm_variance", "forward")
def batchnorm_variance(observation: Observation) -> Iterator[Finding]:
    """Yield BatchNorms whose inputs or running statistics hardly vary compared to eps; constant inputs do not count."""
    for path, module in observation.model.named_modules():
        given = observation.stats.get(StatsKey(path, "input", 0))
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
                path,
                observation.place(path),
                f"variances above {least:g}, {TINY:g} of eps",
                f"{tiny.sum()} of {len(tiny)} channels have less {which}, down to {smallest.min():.2g}",
                "look at what comes before it, which hardly depends on the input, or recalibrate the statistics "
                "(prunekit.recalibrate_batchnorm)",
                {"tiny": int(tiny.sum()), "channels": len(tiny), "smallest": float(np.min(smallest))},
            )
