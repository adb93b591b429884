"""BatchNorm in the wrong mode, and with next to no variance."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from torch.nn.modules.batchnorm import _BatchNorm

from prunekit.calibration import StatsKey
from prunekit.diagnosis.findings import NAMED, Finding, check
from prunekit.diagnosis.observation import Observation
from prunekit.numbers import listed

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
