"""A process for each runtime: what one leaves behind (threads, caches, a memory arena) must not reach the next."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, BinaryIO

from prunekit.errors import RunError, reason_of
from prunekit.measure.effort import current_effort, effort_of
from prunekit.measure.measuring import Failed, Job, Timed, measure

START = """
import pickle, sys
with open(sys.argv[1] + "/handler", "rb") as first:
    sys.path[:] = pickle.load(first)
    from prunekit.measure.isolated import serve
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
        """What the handler returns for a request.

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
    import_module("prunekit.user_code")  # which finds the user's own files by the names of their modules
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
    """Measures a job in a process of its own, or in this one where its models cannot be handed over or none is wanted.

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
