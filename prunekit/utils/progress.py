"""Progress of long calls: bars on terminals and in notebooks, and lines to the logger `prunekit`.

Where neither is, a long call writes a line to stderr every ten seconds: what is done, and how long the rest may take.

In notebooks bars are widgets. Without the package `ipywidgets` the stages alone are shown, as text in one line.
`logging.getLogger("prunekit").setLevel("INFO")` and a handler show a line for each stage.
"""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from importlib.util import find_spec
from operator import length_hint
from textwrap import shorten
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
    """The bars of a running call, and the line above them."""

    def __init__(self, title: str, *, shown: bool, told: bool = False) -> None:
        self.title, self.shown, self._told = title, shown, told
        self._start = self._last = perf_counter()
        self._line: Any = None
        self._bars: list[Any] = []

    def bar(self, what: str, total: int | None, unit: str) -> Any:
        """Return a bar that is removed when the call ends, if not before."""
        # Where bars are text in a notebook no cursor goes up: a second bar would fill the page.
        one_line = _in_notebook() and find_spec("ipywidgets") is None
        found = make_bar(not one_line, desc=what, total=total, unit=unit, leave=False)
        self._bars.append(found)
        return found

    def say(self, text: str) -> None:
        """Show the stage in a line of its own; of a long call without bars, which nobody asked for, now and then."""
        if not self.shown:
            now = perf_counter()
            if self._told and sys.stderr is not None and now - self._last >= QUIET_S:
                self._last = now
                sys.stderr.write(f"{self.title} [{now - self._start:.0f} s]: {text}\n")
                sys.stderr.flush()
            return
        shown = f"{self.title}: {shorten(text, WIDTH, placeholder='...')}"
        if self._line is None:
            self._line = make_bar(True, bar_format="{desc} [{elapsed}]", desc=shown, leave=False)
            self._bars.insert(0, self._line)
        self._line.set_description_str(shown)

    def count(self, what: str, done: int, total: int | None, since: float, before: int) -> None:
        """Say how far a loop is, and how long the rest may take as it went since a time; bars show that themselves."""
        now = perf_counter()
        if self.shown or done <= before or now - self._last < QUIET_S:
            return
        left = f" of {total}, about {(now - since) / (done - before) * (total - done):.0f} s left" if total else ""
        self.say(f"{what} {done}{left}")

    def close(self) -> None:
        """Remove all bars, also after an error or an interrupt."""
        while self._bars:
            remove_bar(self._bars.pop())


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
    """Show the stages and bars of a call while it runs, and of the calls inside it."""
    if _RUNNING.get() is not None:
        yield
        return
    report = _ProgressReport(title, shown=wanted(progress), told=progress is None)
    try:
        _RUNNING.set(report)
        yield
    finally:
        _RUNNING.set(None)
        report.close()


def stage(text: str) -> None:
    """Report the current stage of a call: to the logger, and in the line above the bars if there are any."""
    LOGGER.info(text)
    report = _RUNNING.get()
    if report is not None:
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
    """Yield items one by one, with a bar if the running call shows bars, or with a line now and then."""
    total, report = total or length_hint(items) or None, _RUNNING.get()
    bar = make_bar(False) if report is None or not report.shown else report.bar(what, total, unit)
    tell = make_teller(what, total, unit)
    for done, item in enumerate(items, 1):
        yield item
        del item  # before the next is made: it may be large
        bar.update()
        tell(done)
    remove_bar(bar)


def make_teller(what: str, total: int | None, unit: str, before: int = 0) -> Callable[[int], None]:
    """Return a function that gets how many units are done, with those `before` now, and says so where no bars are."""
    report, since = _RUNNING.get(), perf_counter()
    return lambda done: None if report is None else report.count(f"{what}: {unit}", done, total, since, before)
