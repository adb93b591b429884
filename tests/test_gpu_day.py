"""The script for whoever has a GPU: its logic, on the CPU."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

FOLDER = Path(__file__).parent.parent / "benchmarks"


@pytest.fixture
def gpu_day(monkeypatch: pytest.MonkeyPatch) -> object:
    monkeypatch.syspath_prepend(str(FOLDER))
    import gpu_day

    return gpu_day


def called(gpu_day: object, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["gpu_day.py", *arguments])
    return gpu_day.main()  # type: ignore[attr-defined,no-any-return]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_gpu_it_says_so(
    gpu_day: object, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    assert called(gpu_day, monkeypatch) == 2
    assert "no CUDA device here" in capsys.readouterr().err


@pytest.mark.slow
def test_the_table_has_what_holds_fails_and_is_skipped(
    gpu_day: object, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fails(setup: object) -> None:
        raise AssertionError("0.9 | of it")

    checks = gpu_day.CHECKS  # type: ignore[attr-defined]
    wanted = {name: checks[name] for name in ("hooks_never_wait", "sparse_tensor_cores")}
    monkeypatch.setattr(gpu_day, "CHECKS", {**wanted, "wrong": ("it is right", fails)})
    assert called(gpu_day, monkeypatch, "--device", "cpu", "--quick", "--output", str(tmp_path)) == 1
    made = json.loads((tmp_path / "gpu_day.json").read_text())
    assert [row["result"] for row in made["rows"]] == ["holds", "skipped", "fails"]
    page = (tmp_path / "gpu_day.md").read_text()
    assert "| it is right | fails | AssertionError: 0.9 / of it |" in page
    assert "| skipped | needs a CUDA device |" in page


def test_every_part_that_the_pages_call_unmeasured_is_checked(gpu_day: object) -> None:
    assert {
        "marked_tests", "agreement", "hooks_never_wait", "masked_steps", "speed", "repair", "training", "processes",
        "sparse_tensor_cores", "tensorrt",
    } == set(gpu_day.CHECKS)  # type: ignore[attr-defined] # fmt: skip
