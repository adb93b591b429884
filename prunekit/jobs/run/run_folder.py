"""A run's folder: made when the job starts, and marked with how it ended.

Hashes of settings and of models: by these results are found again.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil
import torch
from torch import nn

from prunekit.channels.cut.model_copy import named_tensors
from prunekit.distributed.process_group import is_main, size
from prunekit.errors import RunError
from prunekit.measure.latency.machine import cpu_name
from prunekit.utils.files import read_json, remove_leftovers, write_json, write_text

Log = Callable[[str], None]
Finish = Callable[[Path], object]


class StoppedByCaller(BaseException):
    """A run ends because a function that the caller gave to look on raised an error.

    Args:
        error: what it raised.
    """

    def __init__(self, error: Exception) -> None:
        super().__init__(f"{type(error).__name__}: {error}")
        self.error = error


@contextmanager
def as_raised() -> Iterator[None]:
    """Raise the error of the caller's function itself, once the run's folder is marked."""
    try:
        yield
    except StoppedByCaller as stopped:
        raise stopped.error from None


RESUME = "resume"
"""Folder of a run that has not finished: what it needs to go on."""


@dataclass(frozen=True)
class RunFolder:
    """Where a run writes, and the log that it keeps there.

    Attributes:
        resumed: when it was, each time.
    """

    path: Path
    started: str
    log: Log
    resumed: tuple[str, ...] = ()

    @property
    def resume(self) -> Path:
        """Folder of what the run needs to go on; gone when it has finished."""
        return self.path / RESUME

    def mark(self, state: str, **facts: Any) -> None:
        """Write `status.json`: running, finished, failed or interrupted."""
        process = {"pid": os.getpid(), "pid_since": psutil.Process().create_time(), "host": platform.node()}
        status = {"state": state, "started": self.started, **process, **facts}
        write_json(self.path / "status.json", status | ({"resumed": list(self.resumed)} if self.resumed else {}))


def alive(status: Mapping[str, Any]) -> bool:
    """Return whether the process that wrote a `status.json` still runs; of one on another host nobody knows, and it
    counts as gone.
    """
    if status.get("state") != "running" or status.get("host") != platform.node():
        return False
    try:
        process = psutil.Process(int(status["pid"]))
        same = abs(process.create_time() - float(status["pid_since"])) < 1
        return bool(same and process.status() != psutil.STATUS_ZOMBIE)
    except (psutil.Error, KeyError, TypeError, ValueError):
        return False


def write_report(folder: Path) -> Path:
    """Render the page of a run that ends well."""
    from prunekit.report.pages import run_page as page  # matplotlib takes most of a second to import

    return page.write_report(folder, state="finished")


@contextmanager
def run_folder(
    output: Path,
    name: str,
    log: Log,
    resolved: str,
    finish: Finish | None = None,
    again: Path | None = None,
) -> Iterator[RunFolder]:
    """Make `output/name/<time>/` and marks it finished, failed or interrupted when the block ends.

    Of several processes the main one does so; what the others write is gone at the end, and their log goes nowhere.

    Args:
        output, name: where.
        log: gets a line for each stage, as the folder's log does.
        resolved: the recipe's text, kept in the folder.
        finish: called with the folder when the block has ended well, before the run counts as finished (the report).
        again: folder of a run that is resumed; it is used in place of a new one.

    Raises:
        RunError: the folder cannot be made.
    """
    now = datetime.now(UTC)
    if not is_main():
        with TemporaryDirectory(prefix="prunekit-") as scratch:
            yield RunFolder(Path(scratch), now.isoformat(timespec="seconds"), lambda _: None)
        return
    path = _make(output / name, now.strftime("%Y%m%d-%H%M%S")) if again is None else again
    started, resumed = _history(path, now.isoformat(timespec="seconds"))
    with (path / "log.txt").open("a", encoding="utf-8", buffering=1) as file:

        def both(message: str) -> None:
            file.write(f"{datetime.now(UTC).isoformat(timespec='seconds')} {message}\n")
            log(message)

        run = RunFolder(path, started, both, resumed)
        try:
            run.mark("running")
            for folder in (path, path / "checkpoints", run.resume):
                remove_leftovers(folder)
            write_text(path / "recipe.yaml", resolved)
            write_json(path / "environment.json", environment())
            both(f"run: {path}" if again is None else f"run: {path}, resumed; it was started {started}")
            yield run
            if finish is not None:
                finish(path)
        except (KeyboardInterrupt, StoppedByCaller) as error:
            with _undisturbed():
                why = {"error": str(error)} if isinstance(error, StoppedByCaller) else {}
                run.mark("interrupted", finished=_now(), **why)
                _offer(run)
            raise
        except BaseException as error:
            reason = f"{type(error).__name__}: {error}"
            with _undisturbed(), suppress(OSError):  # a full disk must not hide what failed
                run.mark("failed", finished=_now(), error=reason)
                file.write(f"{_now()} {reason}\n")
                _offer(run)
            raise
        run.mark("finished", finished=_now())
        shutil.rmtree(run.resume, ignore_errors=True)


def _offer(run: RunFolder) -> None:
    """Say that a run can be resumed, if it can."""
    if run.resume.exists():
        run.log(f"run: {run.path} has not finished; --resume {run.path} goes on with it")


def _history(path: Path, now: str) -> tuple[str, tuple[str, ...]]:
    """When a run was started, and when it was resumed, now included; a new one is started now."""
    if not (path / "status.json").exists():
        return now, ()
    status = read_json(path / "status.json")
    return status["started"], (*status.get("resumed", ()), now)


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Let no second Ctrl-C in, nor a launcher that ends all: the mark would be lost.

    Signals belong to the main thread; another has none to fear.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


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
    """Return versions and hardware, as they are noted beside every figure."""
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


def digest(value: Any) -> str:
    """Return a short hash of plain data."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:16]


def weights_digest(model: nn.Module) -> str:
    """SHA-256 over the names, shapes and bytes of all parameters and buffers."""
    result = hashlib.sha256()
    for name, tensor in named_tensors(model):
        result.update(f"{name}{tuple(tensor.shape)}{tensor.dtype}".encode())
        result.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return result.hexdigest()
