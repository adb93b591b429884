"""Benchmarks print what they say they print."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parent.parent / "benchmarks" / "hooks.py"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


def test_one_object_a_line() -> None:
    done = run("--json", "--only", "mask/inference", "--rounds", "2")
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [row["name"] for row in rows] == ["mask/inference/resnet34"]
    assert {"ratio", "low", "high", "median_ms", "baseline_ms", "threads", "batch", "dtype"} <= rows[0].keys()
    assert 0 < rows[0]["low"] <= rows[0]["ratio"] <= rows[0]["high"]


def test_time_per_operator_is_measured_for_both_nets() -> None:
    command = [sys.executable, str(SCRIPT.with_name("scaling.py")), "--json", "--sizes", "24", "--repeats", "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [row["net"] for row in rows] == ["residual", "chain"]
    assert all(row["operators"] >= 24 and row["trace_seconds"] > 0 and row["prune_seconds"] > 0 for row in rows)
