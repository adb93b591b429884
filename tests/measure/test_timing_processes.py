"""A process for each runtime, and what happens where it cannot have the model, or dies."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from prunekit.measure.latency.comparison import measure_latency
from prunekit.models.zoo import load_factory
from prunekit.settings.deployment import LatencySettings

CPU = torch.device("cpu")
HEAVY = {"torchvision", "torch._dynamo", "onnx", "pandas", "accelerate", "transformers"}
"""What takes as long to import as torch itself; models bring their own."""
QUICK = LatencySettings((1,), (1,), 5)


class Dies(nn.Module):
    """Ends any process but the one that made it."""

    def __init__(self) -> None:
        super().__init__()
        self.home = os.getpid()

    def forward(self, x: Tensor) -> Tensor:
        if os.getpid() != self.home:
            print("on stdout, where a result would be")
            os.write(2, b"out of memory, say\n")
            os._exit(9)
        return x


@pytest.mark.slow
def test_a_process_to_measure_in_starts_with_torch_alone() -> None:
    code = f"import sys, prunekit.measure.latency.worker_process; print(*{HEAVY} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


@pytest.mark.slow
def test_a_process_that_dies_is_a_failure_with_its_last_words(capfd: pytest.CaptureFixture[str]) -> None:
    report = measure_latency({"a": Dies()}, (4,), QUICK, [CPU])
    assert report.rows == report.speedup == ()
    assert [row["reason"] for row in report.failures] == ["its process ended with 9: out of memory, say"]
    assert (report.failures[0]["runtime"], report.failures[0]["batch"]) == ("eager", 1)
    assert capfd.readouterr().out == ""


@pytest.mark.slow
def test_a_class_that_only_this_process_has_is_timed_here() -> None:
    class Local(nn.Linear):
        pass

    report = measure_latency({"a": Local(4, 4)}, (4,), QUICK, [CPU])
    assert [row["peak_memory_bytes"] for row in report.rows] == [None]
    assert "eager: timed in this process" in report.notes[0]
    assert "Local" in report.notes[0]


@pytest.mark.slow
def test_a_users_own_file_reaches_the_other_process(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "import torch\nclass Mine(torch.nn.Linear):\n    pass\ndef build():\n    return Mine(4, 4)\n"
    )
    report = measure_latency({"mine": load_factory(f"{tmp_path / 'mine.py'}:build")}, (4,), QUICK, [CPU])
    assert [row["model"] for row in report.rows] == ["mine"]
    assert not [note for note in report.notes if "in this process" in note]
