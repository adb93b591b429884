"""The layer times of a measured network, and their cache: a file each, named by all that the times depend on."""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, packages_distributions, version
from math import isfinite
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from prunekit.backends.backend import RUNTIMES, Backend
from prunekit.backends.session import INT8, Inputs, Setting
from prunekit.channels.tracing.call_sites import weak_cache
from prunekit.errors import ArtifactError, UsageError
from prunekit.measure.latency.machine import cpu_name
from prunekit.reading.records import as_record
from prunekit.reading.text_files import read_json
from prunekit.utils.files import require_writable, write_json
from prunekit.utils.tensors import lies_channels_last


@dataclass(frozen=True)
class LayerTimes:
    """The times of a network, measured alternately with the dense one; all are lower quartiles over the rounds.

    Attributes:
        whole_ms: of a forward pass of the batch, without a layer clock.
        dense_ms: of the dense network, in the same process: what slows the machine slows both.
        modules_ms: of the operators of each module, by its path; "" is the model's own code. A module that the runtime
            fuses into another has none.
        rest_ms: of operators of no module, such as changes of layout; 0 in eager.
        doubts: why the ratio of `whole_ms` and `dense_ms` supports no claim; empty if it does.
    """

    whole_ms: float
    dense_ms: float
    modules_ms: Mapping[str, float]
    rest_ms: float
    doubts: tuple[str, ...] = ()


def read_times(file: Path) -> LayerTimes | None:
    """Return the cached times; None if there is no file, or it is damaged."""
    try:
        found = as_record(LayerTimes, read_json(file), str(file))
    except ArtifactError:
        return None
    times = (found.whole_ms, found.dense_ms, found.rest_ms, *found.modules_ms.values())
    return found if all(isfinite(ms) and ms >= 0 for ms in times) and found.dense_ms > 0 else None


class TimesCache:
    """The cache of a profile: where it cannot be written, that is said once, and costs a later profile the time.

    Args:
        folder: of the files, `latency` in the user's cache; None for no cache.
        log: gets a line if the folder cannot be written.
    """

    def __init__(self, folder: Path | None, log: Callable[[str], object]) -> None:
        self._folder, self._log, self._written = folder, log, folder is not None
        if folder is not None:
            try:
                require_writable(folder, folder=True, option="PRUNEKIT_CACHE")
            except UsageError as error:
                self._give_up(error)

    def read(self, key: str) -> LayerTimes | None:
        """Return the times with a key, as `cache_key` gives it; None if they are not there, or damaged."""
        return None if self._folder is None else read_times(self._folder / f"{key}.json")

    def write(self, key: str, times: LayerTimes) -> None:
        """Write the times, whole or not at all."""
        if self._folder is not None and self._written:
            try:
                write_times(self._folder / f"{key}.json", times)
            except OSError as error:
                self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        self._written = False
        self._log(f"profile: times are not cached, so that another profile measures again: {error}")


def write_times(file: Path, times: LayerTimes) -> None:
    """Write the times, whole or not at all."""
    write_json(file, asdict(times))


def cache_key(network: str, dense: str, common: Mapping[str, Any]) -> str:
    """Return the name of a network's file, from the hashes of both networks and their conditions."""
    text = json.dumps([network, dense, common], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


VERSION, VERSION_MOVED = 4, 5
"""Version of the method, the second for settings in which weights are moved; a change voids cached times."""
LIBRARIES = ("builtins", "torch", "torchvision", "prunekit")
"""Packages whose code changes with their version alone."""


def conditions(setting: Setting, inputs: Inputs, repeats: int) -> dict[str, Any]:
    """Return what every network of a profile has in common: setting, machine, versions, inputs and repeats."""
    runtime, device = RUNTIMES.get(setting.runtime), torch.device(setting.device)
    quantizers = {runtime.quantizer} - {*runtime.packages} if setting.dtype == INT8 else set[str]()
    packages = ("torch", *runtime.packages, *quantizers)
    return asdict(setting) | {
        "way": VERSION_MOVED if runtime.moves_weights(setting) else VERSION,
        "sample_shape": inputs.described(),
        "repeats": repeats,
        "cpu": cpu_name(),
        "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else "",
        "versions": {name: _version(name) for name in packages},
        **_runtime_code(runtime),
    }


def _runtime_code(runtime: Backend) -> dict[str, str]:
    """Return a hash of the code of a user's runtime, which may change from one run to the next."""
    module = inspect.getmodule(runtime.defined)
    if module is None or module.__name__.partition(".")[0] in LIBRARIES:
        return {}
    return {"runtime_code": hashlib.sha256(_source(module).encode()).hexdigest()}


def _version(package: str) -> str:
    """Return the version of a package, or of the distribution that contains it; empty for the user's own modules."""
    try:
        return version(package)
    except PackageNotFoundError:
        brought_by = packages_distributions().get(package, [])
        return version(brought_by[0]) if brought_by else ""


def structure_hash(network: nn.Module) -> str:
    """Return a hash of all that the times of a network depend on, but for its conditions.

    That is: modules with their settings, names, shapes and layout of parameters and buffers, and the code of classes
    outside of torch.
    """
    shapes = [(name, tuple(tensor.shape)) for name, tensor in network.state_dict(keep_vars=True).items()]
    layout = "\nchannels last" if lies_channels_last(network) else ""
    return hashlib.sha256(f"{network!r}\n{shapes}{layout}{''.join(_code(network))}".encode()).hexdigest()


def _code(network: nn.Module) -> Iterator[str]:
    classes = dict.fromkeys(kind for module in network.modules() for kind in type(module).__mro__)
    for kind in classes:
        if kind.__module__.partition(".")[0] not in LIBRARIES:
            yield _source(kind)


@weak_cache
def _source(kind: type | ModuleType) -> str:
    try:
        return f"\n{inspect.getsource(kind)}"
    except (OSError, TypeError):  # typed into a console
        return ""
