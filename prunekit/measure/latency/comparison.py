"""Latency of several models, timed alternately, so that what slows the machine slows all of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from itertools import groupby, product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn

from prunekit.backends.backend import RUNTIMES, Backend
from prunekit.backends.eager import layout_of
from prunekit.backends.files.exported_model import ExportedModel
from prunekit.backends.session import MODULE, FileKey, Inputs, Setting, Source, inputs_of
from prunekit.errors import RunError, UsageError
from prunekit.hooks.model_copy import copied
from prunekit.known_names import DTYPES
from prunekit.measure.latency.machine import clock_mhz, describe_machine
from prunekit.measure.latency.timing import doubts, median_interval, paired_ratio
from prunekit.measure.latency.timing_job import (
    DEFAULT,
    Outcome,
    SettingFailure,
    SettingTimes,
    TimingJob,
    backend_of,
    exported_source,
    file_source,
    output_tensors,
    require_timable,
    run_job_apart,
)
from prunekit.settings.deployment import LatencySettings
from prunekit.utils.availability import int8_note
from prunekit.utils.context import resolve_device, set_mode
from prunekit.utils.display import plural
from prunekit.utils.inputs import call

Row = dict[str, Any]
Log = Callable[[str], object]


class MeasuredAgain(Protocol):
    """A function that measures models that were prepared."""

    def __call__(self, repeats: int, limit_s: float = math.inf) -> LatencyReport:
        """Measure in so many rounds; in fewer if they take longer than `limit_s` seconds."""


@dataclass(frozen=True)
class LatencyReport:
    """The latency of models in several settings.

    Every row has the keys of its setting: runtime, device, batch, threads, dtype, memory_format (in torch's own
    runtimes that of the model, if its weights are channels last); and `stable`: if it is not, the figure supports no
    claim, for the reasons in `doubts`.
    """

    # one per model and setting, with the milliseconds of one forward of the whole batch: median_ms with its 95 %
    # interval low_ms to high_ms, p10_ms, p90_ms, p99_ms; samples_per_s; peak_memory_bytes of the model (None if
    # unknown); repeats, and warm_up calls before them; clock_mhz of the device right after (None if unknown)
    rows: tuple[Row, ...]
    # one per setting and model after the first: how many times faster than the first: median of the paired ratios, low
    # and high of its 95 % interval
    speedup: tuple[Row, ...]
    # the milliseconds behind each row, in the order they were taken; `samples[i]` belongs to `rows[i]`
    samples: tuple[tuple[float, ...], ...]
    notes: tuple[str, ...]  # on what could not be measured here
    failures: tuple[Row, ...] = ()  # settings in which outputs differ or something failed, with a `reason`
    machine: Row = field(default_factory=dict)  # that of `describe_machine`, and `clock_mhz_after`
    not_apart: tuple[str, ...] = ()  # those of the notes that say that a runtime had no process of its own

    def sample_rows(self) -> Iterator[Row]:
        """Yield every sample as a row of its own: model, device, runtime, batch, threads, dtype, memory_format, ms."""
        keys = ("model", "device", "runtime", "batch", "threads", "dtype", "memory_format")
        for row, samples in zip(self.rows, self.samples, strict=True):
            yield from ({key: row[key] for key in keys} | {"ms": ms} for ms in samples)


def measure_latency(
    models: Mapping[str, nn.Module],
    inputs: Sequence[int] | Inputs,
    settings: LatencySettings,
    devices: Sequence[torch.device],
    *,
    log: Log = lambda text: None,
) -> LatencyReport:
    """Time copies of the models in eval and inference mode, on random input, each runtime in a process of its own.

    In each setting every model is checked against its own outputs in eager float32, then warmed up until its times are
    stable; then each round times every model once, in reversed order every other round.

    Args:
        models: by name; speedups are relative to the first.
        inputs: of the models: the shape of one input without the batch, such as (3, 224, 224), or `Inputs`.
        settings: runtimes, batches, CPU threads, dtypes, memory formats, and the number of rounds.
        devices: where to time; CUDA is timed with its own events, every run synchronized.
        log: called with a line before every export and timing.

    Raises:
        UsageError: a runtime is not installed, or cannot run in any of the settings; nothing was measured.
    """
    with prepared_latency(models, inputs, settings, devices, log=log) as measured:
        return measured(settings.repeats)


@contextmanager
def prepared_latency(
    models: Mapping[str, nn.Module],
    inputs: Sequence[int] | Inputs,
    settings: LatencySettings,
    devices: Sequence[torch.device],
    *,
    log: Log = lambda text: None,
) -> Iterator[MeasuredAgain]:
    """Prepare models to be measured several times: they are copied, exported and run in eager only once."""
    taken = inputs_of(inputs)
    chosen, notes = choose_settings(settings, devices)
    for name, model in models.items():
        if isinstance(model, ExportedModel):
            require_timable(name, model, chosen)
    copies = {name: set_mode(copied(model, "cpu", torch.float32), False) for name, model in models.items()}
    with TemporaryDirectory(prefix="prunekit-") as place:
        folder, parts = Path(place), list[TimingJob | list[Outcome]]()
        all_sources = _ModelSources(copies, taken, folder, log)
        with torch.inference_mode():
            expected = {
                (name, batch): output_tensors(call(model, taken.sample(batch)))
                for batch in settings.batches
                for name, model in copies.items()
            }
            for name, group in groupby(chosen, lambda setting: setting.runtime):
                sources, able, failed = all_sources.of(list(group))
                parts += [failed] if failed else []
                runtime = RUNTIMES.get(name)
                parts += [TimingJob(runtime, tuple(able), sources, expected, taken, settings.repeats)] if able else []

        def measured(repeats: int, limit_s: float = math.inf) -> LatencyReport:
            def apart(job: TimingJob) -> tuple[list[Outcome], str]:
                what = f"{plural(len(job.sources), 'model')} in {plural(len(job.settings), 'setting')}"
                log(f"latency: {job.settings[0].runtime}: timing {what}")
                return run_job_apart(replace(job, repeats=repeats, limit_s=limit_s), folder)

            machine = describe_machine()
            found = [apart(part) if isinstance(part, TimingJob) else (part, "") for part in parts]
            not_apart = tuple(note for _, note in found if note)
            quantized = [int8_note()] if "int8" in settings.dtypes else []
            said = [*notes, *not_apart, *quantized, *_cuda_note(devices)]
            outcomes = [outcome for some, _ in found for outcome in some]
            report = _report(copies, outcomes, said, machine | {"clock_mhz_after": clock_mhz()})
            return replace(report, not_apart=not_apart)

        yield measured


def choose_settings(settings: LatencySettings, devices: Sequence[torch.device]) -> tuple[list[Setting], list[str]]:
    """Return every setting that can be timed, runtime by runtime, and notes on those that cannot.

    Runtimes, devices, dtypes and memory formats are combined wherever a runtime can run the combination. Threads apply
    to the CPU; other devices are timed with the first thread count alone.
    """
    for name in settings.runtimes:
        if missing := RUNTIMES.get(name).missing():
            raise UsageError(f"runtime {name!r} {missing}")
    found, left_out = [], []
    for combination in product(settings.runtimes, devices, settings.dtypes, settings.memory_formats):
        runtime, device, dtype, memory_format = combination
        setting = Setting(runtime, str(device), 1, 1, DTYPES[dtype], memory_format)
        backend = RUNTIMES.get(runtime)
        able = device.type in backend.devices
        reason = backend.refusal(setting) if able else f"it runs on {' and '.join(backend.devices)} here"
        if reason:
            left_out.append(
                (combination, f"{runtime} on {device}, {setting.dtype}, {memory_format}: not timed: {reason}")
            )
        else:
            threads = settings.threads if device.type == "cpu" else settings.threads[:1]
            sizes = product(threads, settings.batches)
            found += [(combination, replace(setting, batch=batch, threads=count)) for count, batch in sizes]
    for position in range(4):  # what is in no setting is an error, and a combination that is left out only noted
        timed = {combination[position] for combination, _ in found}
        for combination, text in left_out:
            if combination[position] not in timed:
                raise UsageError(f"{text}; nothing was measured")
    return [setting for _, setting in found], [text for _, text in left_out]


@dataclass
class _ModelSources:
    """The models in the forms that runtimes take, each made once: runtimes share files."""

    models: Mapping[str, nn.Module]
    inputs: Inputs
    folder: Path
    log: Log
    files: dict[tuple[str, str], dict[FileKey, Path]] = field(default_factory=dict)  # by model, format and key
    errors: dict[tuple[str, FileKey], str] = field(default_factory=dict)  # of the export, by format and key

    def of(self, settings: Sequence[Setting]) -> tuple[Mapping[str, Source], list[Setting], list[Outcome]]:
        """Return the sources for a runtime, the settings that they exist for, and failures for the others."""
        runtime = RUNTIMES.get(settings[0].runtime)
        exported = {name: exported_source(m) for name, m in self.models.items() if isinstance(m, ExportedModel)}
        if runtime.carrier == MODULE:
            modules = {name: exported.get(name) or Source(model) for name, model in self.models.items()}
            return modules, list(settings), []
        keys = [runtime.file_key(setting) for setting in settings]
        for key in dict.fromkeys(keys):
            self._export(runtime, key)
        reasons = [self.errors.get((runtime.carrier, key)) for key in keys]
        able = [setting for setting, reason in zip(settings, reasons, strict=True) if reason is None]
        failed = [
            SettingFailure(setting, why) for setting, why in zip(settings, reasons, strict=True) if why is not None
        ]
        made = {
            name: exported.get(name) or Source(files=self.files.get((name, runtime.carrier), {}))
            for name in self.models
        }
        return made, able, list(failed)

    def _export(self, runtime: Backend, key: FileKey) -> None:
        """Export every model for a batch and dtype, unless one failed before."""
        for index, (name, model) in enumerate(self.models.items()):
            if isinstance(model, ExportedModel):
                continue
            files = self.files.setdefault((name, runtime.carrier), {})
            if key not in files and (runtime.carrier, key) not in self.errors:
                self.log(f"latency: exporting {name}, batch {key[0]}, {key[1]}")
                try:
                    place = self.folder / str(index)
                    files |= file_source(runtime, model, self.inputs, [key], place).files
                except RunError as error:
                    self.errors[runtime.carrier, key] = str(error)


def _report(models: Mapping[str, nn.Module], outcomes: list[Outcome], notes: list[str], machine: Row) -> LatencyReport:
    timed = [outcome for outcome in outcomes if isinstance(outcome, SettingTimes)]
    failed = [outcome for outcome in outcomes if isinstance(outcome, SettingFailure)]
    return LatencyReport(
        rows=tuple(row for found in timed for row in _rows(models, found)),
        speedup=tuple(row for found in timed for row in _speedups(models, found)),
        samples=tuple(tuple(times.tolist()) for found in timed for times in found.times),
        notes=tuple(notes),
        failures=tuple(asdict(found.setting) | {"reason": found.reason} for found in failed),
        machine=machine,
    )


def _setting(models: Mapping[str, nn.Module], name: str, found: SettingTimes) -> Row:
    row = {"model": name} | asdict(found.setting)
    model, asked = models[name], found.setting.runtime
    if isinstance(model, ExportedModel):
        return row | ({"runtime": backend_of(model, asked).name} if asked == DEFAULT else {})
    if RUNTIMES.get(asked).carrier == MODULE:
        row["memory_format"] = layout_of(model, found.setting.memory_format)
    return row


def _rows(models: Mapping[str, nn.Module], found: SettingTimes) -> Iterator[Row]:
    for name, times, calls, memory in zip(models, found.times, found.warm_up, found.memory, strict=True):
        median, low, high = median_interval(times)
        p10, p90, p99 = np.percentile(times, (10, 90, 99)).tolist()
        figures = {"median_ms": median, "low_ms": low, "high_ms": high, "p10_ms": p10, "p90_ms": p90, "p99_ms": p99}
        figures |= {"samples_per_s": 1000 * found.setting.batch / median, "peak_memory_bytes": memory}
        reasons = doubts(times, found.contention)
        figures |= {"repeats": len(times), "warm_up": calls, "clock_mhz": found.clock_mhz}
        yield _setting(models, name, found) | figures | {"stable": not reasons, "doubts": reasons}


def _speedups(models: Mapping[str, nn.Module], found: SettingTimes) -> Iterator[Row]:
    for name, times in zip(list(models)[1:], found.times[1:], strict=True):
        median, low, high = paired_ratio(found.times[0], times)
        reasons = doubts(found.times[0] / times, found.contention)
        figures = {"median": median, "low": low, "high": high, "stable": not reasons, "doubts": reasons}
        yield _setting(models, name, found) | figures


def _cuda_note(devices: Sequence[torch.device]) -> list[str]:
    if any(device.type == "cuda" for device in devices):
        return []
    return ["CUDA was not timed: it was not asked for"] if torch.cuda.is_available() else ["no CUDA device"]


def devices(names: str, settings: LatencySettings) -> list[torch.device]:
    """Return the devices of a text with commas, on which everything in the settings can be timed.

    `auto` is the CPU, and CUDA if there is one, as far as the runtimes run there.

    Raises:
        UsageError: a device does not exist on this machine, or a runtime is not installed or cannot do what is asked.
    """
    if names != "auto":
        found = list(dict.fromkeys(resolve_device(name.strip()) for name in names.split(",")))
    else:
        here = [torch.device("cpu"), *([torch.device("cuda", 0)] if torch.cuda.is_available() else [])]
        kinds = {kind for name in settings.runtimes for kind in RUNTIMES.get(name).devices}
        found = [device for device in here if device.type in kinds] or here[:1]
    choose_settings(settings, found)
    return found
