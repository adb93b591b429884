"""Whole runs time their models in this process: starting one for each would take most of a test."""

from __future__ import annotations

from pathlib import Path

import pytest

from prunekit.measure import isolated, latency, measuring


@pytest.fixture(autouse=True)
def _timed_here(monkeypatch: pytest.MonkeyPatch) -> None:
    def here(job: measuring.Job, folder: Path) -> tuple[list[isolated.Outcome], str]:
        return list(measuring.measure(job, own_process=False)), ""

    monkeypatch.setattr(latency, "measure_apart", here)
