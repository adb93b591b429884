"""Progress of long calls: bars on terminals and in notebooks, and lines to the logger `prunekit`.

Where neither is, a long call writes a line to stderr every ten seconds: what is done, and how long the rest may take.

In notebooks bars are widgets. Without the package `ipywidgets` the stages alone are shown, as text in one line.
`logging.getLogger("prunekit").setLevel("INFO")` and a handler show a line for each stage.
"""

import logging
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from importlib.util import find_spec
from operator import length_hint
from textwrap import shorten
from threading import Event, Thread
from time import perf_counter
from typing import Any, TypeVar

LOGGER = logging.getLogger("prunekit")
LOGGER.addHandler(logging.NullHandler())
WIDTH = 60
"""The most characters of a stage in the line above the bars."""
QUIET_S = 10.0
"""Seconds without a word after which a call writes a line, where its output goes to a file or a pipe."""
Log = Callable[[str], None]
"""A function that gets a line on what happens."""
T = TypeVar("T")


class _ProgressReport:
    """The bars of a running call, and the line above them; or a thread that writes lines in their place."""

    def __init__(self, title: str, *, shown: bool, told: bool = False) -> None:
        self.title, self.shown, self._start, self._ended = title, shown, perf_counter(), Event()
        self._line: Any = None
        self._bars: list[Any] = []
        self._told = told and not shown and sys.stderr is not None
        self._stage = "running"
        self._counted: Callable[[], str] | None = None  # says how far the loop is that runs in the stage

    def begin(self) -> None:
        """Start the thread, if nobody sees bars and lines are wanted."""
        if self._told:
            Thread(target=self._write_lines, daemon=True).start()

    def bar(self, what: str, total: int | None, unit: str) -> Any:
        """Return a bar that is removed when the call ends, if not before."""
        # Where bars are text in a notebook no cursor goes up: a second bar would fill the page.
        one_line = _in_notebook() and find_spec("ipywidgets") is None
        found = make_bar(not one_line, desc=what, total=total, unit=unit, leave=False)
        self._bars.append(found)
        return found

    def say(self, text: str) -> None:
        """Show the stage in a line of its own."""
        if not self.shown:
            self._stage, self._counted = text, None
            return
        shown = f"{self.title}: {shorten(text, WIDTH, placeholder='...')}"
        if self._line is None:
            self._line = make_bar(True, bar_format="{desc} [{elapsed}]", desc=shown, leave=False)
            self._bars.insert(0, self._line)
        self._line.set_description_str(shown)

    def count(self, what: str, done: int, total: int | None, made: int, since: float) -> None:
        """Say how far a loop is, and how long the rest may take as `made` units took since a time."""

        def said() -> str:
            left = f" of {total}, about {(perf_counter() - since) / made * (total - done):.0f} s left" if total else ""
            return f"{what} {done}{left}"

        if made:
            self._counted = None if done == total else said

    def close(self) -> None:
        """Remove all bars and end the thread, also after an error or an interrupt."""
        self._ended.set()
        while self._bars:
            remove_bar(self._bars.pop())

    def _write_lines(self) -> None:
        """Write every ten seconds what the call does then, until it has ended, whatever it is waiting for."""
        while not self._ended.wait(QUIET_S):
            self.write()

    def write(self) -> None:
        """Write a line."""
        counted = self._counted
        text = self._stage if counted is None else counted()
        sys.stderr.write(f"{self.title} [{perf_counter() - self._start:.0f} s]: {text}\n")
        sys.stderr.flush()


_RUNNING: ContextVar[_ProgressReport | None] = ContextVar("prunekit report", default=None)


def wanted(progress: bool | None) -> bool:
    """Return whether to show bars: as asked for; by default on a terminal and in a notebook."""
    on_terminal = sys.stderr is not None and sys.stderr.isatty()
    return on_terminal or _in_notebook() if progress is None else progress


def _in_notebook() -> bool:
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return "IPKernelApp" in getattr(shell, "config", ())


def make_bar(shown: bool, **options: Any) -> Any:
    """Return a bar of tqdm; one that is not shown is cheap, and has the same methods."""
    from tqdm import TqdmWarning

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TqdmWarning)  # in a notebook without ipywidgets: text is fine as well
        from tqdm.auto import tqdm

    return tqdm(disable=not shown, dynamic_ncols=True, **options)


def remove_bar(bar: Any) -> None:
    """Remove a bar; a notebook's would stay, in red, if there was more to come."""
    bar.total = None
    bar.close()


@contextmanager
def reporting(progress: bool | None, title: str) -> Iterator[None]:
    """Show the stages and bars of a call while it runs, and of the calls inside it; of several processes the main's."""
    if _RUNNING.get() is not None:
        yield
        return
    group: Any = sys.modules.get("prunekit.distributed.process_group")  # not there before torch is imported
    main = group is None or group.is_main()
    report = _ProgressReport(title, shown=wanted(progress) and main, told=progress is None and main)
    try:
        _RUNNING.set(report)
        report.begin()
        yield
    finally:
        _RUNNING.set(None)
        report.close()


def stage(text: str) -> None:
    """Report the current stage of a call: to the logger, and in the line above the bars if there are any."""
    LOGGER.info(text)
    if (report := _RUNNING.get()) is not None:
        report.say(text)


class StageCounter:
    """The stages of a job that are known beforehand, each announced with its place: "stage 4 of 9: repair".

    A stage that is skipped, such as one whose result is there already, keeps its place.
    """

    def __init__(self, stages: Sequence[str], log: Callable[[str], object] = stage) -> None:
        self.stages, self._log = tuple(stages), log

    def begin(self, name: str) -> None:
        """Announce a stage; one that is not among those known beforehand is not announced."""
        if name in self.stages:
            self._log(f"stage {self.stages.index(name) + 1} of {len(self.stages)}: {name}")


def tracked(items: Iterable[T], what: str, *, total: int | None = None, unit: str = "batch") -> Iterator[T]:
    """Yield items one by one, with a bar if the running call shows bars."""
    report, done = _RUNNING.get(), 0
    with suppress(NotImplementedError):  # of a sampler that does not know its length
        total = total or length_hint(items) or None
    bar = report.bar(what, total, unit) if report is not None and report.shown else make_bar(False)
    count = make_counter(what, total, unit)
    for item in items:
        yield item
        del item  # before the next is made: it may be large
        done += 1  # noqa: SIM113 - `enumerate` keeps the item while the next is made
        bar.update()
        count(done)
    remove_bar(bar)


def make_counter(what: str, total: int | None, unit: str, begun: int = 0) -> Callable[[int], None]:
    """Return a function that gets how many units are done, `begun` of them before now, and says so now and then."""
    report, since = _RUNNING.get(), perf_counter()
    if report is None or report.shown:  # bars show that themselves
        return lambda done: None
    return lambda done: report.count(f"{what}: {unit}", done, total, done - begun, since)
