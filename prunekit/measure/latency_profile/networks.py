"""Profiling: whole networks of other widths, timed layer by layer in place, where caches and layouts are real.

What happens inside the process that profiles: a network, whole and by layers, alternated with the dense one.

Networks for a latency table: the dense one, and choices of widths all over the range.
"""

from __future__ import annotations

import gc
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from prunekit.channels.channel_map import ChannelMap, Keep
from prunekit.channels.cut.model_copy import copied
from prunekit.errors import RunError, UsageError
from prunekit.measure.effort import current_effort
from prunekit.measure.latency.comparison import Log
from prunekit.measure.latency.machine import Load
from prunekit.measure.latency.timing import Contention, Timer, Times, alternate, doubts, warm_up, warm_up_briefly
from prunekit.measure.latency.timing_job import SettingFailure, check_outputs, error_line, output_tensors, weight_moves
from prunekit.measure.latency.worker_process import UnpicklableError, WorkerDied, WorkerProcess
from prunekit.measure.latency_profile.layer_times import LayerTimes, conditions, key_of, load, store, structure
from prunekit.measure.runtimes.onnx_files import onnx_source
from prunekit.measure.runtimes.runtime import RUNTIMES, Runtime
from prunekit.measure.runtimes.session import Inputs, Session, Setting, Source, inputs_of
from prunekit.planning.candidates import GroupPart
from prunekit.utils.context import on_device, set_mode
from prunekit.utils.context import threads as with_threads
from prunekit.utils.inputs import call

Pass = Mapping[str | None, float]


@dataclass(frozen=True, eq=False)
class Ready:
    """A network that is ready to be measured: what it is run from, and the tensors that it returns in eager float32."""

    name: str
    source: Source
    expected: list[Tensor]


@dataclass(eq=False)
class Pair:
    """Called with a network, it measures it beside the dense one, whose session it keeps from the first call on.

    Attributes:
        repeats: rounds, at least; as many more as it takes to measure for `least_ms` milliseconds.
    """

    runtime: Runtime
    dense: Ready
    inputs: Inputs
    setting: Setting
    repeats: int
    least_ms: float = 0.0
    dense_session: Session | None = None

    def __call__(self, network: Ready) -> LayerTimes | SettingFailure:
        """Return the network's times, or what it failed of."""
        try:
            with with_threads(self.setting.threads), on_device(self.setting.device), torch.inference_mode():
                return self._measure(network)
        except Exception as error:  # a runtime's own errors, and whatever a model's code raises
            return SettingFailure(self.setting, error_line(error))
        finally:
            gc.collect()

    def _measure(self, network: Ready) -> LayerTimes:
        device = torch.device(self.setting.device)
        if self.dense_session is None:
            self.dense_session = self._open(self.dense)
            warm_up(Timer(self.dense_session.run, device), device.type)
        session = self._open(network)
        assert session.layers is not None
        clock = session.layers()
        timers = [Timer(run, device) for run in (self.dense_session.run, session.run, clock.run)]
        for timer in timers[1:]:
            warm_up_briefly(timer)
        rounds = max(self.repeats, ceil(self.least_ms / sum(timer() for timer in timers)))
        load = Load()
        with load.watched():
            times = alternate(timers, rounds, weight_moves(self.dense_session, session))
        contention = load.contention(self.setting.threads) if self.setting.device == "cpu" else None
        return _together(times, clock.passes(rounds), contention)

    def _open(self, network: Ready) -> Session:
        sample = self.inputs.sample(self.setting.batch)
        session = self.runtime.open(network.source, sample, self.setting)
        check_outputs(network.name, session, self.setting, network.expected)
        return session


def _together(times: Times, passes: Sequence[Pass], contention: Contention | None) -> LayerTimes:
    places = dict.fromkeys(place for found in passes for place in found)
    modules = {place: _undisturbed([found.get(place, 0.0) for found in passes]) for place in places}
    return LayerTimes(
        whole_ms=_undisturbed(times[1]),
        dense_ms=_undisturbed(times[0]),
        modules_ms={place: ms for place, ms in modules.items() if place is not None},
        rest_ms=modules.get(None, 0.0),
        doubts=tuple(doubts(times[0] / times[1], contention)),
    )


def _undisturbed(times: Any) -> float:
    """Return the lower quartile: what other processes add, they add to whole passes more than to single layers."""
    return float(np.percentile(times, 25))


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
    """Return whether a runtime, by its name, can tell how long each layer took; the others can be profiled in eager."""
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
    """Measure networks one after the other, whole and layer by layer, each alternated with the dense one.

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
    """Yield the times of networks as far as they were measured before, in order; None of one that was not. Nothing is
    measured.

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
        self.ask: Callable[[Ready], LayerTimes | SettingFailure] | None = None

    def measure(self, name: str, network: nn.Module) -> LayerTimes:
        if self.ask is None:
            self.folder = Path(self.enter_context(TemporaryDirectory(prefix="prunekit-")))
            dense = self._ready("dense", self.dense, "dense")
            least_ms = current_effort().network_ms
            self.pair = Pair(self.runtime, dense, self.inputs, self.setting, self.repeats, least_ms)
            self.ask = self._start() if current_effort().own_process else self.pair
        try:
            found = self._asked(self._ready(name, network, "network"))
        except WorkerDied as error:
            raise RunError(f"{name}: not measured in {self.setting.runtime}: {error}") from error
        shutil.rmtree(self.folder / "network", ignore_errors=True)
        if isinstance(found, SettingFailure):
            raise RunError(f"{name}: not measured in {self.setting.runtime}: {found.reason}")
        return found

    def _start(self) -> Callable[[Ready], LayerTimes | SettingFailure]:
        try:
            return self.enter_context(WorkerProcess(self.pair, self.folder)).ask
        except UnpicklableError as error:
            return self._here(error)

    def _asked(self, network: Ready) -> LayerTimes | SettingFailure:
        assert self.ask is not None
        try:
            return self.ask(network)
        except UnpicklableError as error:
            self.ask = self._here(error)
            return self.ask(network)

    def _here(self, error: UnpicklableError) -> Pair:
        self.log(f"{self.setting.runtime}: timed in this process, not in one of its own: {error}")
        return self.pair

    def _ready(self, name: str, model: nn.Module, folder: str) -> Ready:
        plain = set_mode(copied(model, "cpu", torch.float32), False)
        try:
            with torch.inference_mode():
                expected = output_tensors(call(plain, self.inputs.sample(self.setting.batch)))
        except Exception as error:  # the model's own code, at another batch or other widths than it was tried at
            raise RunError(f"{name}: does not run in eager: {error_line(error)}") from error
        if self.runtime.carrier == "module":
            return Ready(name, Source(plain), expected)
        keys = [self.runtime.file_key(self.setting)]
        return Ready(name, onnx_source(plain, self.inputs, keys, self.folder / folder), expected)


LEAST, SPREAD = 0.1, 0.25
"""Mean share of the narrowest networks, and by how much parts differ from a network's mean."""


def sampled(channel_map: ChannelMap, parts: list[GroupPart], number: int, *, seed: int = 0) -> Iterator[Keep]:
    """Yield what so many networks keep: all, then random shares of every part around a mean that is spread evenly.

    Args:
        parts: what may go; which labels of a part makes no difference to time.
    """
    generator = np.random.default_rng(seed)
    means = np.linspace(LEAST + SPREAD / 2, 1.0, max(number - 1, 1))
    yield np.ones(channel_map.n_labels, dtype=bool)
    for mean in generator.permutation(means)[: number - 1]:
        keep = np.ones(channel_map.n_labels, dtype=bool)
        for part in parts:
            wanted = part.labels.size * float(np.clip(mean + generator.uniform(-SPREAD, SPREAD), LEAST, 1.0))
            keep[part.labels[part.at_most(max(wanted, 1)) :]] = False
        yield channel_map.completed(keep)
