"""Small jobs to be killed and resumed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from prunekit.calibration import CalibrationSettings
from prunekit.data import DataSettings
from prunekit.masking import ActivationSettings, ClampSettings
from prunekit.measure import LatencySettings
from prunekit.models import ModelSettings
from prunekit.planning import BudgetSettings, PruneSettings
from prunekit.repair import RepairSettings
from prunekit.training import CheckpointSettings, TrainSettings
from prunekit.workflow import JobSettings


def job(output: Path, **changes: Any) -> JobSettings:
    settings = JobSettings(
        name="small",
        model=ModelSettings("resnet20", "cifar"),
        data=DataSettings(image_size=12, augment="shift", batch=128),
        baseline=TrainSettings(epochs=1, lr=0.05),
        calibration=CalibrationSettings(images=64),
        prune=PruneSettings(budget=BudgetSettings(macs=0.5), criterion="activation", scope="global"),
        repair=RepairSettings(),
        finetune=TrainSettings(
            epochs=1, lr=0.02, accumulate=2, optimizer="adam", clamp_weight_grad=ClampSettings(limit=0.01)
        ),
        activations=ActivationSettings(modules=("layer1.*relu*", "relu"), target=0.6),
        checkpoint=CheckpointSettings(every_steps=1),
        latency=LatencySettings(batches=(1,), threads=(1,), repeats=5, explain=False),
        device="cpu",
        threads=1,
        output=output,
    )
    return replace(settings, **changes)


def folder_of(output: Path) -> Path:
    """The one run below an output folder."""
    (found,) = (path.parent for path in (output / "small").glob("*/status.json"))
    return found


QUICK: dict[str, Any] = {
    "model": ModelSettings("squeezenet1_1"),
    "data": DataSettings(image_size=32, batch=256),
    "baseline": TrainSettings(epochs=0),
    "repair": None,
    "activations": None,
    "finetune": TrainSettings(epochs=0),
}
"""Changes that leave a job with a plan, and nothing that takes time."""
