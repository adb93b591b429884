"""The effort of a job for what it reports: networks, processes and rounds of measurements, and figures of pages."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass


@dataclass(frozen=True)
class Effort:
    """The amount of measurement behind a time, and whether pages have figures.

    Attributes:
        own_process: whether models are timed in processes of their own.
        warm_up_calls: most calls of a model before it is timed.
        networks: number of networks that a latency table is fitted to, with the dense one.
        network_rounds: least number of rounds in which each of those networks is timed.
        network_ms: least time of these rounds together, as a machine's speed varies over tenths of a second.
        attempts: most plans that are made and measured for a budget of time.
        processes: least number of processes that measure a plan, one after the other.
        most_processes: most processes, while their median is uncertain.
        last_processes: the same for the final model, whose figure is reported.
        tries: most measurements of a plan, with twice the rounds each time, while it is unstable in most processes.
        rounds: least number of rounds in each process.
        rounds_ms: least time of these rounds together.
        most_rounds: most rounds in each process.
        figures: whether figures are drawn, which takes longer than all else on a page.
    """

    own_process: bool = True
    warm_up_calls: int = 100
    networks: int = 40
    network_rounds: int = 9
    network_ms: float = 1500.0
    attempts: int = 8
    processes: int = 3
    most_processes: int = 7
    last_processes: int = 15
    tries: int = 2
    rounds: int = 15
    rounds_ms: float = 2000.0
    most_rounds: int = 999
    figures: bool = True


DEFAULT = Effort()
_EFFORT: ContextVar[Effort] = ContextVar("prunekit effort", default=DEFAULT)


def current_effort() -> Effort:
    """Return the effort that is in force."""
    return _EFFORT.get()


@contextmanager
def effort_of(effort: Effort) -> Iterator[None]:
    """Put an effort in force for all measurements and pages inside."""
    before = _EFFORT.get()
    try:
        _EFFORT.set(effort)
        yield
    finally:
        _EFFORT.set(before)
