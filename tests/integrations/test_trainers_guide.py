"""The guide's page on other trainers runs as it is written."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import prunekit

pytest.importorskip("accelerate")
from accelerate.state import AcceleratorState, GradientState

PAGE = Path(prunekit.__file__).parent / "guide" / "how_to" / "trainers.md"


@pytest.fixture(autouse=True)
def _process_as_before() -> Iterator[None]:
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of the libraries, about a training as short as this
@pytest.mark.parametrize("library", ["lightning", "transformers"])
def test_python_runs_as_written(library: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip(library)
    monkeypatch.chdir(tmp_path)
    (block,) = (
        text
        for text in re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.S)
        if f"prunekit.integrations.{library}" in text
    )
    names: dict[str, Any] = {}
    exec(compile(block, str(PAGE), "exec"), names)
    assert names["prune"].pruner.done
    found = names["small"] if library == "transformers" else names["classifier"].model
    assert isinstance(found, nn.Module)
    assert sum(parameter.numel() for parameter in found.parameters()) > 0
    assert (tmp_path / ("small" if library == "lightning" else "small-bert") / "prunekit.json").is_file()
