"""Profiling: whole networks of other widths, timed layer by layer in place, where caches and layouts are real."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import nn

from prunekit.channels.copying import copied
from prunekit.context import set_mode
from prunekit.errors import RunError, UsageError
from prunekit.inputs import call
from prunekit.measure.effort import current_effort
from prunekit.measure.isolated import Died, NotHandedOver, Process
from prunekit.measure.latency import Log
from prunekit.measure.measuring import Failed, line_of, plain_tensors
from prunekit.measure.profile.cache import conditions, key_of, load, store, structure
from prunekit.measure.profile.layer_times import LayerTimes
from prunekit.measure.profile.pair import Pair, Ready
from prunekit.measure.runtimes import RUNTIMES, Inputs, Setting, Source, exported, inputs_of


@dataclass(frozen=True, eq=False)
class Network:
    """A network to measure.

    Attributes:
        outline: its structure: modules with their settings, and the shapes and layout of all tensors, which may be
            without values, on the meta device.
        build: makes the network itself, of the same structure.
    """

    name: str
    outline: nn.Module
    build: Callable[[], nn.Module]


def has_layer_clock(runtime: str) -> bool:
    """Whether a runtime, by its name, can tell how long each layer took; the others can be profiled in eager."""
    return RUNTIMES.get(runtime).times_layers


def time_networks(
    dense: nn.Module,
    networks: Iterable[Network],
    inputs: Sequence[int] | Inputs,
    setting: Setting,
    *,
    repeats: int,
    cache: Path | None,
    again: bool = False,
    log: Log = lambda text: None,
) -> Iterator[LayerTimes]:
    """Measures networks one after the other, whole and layer by layer, each alternated with the dense one.

    All are copied, put into eval mode, checked against their outputs in eager float32, and run in one process of their
    own on a random input. What was measured is kept at once: the same profile goes on where it was interrupted.

    Args:
        networks: each is taken when those before it are done, and built only if it was not measured before.
        inputs: what they take: the shape of one input without the batch, or `Inputs`.
        repeats: how often each is run, at least 5; more often where they take less than 1.5 seconds together.
        cache: folder to keep measurements in and to take them from; see `cache_folder`. None keeps nothing.
        again: measures what there are doubts about once more, in place of taking it from the cache.
        log: gets a line for each network.

    Yields:
        The times of each network, in order.

    Raises:
        UsageError: the runtime has no layer clock.
        RunError: a network cannot be exported, computes something else in the runtime, or fails there.
    """
    if not has_layer_clock(setting.runtime):
        able = ", ".join(name for name, runtime in RUNTIMES.items() if runtime.times_layers)
        raise UsageError(f"runtime {setting.runtime!r} cannot tell how long each layer takes; these can: {able}")
    taken = inputs_of(inputs)
    common, dense_structure = conditions(setting, taken, repeats), structure(dense)
    with _Bench(dense, taken, setting, repeats, log) as bench:
        for network in networks:
            key = key_of(structure(network.outline), dense_structure, common)
            file = cache / f"{key}.json" if cache is not None else None
            found, origin = load(file) if file is not None else None, "measured before"
            if found is None or (again and found.doubts):
                found, origin = bench.measure(network.name, network.build()), "measured"
                if file is not None:
                    store(file, found)
            log(f"{network.name}: {found.whole_ms:.3f} ms, dense {found.dense_ms:.3f} ms, {origin}")
            yield found


def kept_times(
    dense: nn.Module,
    networks: Iterable[Network],
    inputs: Sequence[int] | Inputs,
    setting: Setting,
    *,
    repeats: int,
    cache: Path,
) -> Iterator[LayerTimes | None]:
    """Times of networks as far as they were measured before, in order; None of one that was not. Nothing is measured.

    Args:
        networks, inputs, setting, repeats, cache: as for `time_networks`.
    """
    common, dense_structure = conditions(setting, inputs_of(inputs), repeats), structure(dense)
    for network in networks:
        yield load(cache / f"{key_of(structure(network.outline), dense_structure, common)}.json")


class _Bench(ExitStack):
    """Measures networks in a process that is started for the first one, or in this one if it cannot have them."""

    def __init__(self, dense: nn.Module, inputs: Inputs, setting: Setting, repeats: int, log: Log) -> None:
        super().__init__()
        self.dense, self.inputs, self.setting, self.repeats, self.log = dense, inputs, setting, repeats, log
        self.runtime = RUNTIMES.get(setting.runtime)
        self.ask: Callable[[Ready], LayerTimes | Failed] | None = None

    def measure(self, name: str, network: nn.Module) -> LayerTimes:
        if self.ask is None:
            self.folder = Path(self.enter_context(TemporaryDirectory(prefix="prunekit-")))
            dense = self._ready("dense", self.dense, "dense")
            least_ms = current_effort().network_ms
            self.pair = Pair(self.runtime, dense, self.inputs, self.setting, self.repeats, least_ms)
            self.ask = self._start() if current_effort().own_process else self.pair
        try:
            found = self._asked(self._ready(name, network, "network"))
        except Died as error:
            raise RunError(f"{name}: not measured in {self.setting.runtime}: {error}") from error
        shutil.rmtree(self.folder / "network", ignore_errors=True)
        if isinstance(found, Failed):
            raise RunError(f"{name}: not measured in {self.setting.runtime}: {found.reason}")
        return found

    def _start(self) -> Callable[[Ready], LayerTimes | Failed]:
        try:
            return self.enter_context(Process(self.pair, self.folder)).ask
        except NotHandedOver as error:
            return self._here(error)

    def _asked(self, network: Ready) -> LayerTimes | Failed:
        assert self.ask is not None
        try:
            return self.ask(network)
        except NotHandedOver as error:
            self.ask = self._here(error)
            return self.ask(network)

    def _here(self, error: NotHandedOver) -> Pair:
        self.log(f"{self.setting.runtime}: timed in this process, not in one of its own: {error}")
        return self.pair

    def _ready(self, name: str, model: nn.Module, folder: str) -> Ready:
        plain = set_mode(copied(model, "cpu", torch.float32), False)
        try:
            with torch.inference_mode():
                expected = plain_tensors(call(plain, self.inputs.sample(self.setting.batch)))
        except Exception as error:  # the model's own code, at another batch or other widths than it was tried at
            raise RunError(f"{name}: does not run in eager: {line_of(error)}") from error
        if self.runtime.carrier == "module":
            return Ready(name, Source(plain), expected)
        keys = [self.runtime.file_key(self.setting)]
        return Ready(name, exported(plain, self.inputs, keys, self.folder / folder), expected)
