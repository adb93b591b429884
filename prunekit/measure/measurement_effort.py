"""The effort of a job for what it reports: networks, processes and rounds of measurements, and figures of pages."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass


@dataclass(frozen=True)
class Effort:
    """The amount of measurement behind a time, and whether pages have figures."""

    own_process: bool = True  # whether models are timed in processes of their own
    warm_up_calls: int = 100  # most calls of a model before it is timed
    networks: int = 40  # number of networks that a latency table is fitted to, with the dense one
    network_rounds: int = 9  # least number of rounds in which each of those networks is timed
    # least time of these rounds together, as a machine's speed varies over tenths of a second
    network_ms: float = 1500.0
    attempts: int = 8  # most plans that are made and measured for a budget of time
    processes: int = 3  # least number of processes that measure a plan, one after the other
    most_processes: int = 7  # most processes, while their median is uncertain
    last_processes: int = 15  # most processes that measure the final model, whose figure is reported
    # most measurements of a plan, with twice the rounds each time, while it is unstable in most processes
    tries: int = 2
    rounds: int = 15  # least number of rounds in each process
    rounds_ms: float = 2000.0  # least time of these rounds together
    most_rounds: int = 999  # most rounds in each process
    # whether doubtful times of a profile are taken a second time, and refuse a budget if they still predict nothing
    heeds_doubts: bool = True
    load_s: float = 0.3  # shortest time over which the load of the machine is watched
    figures: bool = True  # whether figures are drawn, which takes longer than all else on a page


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
