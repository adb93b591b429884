"""What tests of commands share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from efforts import HERE

from prunekit.measure.measurement_effort import effort_of


@pytest.fixture(autouse=True, scope="module")
def _timed_here() -> Iterator[None]:
    """Starting a process to time models in would take most of a test; that it is started has tests of its own."""
    with effort_of(HERE):
        yield


@pytest.fixture
def here(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that commands run in, with the test module's `RECIPE` as `mine.yaml` and its `CODE` as `own.py`."""
    (tmp_path / "mine.yaml").write_text(request.module.RECIPE)
    (tmp_path / "own.py").write_text(request.module.CODE)
    monkeypatch.chdir(tmp_path)
    return tmp_path
