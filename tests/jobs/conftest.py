"""Whole runs time their models in this process: starting one for each would take most of a test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from efforts import HERE

from prunekit.measure.measurement_effort import effort_of


@pytest.fixture(autouse=True, scope="module")
def _timed_here() -> Iterator[None]:
    """Before every other fixture of a module, so that runs which its tests share do so too."""
    with effort_of(HERE):
        yield
