"""The folder of a run, marked with how the run ended, and hashes by which cached results are found."""

import hashlib
import json
import os
import platform
import shutil
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import Any, Generic, TextIO, TypeVar

import psutil
import torch
from torch import nn

from prunekit.distributed.process_group import is_main, size
from prunekit.errors import ArtifactError, ResumeError, RunError, reason_of
from prunekit.hooks.model_copy import named_tensors
from prunekit.measure.latency.machine import cpu_name
from prunekit.reading.text_files import read_json
from prunekit.utils.files import atomic_file, remove_leftovers, write_json, write_text
from prunekit.utils.progress import Log
from prunekit.utils.tensors import tensors_digest

T = TypeVar("T")
Found = TypeVar("Found")
Finish = Callable[[Path], object]


class StoppedByCaller(BaseException):
    """The end of a run because a function of the caller, such as `on_epoch`, raised an error."""

    def __init__(self, error: Exception) -> None:
        super().__init__(f"{type(error).__name__}: {error}")
        self.error = error


@contextmanager
def as_raised() -> Iterator[None]:
    """Raise the error of the caller's function in place of `StoppedByCaller`."""
    try:
        yield
    except StoppedByCaller as stopped:
        raise stopped.error from None


@dataclass(frozen=True, eq=False)
class AnalysisRun(Generic[Found]):
    """A finished analysis of a job."""

    folder: Path  # with the tables of the analysis, its JSON, and the result of `finish`
    result: Found  # the analysis
    metrics: dict[str, Any]  # what its JSON file holds


RESUME = "resume"
"""Folder inside an unfinished run's, with what is needed to resume it."""


@dataclass(frozen=True)
class RunFolder:
    """The folder that a run writes into, with its log."""

    path: Path  # of the folder
    started: str  # when the run was started
    log: Log  # writes a line into the log, and shows it
    resumed: tuple[str, ...] = ()  # when the run was resumed, each time

    @property
    def resume(self) -> Path:
        """Folder with what is needed to resume the run; removed when it has finished."""
        return self.path / RESUME

    def mark(self, state: str, **facts: Any) -> None:
        """Write `status.json`: running, finished, failed or interrupted."""
        process = {"pid": os.getpid(), "pid_since": psutil.Process().create_time(), "host": platform.node()}
        status = {"state": state, "started": self.started, **process, **facts}
        write_json(self.path / "status.json", status | ({"resumed": list(self.resumed)} if self.resumed else {}))


def alive(status: Mapping[str, Any]) -> bool:
    """Return whether the process that wrote a `status.json` still runs; False if it is on another host."""
    if status.get("state") != "running" or status.get("host") != platform.node():
        return False
    try:
        process = psutil.Process(int(status["pid"]))
        same = abs(process.create_time() - float(status["pid_since"])) < 1
        return bool(same and process.status() != psutil.STATUS_ZOMBIE)
    except (psutil.Error, KeyError, TypeError, ValueError):
        return False


def object_in(path: Path) -> dict[str, Any] | None:
    """Return the JSON object in a file; None if it is missing or unreadable."""
    try:
        found = read_json(path)
    except ArtifactError:
        return None
    return found if isinstance(found, dict) else None


def write_report(folder: Path) -> Path:
    """Write the page of a run that has finished."""
    from prunekit.report.pages import run_page as page  # pandas takes most of a second to import

    return page.write_report(folder, state="finished")


@contextmanager
def run_folder(
    output: Path, name: str, log: Log, resolved: str, finish: Finish | None = None, again: Path | None = None
) -> Iterator[RunFolder]:
    """Make `output/name/<time>/`, and mark it finished, failed or interrupted when the block ends.

    Of several processes the main one does this; the others write into temporary folders, and their logs are dropped.
    """
    now = datetime.now(UTC)
    if not is_main():
        with TemporaryDirectory(prefix="prunekit-") as scratch:
            yield RunFolder(Path(scratch), now.isoformat(timespec="seconds"), lambda _: None)
        return
    path = _make(output / name, now.strftime("%Y%m%d-%H%M%S")) if again is None else again
    _require_no_links(path)
    started, resumed = _history(path, now.isoformat(timespec="seconds"))
    with _interrupting_signals(), _opened_log(path / "log.txt") as file:

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
            with _undisturbed(), suppress(OSError):  # a full disk, or a terminal that was closed
                why = {"error": str(error)} if str(error) else {}  # of the caller, or the name of a signal
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
    """Log how a run can be resumed, if it can."""
    if run.resume.exists():
        run.log(f"run: {run.path} has not finished; --resume {run.path} goes on with it")


def _require_no_links(path: Path) -> None:
    """Raise if a folder inside a run's is a link: what a run writes stays in its own folder."""
    for place, folders, _ in os.walk(path):
        for name in folders:
            if (linked := Path(place, name)).is_symlink():
                raise ResumeError(
                    f"{linked}: expected a folder, got a link to {linked.readlink()}, where this run would write; put "
                    "the folder itself there"
                )


def _opened_log(path: Path) -> TextIO:
    """Open a log to write at its end; a link to another file, also a hard one, is replaced and not written through."""
    if path.is_symlink() or (path.exists() and not path.is_file()):
        path.unlink()
    elif path.exists() and path.stat().st_nlink > 1:
        with atomic_file(path) as copy:
            shutil.copyfile(path, copy)
    return path.open("a", encoding="utf-8", buffering=1)


def _history(path: Path, now: str) -> tuple[str, tuple[str, ...]]:
    """Return when a run was started, and each time when it was resumed, now included."""
    status = object_in(path / "status.json")
    if status is None:
        return now, ()
    resumed = status.get("resumed")
    return str(status.get("started", now)), (*map(str, resumed if isinstance(resumed, list) else ()), now)


ENDING = tuple(
    getattr(signal, name) for name in ("SIGHUP", "SIGTERM", "SIGQUIT", "SIGXCPU", "SIGBREAK") if hasattr(signal, name)
)
"""Signals by which a terminal that is closed, a scheduler and a shutdown end a process without a word."""


@contextmanager
def _handled(numbers: Iterable[int], handler: Any) -> Iterator[None]:
    """Handle signals by a function, or ignore them, in the block; other threads do nothing, as no signal reaches them.

    A handler that was set within the block stays.
    """
    main = threading.current_thread() is threading.main_thread()
    before = {number: signal.getsignal(number) for number in numbers} if main else {}
    try:
        for number in before:
            signal.signal(number, handler)
        yield
    finally:
        for number, former in before.items():
            if signal.getsignal(number) is handler:
                signal.signal(number, former)


@contextmanager
def _interrupting_signals() -> Iterator[None]:
    """Let signals that end the process interrupt the block first, as Ctrl-C does; they end the process after it."""
    came, process = list[int](), os.getpid()

    def interrupt(number: int, frame: FrameType | None) -> None:
        if os.getpid() != process:  # one that was forked off, such as a worker that reads data
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        came.append(number)
        raise KeyboardInterrupt(signal.Signals(number).name)

    # those that the process handles itself, or ignores, as under `nohup`, are left to it
    ours = [number for number in ENDING if signal.getsignal(number) is signal.SIG_DFL]
    try:
        with _handled(ours, interrupt):
            yield
    finally:
        if came:
            os.kill(process, came[0])


_undisturbed = partial(_handled, (signal.SIGINT, *ENDING), signal.SIG_IGN)
"""Ignores a second Ctrl-C and signals that end the process, which would keep the run from being marked."""


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
    """Return versions and hardware, for `environment.json` and `metrics.json`."""
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
    """Return a SHA-256 hash of all parameters and buffers, see `tensors_digest`."""
    return tensors_digest(named_tensors(model))


@dataclass(frozen=True, eq=False)
class Attempts:
    """Measurements that may fail, as models are saved by then: a failure costs a figure, and not the run.

    A model's own code may raise anything if it runs in another way than in training.
    """

    log: Log  # gets a line for each failure
    failures: list[str] = field(default_factory=list)  # what was not measured, and why
    done: str = "measured"  # what is done, in messages: measured, or made

    def __call__(self, what: str, measure: Callable[[], T]) -> T | None:
        """Return the result of a measurement; None if it failed, which is logged."""
        try:
            return measure()
        except Exception as error:
            self.failures.append(f"{what} not {self.done}: {reason_of(error)}; the model is saved all the same")
            self.log(f"measure: {self.failures[-1]}")
            return None
