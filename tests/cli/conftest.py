"""What tests of commands share."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def here(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that commands run in, with the test module's `RECIPE` as `mine.yaml` and its `CODE` as `own.py`."""
    (tmp_path / "mine.yaml").write_text(request.module.RECIPE)
    (tmp_path / "own.py").write_text(request.module.CODE)
    monkeypatch.chdir(tmp_path)
    return tmp_path
