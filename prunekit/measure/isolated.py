"""A process for each runtime: what one leaves behind (threads, caches, a memory arena) must not reach the next."""

from __future__ import annotations

import io
import pickle
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from prunekit.errors import RunError
from prunekit.measure.measuring import Failed, Job, Timed, measure

START = """
import pickle, sys
with open(sys.argv[1], "rb") as job:
    sys.path[:] = pickle.load(job)
    from prunekit.measure.isolated import serve
    serve(job, sys.argv[2])
"""
"""The program of the process. What it unpickles was written by the process that started it, in a folder of its own."""

Outcome = Timed | Failed


@dataclass(frozen=True)
class _Unreadable:
    """A job that the other process could not read: a class of the model is defined where it does not get to."""

    reason: str


def measure_apart(job: Job, folder: Path) -> tuple[list[Outcome], str]:
    """Measures a job in a process of its own, or in this one where its models cannot be handed over.

    Args:
        folder: for the files between the processes; exists, and is the caller's own.

    Returns:
        An outcome for each setting, and a note; empty where the process was one of its own.

    Raises:
        RunError: the process cannot be started.
    """
    runtime = job.settings[0].runtime
    try:
        found = _serve_apart(_pickled(job), folder / f"{runtime}.job", folder / f"{runtime}.outcomes")
    except (pickle.PicklingError, TypeError, AttributeError, RecursionError) as error:  # as pickle says no
        found = _Unreadable(str(error).splitlines()[0])
    if isinstance(found, str):
        return [Failed(setting, found) for setting in job.settings], ""
    if isinstance(found, _Unreadable):
        note = f"{runtime}: timed in this process, not in one of its own, without memory: {found.reason}"
        return list(measure(job, own_process=False)), note
    return found, ""


def _pickled(job: Job) -> bytes:
    stream = io.BytesIO()
    pickle.dump(list(sys.path), stream)
    pickle.dump(job, stream)
    return stream.getvalue()


def _serve_apart(written: bytes, job: Path, outcomes: Path) -> list[Outcome] | _Unreadable | str:
    """What the other process found; the reason as text where it died."""
    job.write_bytes(written)
    command = [sys.executable, "-c", START, str(job), str(outcomes)]
    try:
        ended = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    except OSError as error:
        raise RunError(f"latency: no process to measure in: {error}") from error
    if ended.returncode:
        last = (ended.stderr.strip().splitlines() or ["it said nothing"])[-1]
        return f"its process ended with {ended.returncode}: {last}"
    found: list[Outcome] | _Unreadable = pickle.loads(outcomes.read_bytes())
    return found


def serve(stream: io.BufferedReader, outcomes: str) -> None:
    """What the process does: reads a job, measures it, writes what it found."""
    import_module("prunekit.user_code")  # which finds the user's own files by the names of their modules
    found: Iterator[Outcome] | _Unreadable
    try:
        job: Job = pickle.load(stream)
    except Exception as error:  # unpickling imports the modules of the model's classes
        found = _Unreadable(f"{type(error).__name__}: {error}".splitlines()[0])
        Path(outcomes).write_bytes(pickle.dumps(found))
        return
    Path(outcomes).write_bytes(pickle.dumps(list(measure(job, own_process=True))))
