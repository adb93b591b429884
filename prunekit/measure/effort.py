"""Effort of measurements: how many networks, processes and rounds a figure of time is made of."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass


@dataclass(frozen=True)
class Effort:
    """How much is measured before a figure counts.

    Attributes:
        own_process: whether models are timed in processes started for that, which do nothing else.
        warm_up_calls: calls of a model before any is timed, at most.
        networks: networks that a latency table is fitted to, the dense one among them.
        network_rounds: rounds in which each of those networks is timed, at least.
        network_ms: milliseconds that these rounds take together, at least: a machine's speed wavers over tenths of a
            second.
        attempts: plans that are made and measured for a budget of time, at most.
        processes: processes that measure a plan one after the other, at least.
        most_processes: as many at most, while their median is uncertain.
        last_processes: as many at most for the model that is delivered, whose figure counts.
        tries: how often a plan is measured at most, with twice the rounds each time, while it is unstable in most
            processes.
        rounds: rounds in each process, at least.
        rounds_ms: milliseconds that these rounds take together, at least.
        most_rounds: rounds in each process, at most.
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


DEFAULT = Effort()
_EFFORT: ContextVar[Effort] = ContextVar("prunekit effort", default=DEFAULT)


def current_effort() -> Effort:
    """Return the effort that measurements take here."""
    return _EFFORT.get()


@contextmanager
def effort_of(effort: Effort) -> Iterator[None]:
    """Let all measurements inside take the given effort."""
    token = _EFFORT.set(effort)
    try:
        yield
    finally:
        _EFFORT.reset(token)
