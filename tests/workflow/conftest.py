"""Whole runs time their models in this process: starting one for each would take most of a test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from little_time import measured_here

from prunekit.measure import latency


@pytest.fixture(autouse=True, scope="module")
def _timed_here() -> Iterator[None]:
    """Before every other fixture of a module, so that runs which its tests share do so too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(latency, "measure_apart", measured_here)
        yield
