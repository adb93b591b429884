"""What long calls tell while they run: bars where somebody looks on, and lines to the logger `prunekit`.

The logger is for programs: `logging.getLogger("prunekit").setLevel("INFO")` and a handler show a line for each stage.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from operator import length_hint
from textwrap import shorten
from typing import Any, TypeVar

LOGGER = logging.getLogger("prunekit")
LOGGER.addHandler(logging.NullHandler())
WIDTH = 60
"""Characters of a stage that the line above the bars has room for."""
T = TypeVar("T")


class _Report:
    """What is shown of a running call."""

    def __init__(self, title: str, *, shown: bool) -> None:
        self.title, self.shown = title, shown
        self._line: Any = None
        self._bars: list[Any] = []

    def bar(self, what: str, total: int | None, unit: str) -> Any:
        """Return a bar that goes when the call ends, if it is still there."""
        found = make_bar(True, desc=what, total=total, unit=unit, leave=False)
        self._bars.append(found)
        return found

    def say(self, text: str) -> None:
        """Show the stage in a line of its own."""
        if not self.shown:
            return
        shown = f"{self.title}: {shorten(text, WIDTH, placeholder='...')}"
        if self._line is None:
            self._line = make_bar(True, bar_format="{desc} [{elapsed}]", desc=shown, leave=False)
            self._bars.insert(0, self._line)
        self._line.set_description_str(shown)

    def close(self) -> None:
        """Clear all that is shown, also after an error or an interrupt."""
        while self._bars:
            self._bars.pop().close()


_RUNNING: ContextVar[_Report | None] = ContextVar("prunekit report", default=None)


def wanted(progress: bool | None) -> bool:
    """Return whether to show bars: as asked for; where nothing is, on a terminal and in a notebook."""
    if progress is not None:
        return progress
    if sys.stderr is not None and sys.stderr.isatty():
        return True
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return "IPKernelApp" in getattr(shell, "config", ())


def make_bar(shown: bool, **options: Any) -> Any:
    """Return a bar of tqdm, that of notebooks in a notebook; one that shows nothing is cheap, and can be used all
    the same.
    """
    from tqdm.auto import tqdm

    return tqdm(disable=not shown, dynamic_ncols=True, **options)


@contextmanager
def reporting(progress: bool | None, title: str) -> Iterator[None]:
    """While a call runs, its stages and what it goes through are shown. What is called inside belongs to it.

    Args:
        progress: whether to show them, see `wanted`.
        title: the call.
    """
    if _RUNNING.get() is not None:
        yield
        return
    report = _Report(title, shown=wanted(progress))
    token = _RUNNING.set(report)
    try:
        yield
    finally:
        _RUNNING.reset(token)
        report.close()


def stage(text: str) -> None:
    """Say what a call does now: a line to the logger, and where bars are shown the line above them."""
    LOGGER.info(text)
    report = _RUNNING.get()
    if report is not None:
        report.say(text)


def tracked(items: Iterable[T], what: str, *, total: int | None = None, unit: str = "batch") -> Iterator[T]:
    """Yield items one after the other, with a bar where the running call shows some.

    Args:
        what: they are gone through for.
        total: how many there are; None: what they say themselves.
        unit: what each is called.
    """
    report = _RUNNING.get()
    if report is None or not report.shown:
        yield from items
        return
    bar = report.bar(what, total or length_hint(items) or None, unit)
    for item in items:
        yield item
        del item  # which may be large, before the next is made
        bar.update()
    bar.close()
