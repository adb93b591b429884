"""What the guide uses of MLflow, with its signatures; runs stay in memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

RUNS: list[dict[str, Any]] = []


@contextmanager
def start_run(
    run_id: str | None = None, experiment_id: str | None = None, run_name: str | None = None
) -> Iterator[Any]:
    RUNS.append({"params": {}, "metrics": [], "artifacts": []})
    yield RUNS[-1]


def log_params(params: dict[str, Any], synchronous: bool | None = None, run_id: str | None = None) -> None:
    RUNS[-1]["params"].update(params)


def log_metric(key: str, value: float, step: int | None = None) -> None:
    RUNS[-1]["metrics"].append((key, float(value), step))


def log_metrics(metrics: dict[str, float], step: int | None = None) -> None:
    RUNS[-1]["metrics"] += [(key, float(value), step) for key, value in metrics.items()]


def log_artifacts(local_dir: str, artifact_path: str | None = None, run_id: str | None = None) -> None:
    RUNS[-1]["artifacts"].append(local_dir)
