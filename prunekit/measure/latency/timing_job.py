"""Timing of models and their files in all settings of one runtime, in a process of its own.

A runtime's threads, caches and memory arena must not affect the next. In the process, sessions are built, checked
against the model in eager float32, warmed up, and timed alternately.
"""

import gc
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from prunekit.backends.backend import FORMATS, RUNTIMES, Backend, FileBackend
from prunekit.backends.files.exported_model import ExportedModel
from prunekit.backends.int8.quantizer import relative_error
from prunekit.backends.session import INT8, FileKey, Inputs, Sample, Session, Setting, Source, Timer, in_dtype
from prunekit.channels.tracing.storages import plain_in
from prunekit.errors import RunError, UsageError, VerificationError, first_line
from prunekit.hooks.model_copy import copied
from prunekit.measure.latency.machine import Load, PeakMemory, clock_mhz
from prunekit.measure.latency.timing import Contention, Times, alternate, warm_up
from prunekit.measure.latency.worker_process import UnpicklableError, WorkerDied, WorkerProcess
from prunekit.measure.measurement_effort import current_effort
from prunekit.measure.verification import largest_difference
from prunekit.utils.context import on_device
from prunekit.utils.context import threads as with_threads
from prunekit.utils.tensors import gather

T = TypeVar("T")
DEFAULT = "eager"
"""The runtime of modules: asked for it, a file runs in its own."""


def file_source(backend: Backend, model: nn.Module, inputs: Inputs, keys: Iterable[FileKey], folder: Path) -> Source:
    """Write a model for each batch and dtype in the format that a runtime takes, to a folder made if need be.

    Quantized files are calibrated on the sample that they are timed on: times do not depend on the ranges.
    """
    folder.mkdir(exist_ok=True)
    wanted, carrier = set(keys), FORMATS.get(backend.carrier)
    quantized = {key for key in wanted if key[1].startswith(INT8)}
    exported = (wanted - quantized) | {(batch, "float32") for batch, _ in quantized}
    with torch.inference_mode(False), torch.no_grad():  # export traces, which needs version counters
        files = {key: _file(carrier, model, inputs, *key, folder) for key in sorted(exported)}
    for batch, dtype in sorted(quantized):
        float_file = files[batch, "float32"]
        files[batch, dtype] = _quantized(backend, carrier, float_file, dtype, inputs.sample(batch), folder)
    return Source(files=files)


def _file(carrier: FileBackend, model: nn.Module, inputs: Inputs, batch: int, dtype: str, folder: Path) -> Path:
    sample, path = inputs.sample(batch), folder / f"{batch}-{dtype}{carrier.suffix}"
    if path.exists():  # it is the same model's
        return path
    if dtype == "float32":
        return carrier.write_fixed(model, sample, path)
    kind: torch.dtype = getattr(torch, dtype)
    return carrier.write_fixed(copied(model, dtype=kind), in_dtype(sample, kind), path)


def _quantized(backend: Backend, carrier: FileBackend, file: Path, dtype: str, sample: Sample, folder: Path) -> Path:
    """Quantize a file, in a folder of its own."""
    place = folder / f"{file.stem} {dtype}"
    place.mkdir()
    names = [spec.name for spec in carrier.interface(file).inputs]
    batch = dict(zip(names, [one.numpy() for one in gather(sample)], strict=True))
    quantizer = _quantizing(backend).quantizer_of(file, place, [batch], 1, only_timed=True)
    if not quantizer.layers:
        raise RunError("int8: expected layers that can be quantized, such as convolutions, and there are none")
    return quantizer.quantize(quantizer.ways[0], frozenset(quantizer.layers))


def _quantizing(backend: Backend) -> FileBackend:
    """Return the backend itself if it quantizes, or, for a function, the one whose package it names."""
    if isinstance(backend, FileBackend):
        return backend
    named = [name for name, facts in FORMATS.facts().items() if facts.get("quantizer") == backend.quantizer]
    if not named:
        raise RunError(f"int8: expected a backend with the quantizer {backend.quantizer!r}, and none is registered")
    return FORMATS.get(named[0])


def backend_of(model: ExportedModel, asked: str) -> Backend:
    """Return what a file is timed in: the runtime that is asked for, or its own."""
    return FORMATS.get(model.form) if asked == DEFAULT else RUNTIMES.get(asked)


def require_timable(name: str, model: ExportedModel, settings: Sequence[Setting]) -> None:
    """Raise if a file cannot be timed in all settings."""
    able = [
        runtime
        for runtime, facts in RUNTIMES.facts().items()
        if model.form in (facts.get("format"), *facts.get("reads", ()))
    ]
    for setting in settings:
        if setting.runtime not in (DEFAULT, *able):
            others = f", or {' or '.join(able)}" if able else ""
            raise UsageError(
                f"{name}: runtime {setting.runtime!r} does not take a file of {model.form}: leave out --runtime, which "
                f"times it in its own{others}; or give the model folder that it was exported from"
            )
        backend = backend_of(model, setting.runtime)
        if missing := backend.missing():
            raise UsageError(f"{name}: runtime {backend.name!r} {missing}")
        said = f"{setting.dtype} on {setting.device}, {setting.memory_format}"
        if refused := _refusal(backend, setting):
            raise UsageError(f"{name}: cannot be timed in {said}: {refused}")
        if model.fixed_batch not in (None, setting.batch):
            raise UsageError(
                f"{name}: expected batches of {model.fixed_batch}, which the file fixes, got {setting.batch}: give "
                f"--batch {model.fixed_batch}, or export it with a batch of any size"
            )


def _refusal(backend: Backend, setting: Setting) -> str:
    """Return why a file cannot be timed in a setting; empty if it can."""
    if setting.device != "cpu":
        return "exported files are timed on the CPU: --device cpu"
    if setting.dtype != "float32" and not backend.chooses_dtype:
        return "it computes in the dtype that it was exported in: leave out --dtype, or export it in another"
    if setting.memory_format != "contiguous":
        return "its memory format was fixed by the export: leave out --memory-format"
    return backend.refuse(setting)


def exported_source(model: ExportedModel) -> Source:
    """Return a file as a source, which opens it in its own runtime or in the one of the setting."""
    return Source(open=partial(open_file, model.path, FORMATS.get(model.form), allow_code=model.allow_code))


def open_file(path: Path, own: FileBackend, sample: Sample, setting: Setting, *, allow_code: bool = False) -> Session:
    """Return a session of a file in the runtime that is asked for, or in its own."""
    backend = own if setting.runtime == DEFAULT else RUNTIMES.get(setting.runtime)
    assert isinstance(backend, FileBackend)
    return backend.file_session(path, own.interface(path), sample, setting, trusted=allow_code)  # checks other files


TOLERANCES = {"float32": 1e-3, "bfloat16": 0.1, "float16": 0.02}
"""Largest relative difference from the eager float32 model that counts as rounding, by the dtype computed in.

Kernels of one dtype differ in the order of their sums, TF32 on CUDA included; bfloat16 keeps 8 bits, float16 11.
"""
FLOAT_FILE_TOLERANCE = 1e-4
"""Largest such difference of the file in float32 that a quantized one is made from."""
INT8_ERROR = 0.7
"""Largest relative error of a quantized file's output: the norm of the difference over the norm of what is expected.

How much int8 changes depends on the model; outputs that have nothing to do with each other differ by 1 or more. What it
costs in accuracy is measured where a model is delivered, not where it is timed.
"""


@dataclass(frozen=True, eq=False)
class TimingJob:
    """The work of one process: models to time in all settings of one runtime."""

    runtime: Backend
    settings: tuple[Setting, ...]
    sources: Mapping[str, Source]  # models by name
    # tensors that each model returns in eager float32, by name and batch
    expected: Mapping[tuple[str, int], list[Tensor]]
    inputs: Inputs  # of the models
    repeats: int  # rounds
    limit_s: float = math.inf  # seconds that the rounds of a setting may take; a few are run in any case


@dataclass(frozen=True, eq=False)
class SettingTimes:
    """The times of models in one setting."""

    setting: Setting
    times: Times  # milliseconds, (models, repeats)
    warm_up: tuple[int, ...]  # number of calls before them, by model
    memory: tuple[int | None, ...]  # peak bytes by model, None if unknown
    contention: Contention | None  # for the CPU; None on other devices
    clock_mhz: float | None  # of the device, right after; None if unknown


@dataclass(frozen=True)
class SettingFailure:
    """A setting in which nothing could be timed, and why."""

    setting: Setting
    reason: str


Outcome = SettingTimes | SettingFailure


def run_job_apart(job: TimingJob, folder: Path) -> tuple[list[Outcome], str]:
    """Run a job in a process of its own; in this one if its models cannot be pickled, or the effort says so."""
    if not current_effort().own_process:
        return run_job(job, own_process=False), ""
    runtime = job.settings[0].runtime
    try:
        with WorkerProcess(partial(run_job, own_process=True), folder) as process:
            found: list[Outcome] = process.ask(job)
            return found, ""
    except WorkerDied as error:
        return [SettingFailure(setting, str(error)) for setting in job.settings], ""
    except UnpicklableError as error:
        note = f"{runtime}: timed in this process, not in one of its own, without memory: {error}"
        return run_job(job, own_process=False), note


def run_job(job: TimingJob, *, own_process: bool) -> list[Outcome]:
    """Return the outcome of every setting; memory is only measured in a process that does nothing else."""
    memory = own_process and job.runtime.measures_memory
    if memory:
        _load_libraries(job)
    found: list[Outcome] = []
    for setting in job.settings:
        found.append(attempted(setting, partial(_timed, job, setting, memory)))
        job.runtime.forget()
        gc.collect()
    return found


def attempted(setting: Setting, measure: Callable[[], T]) -> T | SettingFailure:
    """Return what is measured with a setting's threads, on its device, in inference mode; or why that failed."""
    try:
        with with_threads(setting.threads), on_device(setting.device), torch.inference_mode():
            return measure()
    except Exception as error:  # of the runtime, or of a model's code, which may not take this dtype
        return SettingFailure(setting, error_line(error))


def _load_libraries(job: TimingJob) -> None:
    """Build and run a session in each runtime, as what a library loads on first use belongs to no model."""
    setting = job.settings[0]

    def load(source: Source) -> None:
        _session(job, source, job.inputs.sample(setting.batch), setting).run()

    for source in [next(iter(job.sources.values())), *(one for one in job.sources.values() if one.open is not None)]:
        attempted(setting, partial(load, source))  # what fails here fails again where it is reported


def _timed(job: TimingJob, setting: Setting, memory: bool) -> SettingTimes:
    sample = job.inputs.sample(setting.batch)
    sessions, taken = [], []
    for name, source in job.sources.items():
        check_float_file(name, job.runtime, source, sample, setting, job.expected[name, setting.batch])
        peak = PeakMemory(setting.device) if memory else None
        session = _session(job, source, sample, setting)
        check_outputs(name, session, setting, job.expected[name, setting.batch])
        sessions.append(session)
        taken.append(peak.of(session.run) if peak is not None else None)
    timers = [Timer(session.run, torch.device(setting.device)) for session in sessions]
    calls = tuple(warm_up(timer, timer.device.type) for timer in timers)
    load = Load()
    with load.watched():
        times = alternate(timers, job.repeats, weight_moves(*sessions), limit_s=job.limit_s)
        clock = clock_mhz(setting.device)
    contention = load.contention(setting.threads) if setting.device == "cpu" else None
    return SettingTimes(setting, times, calls, tuple(taken), contention, clock)


def _session(job: TimingJob, source: Source, sample: Sample, setting: Setting) -> Session:
    """Return a session of the runtime, or of what the source opens itself."""
    return job.runtime.session(source, sample, setting) if source.open is None else source.open(sample, setting)


def weight_moves(*sessions: Session) -> list[Callable[[], object]]:
    """Return the calls that move the weights of sessions, where these can be moved, and warm them up again."""
    return [step for session in sessions if session.move is not None for step in (session.move, session.run)]


def check_float_file(
    name: str, runtime: Backend, source: Source, sample: Sample, setting: Setting, expected: list[Tensor]
) -> None:
    """Raise a VerificationError if the file that a quantized one is made from does not compute what the model does."""
    if setting.dtype == INT8:
        plain = replace(setting, dtype="float32")
        check_outputs(name, runtime.session(source, sample, plain), plain, expected, FLOAT_FILE_TOLERANCE)


def check_outputs(
    name: str, session: Session, setting: Setting, expected: list[Tensor], tolerance: float | None = None
) -> None:
    """Raise a VerificationError if a session's outputs are not those of the model in eager float32."""
    found = output_tensors(session.tensors(session.run()))
    if setting.dtype == INT8:
        _check_int8_outputs(name, expected, found)
        return
    difference, reason = largest_difference(expected, found)
    tolerance = TOLERANCES[setting.dtype] if tolerance is None else tolerance
    if not difference <= tolerance:
        raise VerificationError(
            f"{name} computes something else than in eager float32: {reason} value, expected at most {tolerance:g}"
        )


def _check_int8_outputs(name: str, expected: list[Tensor], found: list[Tensor]) -> None:
    shapes, wanted = ([tuple(one.shape) for one in tensors] for tensors in (found, expected))
    if shapes != wanted:
        raise VerificationError(f"{name} returns tensors of shapes {shapes} in int8, expected {wanted}")
    error = relative_error([one.numpy() for one in expected], [one.numpy() for one in found])
    if not error <= INT8_ERROR:
        raise VerificationError(
            f"{name} computes something else in int8 than in eager float32: the relative error of the output is "
            f"{error:.3g}, expected at most {INT8_ERROR:g}"
        )


def output_tensors(output: Any) -> list[Tensor]:
    """Return every tensor of a model's output, on the CPU, floating-point ones in float32."""
    return [tensor.cpu().float() if tensor.is_floating_point() else tensor.cpu() for tensor in plain_in(output)]


def error_line(error: Exception) -> str:
    """Return why a setting failed, in one line."""
    text = first_line(error)
    return text if isinstance(error, VerificationError) else f"{type(error).__name__}: {text}"
