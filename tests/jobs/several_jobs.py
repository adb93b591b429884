"""Small jobs for several processes, and for one to compare with."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from efforts import HERE

from prunekit.jobs.finetune import finetune
from prunekit.jobs.run.command_subject import Own
from prunekit.measure.measurement_effort import effort_of
from prunekit.settings.calibration import CalibrationSettings
from prunekit.settings.deployment import LatencySettings
from prunekit.settings.inputs import DataSettings, ModelSettings
from prunekit.settings.job import JobSettings
from prunekit.settings.pruning import BudgetSettings, PruneSettings
from prunekit.settings.train import TrainSettings

NET = '''
from torch import nn


def net():
    """Without BatchNorm, which looks at each process's share alone."""
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, stride=2, padding=1), nn.GroupNorm(4, 16), nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10),
    )
'''


def written(folder: Path) -> str:
    """The net in a file of its own, as `--model` takes it."""
    file = folder / "several.py"
    file.write_text(NET)
    return f"{file}:net"


def job(output: Path, **changes: Any) -> JobSettings:
    """Calibrates on 320 images in batches of 64: five, which neither 2 nor 4 processes share evenly."""
    settings = JobSettings(
        name="small",
        model=ModelSettings("net", zoo="own"),
        data=DataSettings(image_size=16, batch=64),
        baseline=TrainSettings(epochs=2, lr=0.05),
        calibration=CalibrationSettings(images=320),
        prune=PruneSettings(budget=BudgetSettings(macs=0.5), criterion="activation", scope="global"),
        finetune=TrainSettings(epochs=2, lr=0.02),
        latency=LatencySettings(batches=(1,), threads=(1,), repeats=5, explain=False),
        device="cpu",
        threads=1,
        output=output,
    )
    return replace(settings, **changes)


def ran(
    output: Path, factory: str, changes: dict[str, Any], resume: str | None = None
) -> tuple[Path, dict[str, Any], list[str]]:
    """Folder, metrics and log of a job that measures in this process."""
    log: list[str] = []
    with effort_of(HERE):
        result = finetune(job(output, **changes), log=log.append, own=Own(model=factory), resume=resume)
    return result.folder, result.metrics, log
