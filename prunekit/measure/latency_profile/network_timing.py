"""Profiling: networks of many widths, timed whole and layer by layer, alternately with the dense one.

Layers are timed in whole networks, where caches and layouts are those of a real run.

The times of each network are a file of a cache, named by all that they depend on.
"""

from __future__ import annotations

import gc
import hashlib
import inspect
import json
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, packages_distributions, version
from itertools import chain, compress
from math import ceil, inf, isfinite
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from prunekit.backends.backend import RUNTIMES, Backend
from prunekit.backends.session import INT8, MODULE, Inputs, Session, Setting, Source, Timer, inputs_of
from prunekit.channels.tracing.call_sites import weak_cache
from prunekit.channels.tracing.channel_map import ChannelMap, Keep
from prunekit.errors import ArtifactError, RunError, UsageError, raised_as
from prunekit.hooks.model_copy import copied
from prunekit.measure.latency import timing_job
from prunekit.measure.latency.comparison import Log
from prunekit.measure.latency.machine import Load, cpu_name
from prunekit.measure.latency.timing import alternate, doubts, warm_up, warm_up_briefly
from prunekit.measure.latency.worker_process import UnpicklableError, WorkerDied, WorkerProcess
from prunekit.measure.measurement_effort import current_effort
from prunekit.planning.budgets.cost_model import GroupPart
from prunekit.planning.depth_search import Block
from prunekit.reading.text_files import as_record, read_json
from prunekit.utils.context import set_mode
from prunekit.utils.files import require_writable, write_json
from prunekit.utils.inputs import call
from prunekit.utils.tensors import lies_channels_last


@dataclass(frozen=True)
class LayerTimes:
    """The times of a network, measured alternately with the dense one; all are lower quartiles over the rounds."""

    whole_ms: float  # of a forward pass of the batch, without a layer clock
    dense_ms: float  # of the dense network, in the same process: what slows the machine slows both
    # of the operators of each module, by its path; "" is the model's own code. A module that the runtime fuses into
    # another has none.
    modules_ms: Mapping[str, float]
    rest_ms: float  # of operators of no module, such as changes of layout; 0 in eager
    doubts: tuple[str, ...] = ()  # why the ratio of `whole_ms` and `dense_ms` supports no claim; empty if it does
    averaged: bool = False  # whether they are the mean of two measurements, both doubtful

    def settled(self, again: LayerTimes) -> LayerTimes:
        """Return the times of a second measurement after this doubtful one; of two doubtful ones the mean.

        Doubts are sentences, which do not tell the steadier of two. The mean is of shares of the dense network's time,
        by which the table is scaled, and which load disturbs less than milliseconds, as both networks ran in turn.
        """
        if not again.doubts:
            return again
        dense_ms = (self.dense_ms + again.dense_ms) / 2

        def mean(one: float, other: float) -> float:
            return dense_ms * (one / self.dense_ms + other / again.dense_ms) / 2

        paths = dict.fromkeys([*self.modules_ms, *again.modules_ms])
        modules = {path: mean(self.modules_ms.get(path, 0.0), again.modules_ms.get(path, 0.0)) for path in paths}
        whole_ms, rest_ms = mean(self.whole_ms, again.whole_ms), mean(self.rest_ms, again.rest_ms)
        return LayerTimes(whole_ms, dense_ms, modules, rest_ms, again.doubts, averaged=True)


def read_times(file: Path) -> LayerTimes | None:
    """Return the cached times; None if there is no file, or it is damaged."""
    try:
        found = as_record(LayerTimes, read_json(file), str(file))
    except ArtifactError:
        return None
    times = (found.whole_ms, found.dense_ms, found.rest_ms, *found.modules_ms.values())
    return found if all(isfinite(ms) and ms >= 0 for ms in times) and found.dense_ms > 0 else None


class TimesCache:
    """The files of a profile's times: where they cannot be written, that is said once, and nothing is kept."""

    def __init__(self, folder: Path | None, log: Callable[[str], object]) -> None:
        self._folder, self._log, self._written = folder, log, folder is not None
        if folder is not None:
            try:
                require_writable(folder, folder=True, option="PRUNEKIT_CACHE")
            except UsageError as error:
                self._give_up(error)

    def read(self, key: str) -> LayerTimes | None:
        """Return the times with a key, see `with_keys`; None if they are not there, or damaged."""
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


VERSION, VERSION_MOVED = 4, 5
"""Version of the method, the second for settings in which weights are moved; a change voids cached times."""
LIBRARIES = ("builtins", "torch", "torchvision", "prunekit")
"""Packages whose code changes with their version alone."""


def conditions(setting: Setting, inputs: Inputs, repeats: int) -> dict[str, Any]:
    """Return what every network of a profile has in common: setting, machine, versions, inputs and repeats."""
    runtime, device = RUNTIMES.get(setting.runtime), torch.device(setting.device)
    quantizers = {runtime.quantizer} - {*runtime.packages} if setting.dtype == INT8 else set[str]()
    packages, module = ("torch", *runtime.packages, *quantizers), inspect.getmodule(runtime.defined)
    code = {}  # of a user's runtime, which may change from one run to the next
    if module is not None and module.__name__.partition(".")[0] not in LIBRARIES:
        code = {"runtime_code": hashlib.sha256(_source(module).encode()).hexdigest()}
    return asdict(setting) | {
        "way": VERSION_MOVED if runtime.moves_weights(setting) else VERSION,
        "sample_shape": inputs.described(),
        "repeats": repeats,
        "cpu": cpu_name(),
        "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else "",
        "versions": {name: _version(name) for name in packages},
        **code,
    }


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
    classes = dict.fromkeys(kind for module in network.modules() for kind in type(module).__mro__)
    code = "".join(_source(kind) for kind in classes if kind.__module__.partition(".")[0] not in LIBRARIES)
    text = re.sub(r" at 0x[0-9a-f]+", "", repr(network))  # of functions, which lie elsewhere in each process
    return hashlib.sha256(f"{text}\n{shapes}{layout}{code}".encode()).hexdigest()


@weak_cache
def _source(kind: type | ModuleType) -> str:
    try:
        return f"\n{inspect.getsource(kind)}"
    except (OSError, TypeError):  # typed into a console
        return ""


LEAST, SPREAD = 0.1, 0.25
"""Mean share of labels that the narrowest networks keep, and the largest difference of a part from this mean."""


def sample_widths(
    channel_map: ChannelMap, parts: list[GroupPart], number: int, *, blocks: Sequence[Block] = (), seed: int = 0
) -> Iterator[Keep]:
    """Yield the kept labels of a number of networks to measure.

    The first keeps all; the others keep random shares of every part, around means that are spread evenly. Which labels
    of a part are kept makes no difference to time. Every other network is also without a random share of the blocks.
    """
    generator = np.random.default_rng(seed)
    means = np.linspace(LEAST + SPREAD / 2, 1.0, max(number - 1, 1))
    yield np.ones(channel_map.n_labels, dtype=bool)
    for index, mean in enumerate(generator.permutation(means)[: number - 1]):
        keep = np.ones(channel_map.n_labels, dtype=bool)
        for part in parts:
            wanted = part.labels.size * float(np.clip(mean + generator.uniform(-SPREAD, SPREAD), LEAST, 1.0))
            keep[part.labels[part.at_most(max(wanted, 1)) :]] = False
        if blocks and index % 2 == 0:
            absent = generator.uniform(size=len(blocks)) < generator.uniform(0.0, 1.0)  # between none and all of them
            for part_index in chain.from_iterable(block.parts for block in compress(blocks, absent)):
                keep[parts[part_index].labels] = False
        yield channel_map.completed(keep)


@dataclass(frozen=True, eq=False)
class Network:
    """A network to measure."""

    name: str
    outline: nn.Module  # a module with the same structure, which may be on the meta device
    build: Callable[[], nn.Module]  # returns the network itself
    before: LayerTimes | None = None  # the doubtful times of a first pass, after which it is measured once more


def has_layer_clock(runtime: str) -> bool:
    """Return whether a runtime, by its name, can time each layer; models for others are profiled in eager."""
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
    limit_s: float = inf,
    log: Log = lambda text: None,
) -> Iterator[LayerTimes]:
    """Measure networks one after the other, whole and layer by layer, each alternated with the dense one.

    All are copied, put into eval mode, checked against their outputs in eager float32, and run in one process of their
    own on a random input, at least `repeats` times (5), and more often if that takes less than 1.5 seconds together.
    The rounds of one network may take `limit_s`; a few are run in any case. A network is taken when those before it are
    done, and built only if its times are not in the cache, or doubtful and wanted `again`, or settled after a first
    pass. Times are cached at once, so that a profile that was interrupted can continue.
    """
    if not has_layer_clock(setting.runtime):
        able = ", ".join(name for name, facts in RUNTIMES.facts().items() if facts.get("times_layers"))
        raise UsageError(f"runtime {setting.runtime!r} cannot tell how long each layer takes; these can: {able}")
    taken = inputs_of(inputs)
    times = TimesCache(cache, log)
    with _ProfileProcess(dense, taken, setting, repeats, limit_s, log) as process:
        for network, key in with_keys(dense, networks, taken, setting, repeats):
            found, first, origin = times.read(key), network.before, "measured before"
            if found is None or (found.doubts and (again if first is None else not found.averaged)):
                found, origin = process.measure(network.name, network.build()), "measured"
                found = found if first is None else first.settled(found)
                times.write(key, found)
            log(f"{network.name}: {found.whole_ms:.3f} ms, dense {found.dense_ms:.3f} ms, {origin}")
            yield found


def with_keys(
    dense: nn.Module, networks: Iterable[Network], inputs: Inputs, setting: Setting, repeats: int
) -> Iterator[tuple[Network, str]]:
    """Yield networks, each with the name of its file in the cache: a hash of both networks and of their conditions."""
    common, dense_hash = conditions(setting, inputs, repeats), structure_hash(dense)
    for network in networks:
        text = json.dumps([structure_hash(network.outline), dense_hash, common], sort_keys=True)
        yield network, hashlib.sha256(text.encode()).hexdigest()


class _ProfileProcess(ExitStack):
    """Measures networks in a process that is started for the first one; in this one if they cannot be pickled."""

    def __init__(
        self, dense: nn.Module, inputs: Inputs, setting: Setting, repeats: int, limit_s: float, log: Log
    ) -> None:
        super().__init__()
        self.dense, self.inputs, self.setting, self.log = dense, inputs, setting, log
        self.repeats, self.limit_s = repeats, limit_s
        self.runtime = RUNTIMES.get(setting.runtime)
        self.timer: NetworkTimer | None = None
        self.process: WorkerProcess | None = None
        self.apart = current_effort().own_process

    def measure(self, name: str, network: nn.Module) -> LayerTimes:
        if self.timer is None:
            self.folder = Path(self.enter_context(TemporaryDirectory(prefix="prunekit-")))
            dense = self._prepared("dense", self.dense, "dense")
            least_ms = current_effort().network_ms
            self.timer = NetworkTimer(
                self.runtime, dense, self.inputs, self.setting, self.repeats, least_ms, self.limit_s
            )
        try:
            found = self._answer(self.timer, self._prepared(name, network, "network"))
        except WorkerDied as error:
            raise RunError(f"{name}: not measured in {self.setting.runtime}: {error}") from error
        shutil.rmtree(self.folder / "network", ignore_errors=True)
        if isinstance(found, timing_job.SettingFailure):
            raise RunError(f"{name}: not measured in {self.setting.runtime}: {found.reason}")
        return found

    def _answer(self, timer: NetworkTimer, network: PreparedNetwork) -> LayerTimes | timing_job.SettingFailure:
        if self.apart:
            try:
                if self.process is None:
                    self.process = self.enter_context(WorkerProcess(timer, self.folder))
                found: LayerTimes | timing_job.SettingFailure = self.process.ask(network)
                return found
            except UnpicklableError as error:
                self.apart = False
                self.log(f"{self.setting.runtime}: timed in this process, not in one of its own: {error}")
        return timer(network)

    def _prepared(self, name: str, model: nn.Module, folder: str) -> PreparedNetwork:
        plain = set_mode(copied(model, "cpu", torch.float32), False)
        # the model's own code may not take a batch or widths at which it was not tried
        with (
            torch.inference_mode(),
            raised_as(RunError, f"{name}: does not run in eager: ", reason=timing_job.error_line),
        ):
            expected = timing_job.output_tensors(call(plain, self.inputs.sample(self.setting.batch)))
        if self.runtime.carrier == MODULE:
            return PreparedNetwork(name, Source(plain), expected)
        keys = [self.runtime.file_key(self.setting)]
        source = timing_job.file_source(self.runtime, plain, self.inputs, keys, self.folder / folder)
        return PreparedNetwork(name, source, expected)


@dataclass(frozen=True, eq=False)
class PreparedNetwork:
    """A network that is ready to be measured: its source, and the tensors that it returns in eager float32."""

    name: str
    source: Source
    expected: list[Tensor]


@dataclass(eq=False)
class NetworkTimer:
    """Times the networks that it is called with, each alternately with the dense one, whose session stays open."""

    runtime: Backend
    dense: PreparedNetwork
    inputs: Inputs
    setting: Setting
    repeats: int  # rounds, at least; more if they take less than `least_ms` milliseconds
    least_ms: float = 0.0
    limit_s: float = inf  # seconds that the rounds may take; a few are run in any case
    dense_session: Session | None = None

    def __call__(self, network: PreparedNetwork) -> LayerTimes | timing_job.SettingFailure:
        """Return the network's times, or why it failed."""
        found = timing_job.attempted(self.setting, lambda: self._measure(network))
        gc.collect()
        return found

    def _measure(self, network: PreparedNetwork) -> LayerTimes:
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
            moves = timing_job.weight_moves(self.dense_session, session)
            times = alternate(timers, rounds, moves, limit_s=self.limit_s)
        contention = load.contention(self.setting.threads) if self.setting.device == "cpu" else None
        passes = clock.passes(times.shape[1])
        paths = dict.fromkeys(path for found in passes for path in found)
        modules = {path: _lower_quartile([found.get(path, 0.0) for found in passes]) for path in paths}
        return LayerTimes(
            whole_ms=_lower_quartile(times[1]),
            dense_ms=_lower_quartile(times[0]),
            modules_ms={path: ms for path, ms in modules.items() if path is not None},
            rest_ms=modules.get(None, 0.0),
            doubts=tuple(doubts(times[0] / times[1], contention)),
        )

    def _open(self, network: PreparedNetwork) -> Session:
        sample = self.inputs.sample(self.setting.batch)
        timing_job.check_float_file(network.name, self.runtime, network.source, sample, self.setting, network.expected)
        session = self.runtime.session(network.source, sample, self.setting)
        timing_job.check_outputs(network.name, session, self.setting, network.expected)
        return session


def _lower_quartile(times: Any) -> float:
    """Return a figure of times that other processes disturb less than the median."""
    return float(np.percentile(times, 25))
