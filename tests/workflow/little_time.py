"""Profiles and plans for time that measure so little that their figures mean nothing."""

from __future__ import annotations

import pytest

from prunekit.measure.profile import networks
from prunekit.workflow import delivering, profiling, timed


def time_little(monkeypatch: pytest.MonkeyPatch, *, attempts: int) -> None:
    """Ten networks, one process, five rounds, and at most so many attempts."""
    monkeypatch.setattr(profiling, "NETWORKS", 10)
    monkeypatch.setattr(delivering, "REPEATS", 5)
    monkeypatch.setattr(delivering, "LAST_REPEATS", 5)
    monkeypatch.setattr(timed, "ROUNDS_MS", 0.0)
    monkeypatch.setattr(timed, "PROCESSES", 1)
    monkeypatch.setattr(delivering, "ATTEMPTS", attempts)
    monkeypatch.setattr(networks, "LEAST_MS", 0.0)
