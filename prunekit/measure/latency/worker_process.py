"""A process for each runtime: what one leaves behind (threads, caches, a memory arena) must not reach the next.

What happens inside the process that measures: sessions are built, checked, warmed up, and timed alternately.
"""

from __future__ import annotations

import gc
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from prunekit.channels.tracing.storages import plain_in
from prunekit.errors import RunError, VerificationError, reason_of
from prunekit.measure.effort import current_effort, effort_of
from prunekit.measure.latency.machine import Load, clock_mhz
from prunekit.measure.latency.memory import PeakMemory
from prunekit.measure.latency.timing import Contention, Timer, Times, alternate, warm_up
from prunekit.measure.runtimes.runtime import Runtime
from prunekit.measure.runtimes.session import Inputs, Session, Setting, Source
from prunekit.measure.verification import largest_difference
from prunekit.utils.context import on_device
from prunekit.utils.context import threads as with_threads

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
    """Measure every setting of a job.

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
    """Build and run one session: what a library loads on first use belongs to no model."""
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
    """Return what moves the weights of sessions that do not lay them out themselves, and makes them warm again, in
    order.
    """
    return [again for one in sessions if one.move is not None for again in (one.move, one.run)]


def check(name: str, session: Session, setting: Setting, expected: list[Tensor]) -> None:
    """Check a session's outputs against those of the model in eager float32."""
    difference, reason = largest_difference(expected, plain_tensors(session.tensors(session.run())))
    tolerance = TOLERANCES[setting.dtype]
    if not difference <= tolerance:
        raise VerificationError(
            f"{name} computes something else than in eager float32: {reason} value, expected at most {tolerance:g}"
        )


def plain_tensors(output: Any) -> list[Tensor]:
    """Return every tensor of what a model returned, on the CPU, those of floating-point numbers in float32."""
    return [tensor.cpu().float() if tensor.is_floating_point() else tensor.cpu() for tensor in plain_in(output)]


def line_of(error: Exception) -> str:
    """Return what a setting failed of, in one line."""
    text = (str(error).strip() or type(error).__name__).splitlines()[0]
    return text if isinstance(error, VerificationError) else f"{type(error).__name__}: {text}"


START = """
import pickle, sys
with open(sys.argv[1] + "/handler", "rb") as first:
    sys.path[:] = pickle.load(first)
    from prunekit.measure.latency.worker_process import serve
    serve(first, sys.argv[1])
"""
"""The program of the process. What it unpickles was written by the process that started it, in a folder of its own."""

ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": str(2**25), "MALLOC_TRIM_THRESHOLD_": str(2**40)}
"""The GNU C library's malloc keeps what is freed: whether it gives pages back after each forward, and has them filled
with zeros again in the next, is a matter of where small things happen to lie, and differs from process to process."""

Outcome = Timed | Failed


class NotHandedOver(RunError):
    """The other process cannot have something: a class of the model is defined where it does not get to."""


class Died(RunError):
    """The other process ended before it answered."""


@dataclass(frozen=True)
class _Unreadable:
    """What the other process says that it could not read."""

    reason: str


class Process:
    """A process of its own that answers requests one at a time, by a handler which it keeps between them.

    Args:
        handler: is called there with each request; what it is and gets and returns can be pickled.
        folder: for the files between the processes; exists, and is the caller's own.

    Raises:
        NotHandedOver: on entering or asking, the handler or the request cannot be handed over.
        RunError: on entering, the process cannot be started.
    """

    def __init__(self, handler: Callable[[Any], Any], folder: Path) -> None:
        self.handler, self.folder = handler, Path(tempfile.mkdtemp(dir=folder))

    def __enter__(self) -> Process:
        _write(self.folder / "handler", list(sys.path), current_effort(), self.handler)
        command = [sys.executable, "-c", START, str(self.folder)]
        with (self.folder / "errors").open("wb") as errors:
            try:
                self.process = subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    text=True,
                    env=ALLOCATOR | os.environ,
                )
            except OSError as error:
                raise RunError(f"latency: no process to measure in: {error}") from error
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()  # it has answered, or its answer is not wanted any more
        self.process.communicate()

    def ask(self, request: Any) -> Any:
        """Return what the handler returns for a request.

        Raises:
            Died: the process ended instead; with its last words.
        """
        _write(self.folder / "request", request)
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            self.process.stdin.write("\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            pass  # and nothing will be answered
        if not self.process.stdout.readline():
            raise Died(f"its process ended with {self.process.wait()}: {self._last_words()}")
        found = pickle.loads((self.folder / "answer").read_bytes())
        if isinstance(found, _Unreadable):
            raise NotHandedOver(found.reason)
        return found

    def _last_words(self) -> str:
        said = (self.folder / "errors").read_text(encoding="utf-8", errors="replace").strip()
        return (said.splitlines() or ["it said nothing"])[-1]


def _write(file: Path, *values: Any) -> None:
    try:
        with file.open("wb") as stream:
            for value in values:
                pickle.dump(value, stream)
    except (pickle.PicklingError, TypeError, AttributeError, RecursionError) as error:  # as pickle says no
        raise NotHandedOver(str(error).splitlines()[0]) from error


def serve(first: BinaryIO, folder: str) -> None:
    """What the process does: reads the handler, then answers each line on its input with one on its output."""
    import_module("prunekit.utils.user_code")  # which finds the user's own files by the names of their modules
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the model prints is no answer
    effort, handler = pickle.load(first), _read(first)
    for _ in sys.stdin:
        with Path(folder, "request").open("rb") as stream:
            request = _read(stream)
        unreadable = next((value for value in (handler, request) if isinstance(value, _Unreadable)), None)
        with effort_of(effort):
            Path(folder, "answer").write_bytes(pickle.dumps(unreadable or handler(request)))
        answers.write("\n")
        answers.flush()


def _read(stream: BinaryIO) -> Any:
    try:
        return pickle.load(stream)
    except Exception as error:  # unpickling imports the modules of the model's classes
        return _Unreadable(reason_of(error))


def measure_apart(job: Job, folder: Path) -> tuple[list[Outcome], str]:
    """Measure a job in a process of its own, or in this one where its models cannot be handed over or none is wanted.

    Args:
        folder: for the files between the processes; exists, and is the caller's own.

    Returns:
        An outcome for each setting, and a note; empty where the process was one of its own.

    Raises:
        RunError: the process cannot be started.
    """
    if not current_effort().own_process:
        return list(measure(job, own_process=False)), ""
    runtime = job.settings[0].runtime
    try:
        with Process(_measured, folder) as process:
            found: list[Outcome] = process.ask(job)
            return found, ""
    except Died as error:
        return [Failed(setting, str(error)) for setting in job.settings], ""
    except NotHandedOver as error:
        note = f"{runtime}: timed in this process, not in one of its own, without memory: {error}"
        return list(measure(job, own_process=False)), note


def _measured(job: Job) -> list[Outcome]:
    return list(measure(job, own_process=True))
