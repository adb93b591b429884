"""A worker process: it answers requests by a handler, and does nothing else."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, BinaryIO

from prunekit.errors import RunError, reason_of
from prunekit.measure.measurement_effort import current_effort, effort_of


class WorkerProcess:
    """A process that answers requests one at a time, by a handler that lives as long as the process.

    Handler, requests and answers are pickled into files, in a folder of the caller's own that is there.

    Raises:
        UnpicklableError: on entering or asking, the handler or the request cannot be sent.
        RunError: on entering, the process cannot be started.
    """

    def __init__(self, handler: Callable[[Any], Any], folder: Path) -> None:
        self.handler, self.folder = handler, Path(tempfile.mkdtemp(dir=folder))

    def __enter__(self) -> WorkerProcess:
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
        self.process.kill()  # its answers were read, or are not needed any more
        self.process.communicate()

    def ask(self, request: Any) -> Any:
        """Return what the handler returns for a request."""
        _write(self.folder / "request", request)
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            self.process.stdin.write("\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            pass  # then there is no answer to read either
        if not self.process.stdout.readline():
            said = (self.folder / "errors").read_text(encoding="utf-8", errors="replace").strip().splitlines()
            raise WorkerDied(f"its process ended with {self.process.wait()}: {(said or ['it said nothing'])[-1]}")
        found = pickle.loads((self.folder / "answer").read_bytes())
        if isinstance(found, UnpicklableError):
            raise found
        return found


class UnpicklableError(RunError):
    """Something cannot be sent to the other process, as a model of a class that is defined inside a function."""


class WorkerDied(RunError):
    """The other process ended before it answered."""


def _write(file: Path, *values: Any) -> None:
    try:
        with file.open("wb") as stream:
            for value in values:
                pickle.dump(value, stream)
    except OSError:  # of the file
        raise
    except Exception as error:  # of pickle, or of a module that refuses, as those with parametrized weights do
        raise UnpicklableError(reason_of(error)) from error


START = """
import pickle, sys
with open(sys.argv[1] + "/handler", "rb") as first:
    sys.path[:] = pickle.load(first)
    from prunekit.measure.latency.worker_process import serve
    serve(first, sys.argv[1])
"""
"""The program of the process; it unpickles files of the process that started it, from a folder of its own."""
ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": str(2**25), "MALLOC_TRIM_THRESHOLD_": str(2**40)}
"""Makes malloc of the GNU C library keep what is freed. Otherwise it depends on where small objects happen to lie
whether pages are given back after a forward pass, and filled with zeros again in the next."""


def serve(first: BinaryIO, folder: str) -> None:
    """Read the handler, then answer each line on the standard input with one on the standard output."""
    import_module("prunekit.utils.user_code")  # finds the user's own files by the names of their modules
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # so that what a model prints is not taken for an answer
    effort, handler = pickle.load(first), _read(first)
    for _ in sys.stdin:
        with Path(folder, "request").open("rb") as stream:
            request = _read(stream)
        unreadable = next((value for value in (handler, request) if isinstance(value, UnpicklableError)), None)
        with effort_of(effort):
            Path(folder, "answer").write_bytes(pickle.dumps(unreadable or handler(request)))
        answers.write("\n")
        answers.flush()


def _read(stream: BinaryIO) -> Any:
    """Return the next value of a stream, or as the answer why it cannot be read."""
    try:
        return pickle.load(stream)
    except Exception as error:  # unpickling imports the modules of the model's classes
        return UnpicklableError(reason_of(error))
