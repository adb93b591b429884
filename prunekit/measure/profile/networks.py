"""Profiling: whole networks of other widths, timed layer by layer in place, where caches and layouts are real."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import nn

from prunekit.errors import RunError, UsageError
from prunekit.measure.isolated import Died, NotHandedOver, Process
from prunekit.measure.measuring import Failed, plain_tensors
from prunekit.measure.profile.cache import conditions, key_of, load, store, structure
from prunekit.measure.profile.layer_times import LayerTimes
from prunekit.measure.profile.pair import Network, Pair
from prunekit.measure.runtimes import RUNTIMES, Setting, Source, exported, sample_of

LEAST_MS = 1500.0
"""That a network is measured for: a machine's speed wavers over tenths of a second."""

Log = Callable[[str], object]


def has_layer_clock(runtime: str) -> bool:
    """Whether a runtime, by its name, can tell how long each layer took; the others can be profiled in eager."""
    return RUNTIMES[runtime].times_layers


def time_networks(
    dense: nn.Module,
    networks: Iterable[tuple[str, nn.Module]],
    sample_shape: Sequence[int],
    setting: Setting,
    *,
    repeats: int,
    cache: Path | None,
    log: Log = lambda text: None,
) -> Iterator[LayerTimes]:
    """Measures networks one after the other, whole and layer by layer, each alternated with the dense one.

    All are copied, put into eval mode, checked against their outputs in eager float32, and run in one process of their
    own on a random input. What was measured is kept at once: the same profile goes on where it was interrupted.

    Args:
        networks: name and network; each is taken when those before it are done, so they may be made meanwhile.
        sample_shape: shape of one input without the batch.
        repeats: how often each is run, at least 5; more often where they take less than 1.5 seconds together.
        cache: folder to keep measurements in and to take them from; see `cache_folder`. None keeps nothing.
        log: gets a line for each network.

    Yields:
        The times of each network, in order.

    Raises:
        UsageError: the runtime has no layer clock.
        RunError: a network cannot be exported, computes something else in the runtime, or fails there.
    """
    if not has_layer_clock(setting.runtime):
        able = ", ".join(name for name in RUNTIMES if has_layer_clock(name))
        raise UsageError(f"runtime {setting.runtime!r} cannot tell how long each layer takes; these can: {able}")
    shape = tuple(sample_shape)
    common, dense_structure = conditions(setting, shape, repeats), structure(dense)
    with _Bench(dense, shape, setting, repeats, log) as bench:
        for name, network in networks:
            file = cache / f"{key_of(structure(network), dense_structure, common)}.json" if cache is not None else None
            found, origin = load(file) if file is not None else None, "measured before"
            if found is None:
                found, origin = bench.measure(name, network), "measured"
                if file is not None:
                    store(file, found)
            log(f"{name}: {found.whole_ms:.3f} ms, dense {found.dense_ms:.3f} ms, {origin}")
            yield found


class _Bench(ExitStack):
    """Measures networks in a process that is started for the first one, or in this one if it cannot have them."""

    def __init__(self, dense: nn.Module, shape: tuple[int, ...], setting: Setting, repeats: int, log: Log) -> None:
        super().__init__()
        self.dense, self.shape, self.setting, self.repeats, self.log = dense, shape, setting, repeats, log
        self.ask: Callable[[Network], LayerTimes | Failed] | None = None

    def measure(self, name: str, network: nn.Module) -> LayerTimes:
        if self.ask is None:
            self.folder = Path(self.enter_context(TemporaryDirectory(prefix="prunekit-")))
            self.pair = Pair(
                self._ready("dense", self.dense, "dense"), self.shape, self.setting, self.repeats, LEAST_MS
            )
            self.ask = self._start()
        try:
            found = self._asked(self._ready(name, network, "network"))
        except Died as error:
            raise RunError(f"{name}: not measured in {self.setting.runtime}: {error}") from error
        shutil.rmtree(self.folder / "network", ignore_errors=True)
        if isinstance(found, Failed):
            raise RunError(f"{name}: not measured in {self.setting.runtime}: {found.reason}")
        return found

    def _start(self) -> Callable[[Network], LayerTimes | Failed]:
        try:
            return self.enter_context(Process(self.pair, self.folder)).ask
        except NotHandedOver as error:
            return self._here(error)

    def _asked(self, network: Network) -> LayerTimes | Failed:
        assert self.ask is not None
        try:
            return self.ask(network)
        except NotHandedOver as error:
            self.ask = self._here(error)
            return self.ask(network)

    def _here(self, error: NotHandedOver) -> Pair:
        self.log(f"{self.setting.runtime}: timed in this process, not in one of its own: {error}")
        return self.pair

    def _ready(self, name: str, model: nn.Module, folder: str) -> Network:
        plain = copy.deepcopy(model).to("cpu", torch.float32).eval()
        with torch.inference_mode():
            expected = plain_tensors(plain(sample_of(self.shape, self.setting.batch)))
        if RUNTIMES[self.setting.runtime].carrier == "module":
            return Network(name, Source(plain), expected)
        return Network(name, exported(plain, self.shape, [self.setting.batch], self.folder / folder), expected)
