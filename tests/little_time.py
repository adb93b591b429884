"""Profiles and plans for time that measure so little that their figures mean nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from prunekit.measure import latency, timing
from prunekit.measure.isolated import Outcome
from prunekit.measure.measuring import Job, measure
from prunekit.measure.profile import networks
from prunekit.workflow import delivering, profiling, timed


def time_little(monkeypatch: pytest.MonkeyPatch, *, attempts: int) -> None:
    """Ten networks, once, in this process, five rounds after ten calls to warm up, and at most so many attempts."""
    monkeypatch.setattr(profiling, "NETWORKS", 10)
    monkeypatch.setattr(delivering, "ATTEMPTS", attempts)
    measure_little(monkeypatch)


def measure_little(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything is measured once, in this process: to start another takes longer than what it measures."""
    monkeypatch.setattr(timed, "REPEATS", 5)
    monkeypatch.setattr(timed, "ROUNDS_MS", 0.0)
    monkeypatch.setattr(timed, "PROCESSES", 1)
    monkeypatch.setattr(timed, "TRIES", 1)
    monkeypatch.setattr(timing, "WARM_UP_CALLS", 10)
    monkeypatch.setattr(networks, "LEAST_MS", 0.0)
    monkeypatch.setattr(networks._Bench, "_start", lambda bench: bench.pair)
    monkeypatch.setattr(latency, "measure_apart", measured_here)


def measured_here(job: Job, folder: Path) -> tuple[list[Outcome], str]:
    """In place of `measure_apart`: in this process."""
    return list(measure(job, own_process=False)), ""
