"""Networks that were measured before: one small file for each, named by all that its times depend on.

What one measured network gives.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, packages_distributions, version
from math import isfinite
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from prunekit.errors import ArtifactError
from prunekit.measure.latency.machine import cpu_name
from prunekit.measure.runtimes.runtime import RUNTIMES, Runtime
from prunekit.measure.runtimes.session import Inputs, Setting
from prunekit.utils.files import read_json, write_json
from prunekit.utils.tensors import lies_channels_last


@dataclass(frozen=True)
class LayerTimes:
    """One network, measured beside the dense one, alternately; all times are lower quartiles over the rounds.

    Attributes:
        whole_ms: of a forward of the batch, nothing attached.
        dense_ms: the dense network's, alternated with it in the same process: what slows the machine slows both.
        modules_ms: path of the innermost module -> what its operators took together; "" is the model's own
            code. A module that the runtime fuses into another has none.
        rest_ms: what the runtime does that belongs to no module, such as changes of layout; 0 in eager.
        doubts: why `whole_ms` over `dense_ms` supports no claim; empty where it does.
    """

    whole_ms: float
    dense_ms: float
    modules_ms: Mapping[str, float]
    rest_ms: float
    doubts: tuple[str, ...] = ()


WAY, WAY_MOVED = 4, 5
"""Of measuring, the second where weights are moved; raised whenever the same network would be measured otherwise."""

OF_LIBRARIES = ("builtins", "torch", "torchvision", "prunekit")
"""Whose code does not change by itself."""


def cache_folder() -> Path:
    """Return where profiles are kept: the `latency` folder of PRUNEKIT_CACHE, or of prunekit's in the user's cache
    folder.
    """
    own = os.environ.get("PRUNEKIT_CACHE")
    user = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(own or Path(user, "prunekit")).expanduser() / "latency"


def conditions(setting: Setting, inputs: Inputs, repeats: int) -> dict[str, Any]:
    """Return what every network of a profile has in common: setting, machine, versions, inputs and repeats."""
    runtime, device = RUNTIMES.get(setting.runtime), torch.device(setting.device)
    packages = ("torch", *runtime.packages)
    return asdict(setting) | {
        "way": WAY_MOVED if runtime.moves_weights(setting) else WAY,
        "sample_shape": inputs.described(),
        "repeats": repeats,
        "cpu": cpu_name(),
        "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else "",
        "versions": {name: _version(name) for name in packages},
        **_own_code(runtime),
    }


def _own_code(runtime: Runtime) -> dict[str, str]:
    """Return the code around a runtime that others wrote, which may change from one run to the next."""
    module = inspect.getmodule(runtime.open)
    if module is None or module.__name__.partition(".")[0] in OF_LIBRARIES:
        return {}
    return {"runtime_code": hashlib.sha256(_source(module).encode()).hexdigest()}


def _version(package: str) -> str:
    """Return the version of a package, or of what brings it under another name; empty for a module of the user's
    own.
    """
    try:
        return version(package)
    except PackageNotFoundError:
        brought_by = packages_distributions().get(package, [])
        return version(brought_by[0]) if brought_by else ""


def structure(network: nn.Module) -> str:
    """Return a hash of all modules with their settings, of the names, shapes and layout of all parameters and
    buffers, and of the code of the user's own classes, and of other packages'.
    """
    shapes = [(name, tuple(tensor.shape)) for name, tensor in network.state_dict(keep_vars=True).items()]
    layout = "\nchannels last" if lies_channels_last(network) else ""
    return hashlib.sha256(f"{network!r}\n{shapes}{layout}{''.join(_code(network))}".encode()).hexdigest()


def _code(network: nn.Module) -> Iterator[str]:
    classes = dict.fromkeys(kind for module in network.modules() for kind in type(module).__mro__)
    for kind in classes:
        if kind.__module__.partition(".")[0] not in OF_LIBRARIES:
            yield _source(kind)


@cache
def _source(kind: type | ModuleType) -> str:
    try:
        return f"\n{inspect.getsource(kind)}"
    except (OSError, TypeError):  # typed into a console
        return ""


def key_of(network: str, dense: str, common: Mapping[str, Any]) -> str:
    """Return the name of a network's file, of the structures of both networks and their conditions."""
    text = json.dumps([network, dense, common], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def load(file: Path) -> LayerTimes | None:
    """Return what was measured before; None where there is nothing, or the file is damaged."""
    try:
        found = read_json(file)
        modules = {str(path): _ms(ms) for path, ms in found["modules_ms"].items()}
        whole, dense, rest = (_ms(found[name]) for name in ("whole_ms", "dense_ms", "rest_ms"))
        return LayerTimes(whole, dense, modules, rest, tuple(map(str, found["doubts"])))
    except (ArtifactError, LookupError, TypeError, AttributeError, ValueError):
        return None


def _ms(value: Any) -> float:
    if not isinstance(value, float) or not isfinite(value) or value < 0:
        raise ValueError(f"expected milliseconds, got {value!r}")
    return value


def store(file: Path, times: LayerTimes) -> None:
    """Write what was measured, whole or not at all."""
    write_json(file, asdict(times))
