"""What happens inside the process that measures: sessions are built, checked, warmed up, and timed alternately."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from prunekit.channels.storages import plain_in
from prunekit.context import on_device
from prunekit.context import threads as with_threads
from prunekit.errors import VerificationError
from prunekit.measure.differing import largest_difference
from prunekit.measure.evidence import Contention, Times
from prunekit.measure.machine import Load, clock_mhz
from prunekit.measure.memory import PeakMemory
from prunekit.measure.runtimes import Inputs, Runtime, Session, Setting, Source
from prunekit.measure.timing import Timer, alternate, warm_up

TOLERANCES = {"float32": 1e-3, "bfloat16": 0.1, "float16": 0.02}
"""Largest relative difference from the eager float32 model that passes for rounding, by the dtype computed in.

Kernels of one dtype differ in the order of their sums, TF32 on CUDA included; bfloat16 keeps 8 bits, float16 11.
"""


@dataclass(frozen=True, eq=False)
class Job:
    """What one process measures: all settings of one runtime.

    Attributes:
        sources: of the models, by name; the first is the one that others are compared with.
        expected: tensors that each model returns in eager float32, by name and batch.
        inputs: what the models take.
    """

    runtime: Runtime
    settings: tuple[Setting, ...]
    sources: Mapping[str, Source]
    expected: Mapping[tuple[str, int], list[Tensor]]
    inputs: Inputs
    repeats: int


@dataclass(frozen=True, eq=False)
class Timed:
    """One setting, measured.

    Attributes:
        times: milliseconds, (models, repeats).
        warm_up: calls before them, by model.
        memory: peak bytes by model, None where it cannot be had.
        contention: what else ran meanwhile; None where the CPU is not what was timed.
        clock_mhz: of the device, right after; None where the system does not tell.
    """

    setting: Setting
    times: Times
    warm_up: tuple[int, ...]
    memory: tuple[int | None, ...]
    contention: Contention | None
    clock_mhz: float | None


@dataclass(frozen=True)
class Failed:
    """One setting of which nothing is reported, and why."""

    setting: Setting
    reason: str


def measure(job: Job, *, own_process: bool) -> Iterator[Timed | Failed]:
    """Measures every setting of a job.

    Args:
        own_process: whether this process does nothing else: only then memory is measured.
    """
    memory = own_process and job.runtime.measures_memory
    if memory:
        _first_time(job)
    for setting in job.settings:
        try:
            with with_threads(setting.threads), on_device(setting.device), torch.inference_mode():
                yield _timed(job, setting, memory)
        except Exception as error:  # a runtime's own errors, and whatever a model's code makes of another dtype
            yield Failed(setting, line_of(error))
        job.runtime.forget()
        gc.collect()


def _first_time(job: Job) -> None:
    """Builds and runs one session: what a library loads on first use belongs to no model."""
    setting = job.settings[0]
    try:
        with with_threads(setting.threads), on_device(setting.device), torch.inference_mode():
            source = next(iter(job.sources.values()))
            job.runtime.open(source, job.inputs.sample(setting.batch), setting).run()
    except Exception:  # the same happens again where it is reported
        return


def _timed(job: Job, setting: Setting, memory: bool) -> Timed:
    sample = job.inputs.sample(setting.batch)
    sessions, taken = [], []
    for name, source in job.sources.items():
        peak = PeakMemory(setting.device) if memory else None
        session = job.runtime.open(source, sample, setting)
        check(name, session, setting, job.expected[name, setting.batch])
        sessions.append(session)
        taken.append(peak.of(session.run) if peak is not None else None)
    timers = [Timer(session.run, torch.device(setting.device)) for session in sessions]
    calls = tuple(warm_up(timer, timer.device.type) for timer in timers)
    load = Load()
    with load.watched():
        times = alternate(timers, job.repeats, laid_out_anew(*sessions))
        clock = clock_mhz(setting.device)
    contention = load.contention(setting.threads) if setting.device == "cpu" else None
    return Timed(setting, times, calls, tuple(taken), contention, clock)


def laid_out_anew(*sessions: Session) -> list[Callable[[], object]]:
    """What moves the weights of sessions that do not lay them out themselves, and makes them warm again, in order."""
    return [again for one in sessions if one.move is not None for again in (one.move, one.run)]


def check(name: str, session: Session, setting: Setting, expected: list[Tensor]) -> None:
    """Checks a session's outputs against those of the model in eager float32."""
    difference, reason = largest_difference(expected, plain_tensors(session.tensors(session.run())))
    tolerance = TOLERANCES[setting.dtype]
    if not difference <= tolerance:
        raise VerificationError(
            f"{name} computes something else than in eager float32: {reason} value, expected at most {tolerance:g}"
        )


def plain_tensors(output: Any) -> list[Tensor]:
    """Every tensor of what a model returned, on the CPU, those of floating-point numbers in float32."""
    return [tensor.cpu().float() if tensor.is_floating_point() else tensor.cpu() for tensor in plain_in(output)]


def line_of(error: Exception) -> str:
    """What a setting failed of, in one line."""
    text = (str(error).strip() or type(error).__name__).splitlines()[0]
    return text if isinstance(error, VerificationError) else f"{type(error).__name__}: {text}"
