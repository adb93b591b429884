"""A run's folder: made when the job starts, and marked with how it ended."""

from __future__ import annotations

import os
import platform
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from prunekit.artifacts import write_json, write_text
from prunekit.distributed.exchange import from_main
from prunekit.distributed.group import is_main, size
from prunekit.errors import RunError
from prunekit.measure.machine import cpu_name

Log = Callable[[str], None]


@dataclass(frozen=True)
class RunFolder:
    """Where a run writes, and the log that it keeps there."""

    path: Path
    started: str
    log: Log

    def mark(self, state: str, **facts: Any) -> None:
        """Writes `status.json`: running, finished, failed or interrupted."""
        write_json(self.path / "status.json", {"state": state, "started": self.started, "pid": os.getpid(), **facts})


@contextmanager
def run_folder(output: Path, name: str, log: Log, resolved: str) -> Iterator[RunFolder]:
    """Makes `output/name/<time>/` and marks it finished, failed or interrupted when the block ends.

    Of several processes the main one does so; in the others the log goes nowhere.

    Raises:
        RunError: the folder cannot be made.
    """
    started = datetime.now(UTC)
    path = from_main(lambda: _make(output / name, started.strftime("%Y%m%d-%H%M%S")))
    if not is_main():
        yield RunFolder(path, started.isoformat(timespec="seconds"), lambda _: None)
        return
    with (path / "log.txt").open("a", encoding="utf-8", buffering=1) as file:

        def both(message: str) -> None:
            file.write(f"{datetime.now(UTC).isoformat(timespec='seconds')} {message}\n")
            log(message)

        run = RunFolder(path, started.isoformat(timespec="seconds"), both)
        try:
            run.mark("running")
            write_text(path / "recipe.yaml", resolved)
            write_json(path / "environment.json", environment())
            both(f"run: {path}")
            yield run
        except KeyboardInterrupt:
            with _undisturbed():
                run.mark("interrupted", finished=_now())
            raise
        except BaseException as error:
            reason = f"{type(error).__name__}: {error}"
            with suppress(OSError):  # a full disk must not hide what failed
                run.mark("failed", finished=_now(), error=reason)
                file.write(f"{_now()} {reason}\n")
            raise
        run.mark("finished", finished=_now())


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Lets no second Ctrl-C in: the mark would be lost. Signals belong to the main thread; another has none to fear."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _make(parent: Path, name: str) -> Path:
    for attempt in range(1000):
        path = parent / (f"{name}-{attempt}" if attempt else name)
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            if parent.exists() and not parent.is_dir():
                raise RunError(f"{parent}: expected a folder for runs, found a file") from None
            continue
        except OSError as error:
            raise RunError(f"{path}: the run's folder cannot be made: {error.strerror}; use --output") from error
        return path
    raise RunError(f"{parent}: no free name for a run at {name}")


def environment() -> dict[str, Any]:
    """Versions and hardware, as they are noted beside every figure."""
    return {
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "cpu": cpu_name(),
        "cpu_cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "processes": size(),
        "cuda": torch.cuda.get_device_name(0) if torch.cuda.is_available() else None,
        "torch": str(torch.__version__),
        **{name: version(name) for name in ("prunekit", "torchvision", "numpy")},
    }
