"""Small jobs to be killed and resumed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import safetensors.torch
import torch
from killing import die, patched
from torch import Tensor

from prunekit.jobs.finetune import finetune
from prunekit.settings.calibration import CalibrationSettings, RepairSettings
from prunekit.settings.deployment import LatencySettings
from prunekit.settings.inputs import DataSettings, ModelSettings
from prunekit.settings.job import JobSettings
from prunekit.settings.pruning import BudgetSettings, PruneSettings
from prunekit.settings.train import ActivationSettings, CheckpointSettings, ClampSettings, TrainSettings
from prunekit.utils import state_folders as states

PLANNED = "plan: MACs "
"""What the log says as soon as there is a plan; how many are left is a matter of the machine's rounding."""


def job(output: Path, **changes: Any) -> JobSettings:
    settings = JobSettings(
        name="small",
        model=ModelSettings("resnet8", "cifar"),
        data=DataSettings(image_size=8, augment="shift", batch=128),
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


def run(settings: JobSettings, dying: str = "", resume: str | None = "auto", said: str | None = None) -> None:
    """Runs a job, and is killed in the third checkpoint of a training, or when something is said, or at the very end.

    Args:
        dying: which training; `report` for the end.
        said: what the log's line has in it.
    """
    left, write = [3], states.save_tensors

    def log(message: str) -> None:
        if said is not None and said in message:
            die()

    def save(path: Path, tensors: dict[str, Tensor]) -> None:
        write(path, tensors)
        if path.parent.parent.name == dying:
            left[0] -= 1
            if not left[0]:
                path.write_bytes(path.read_bytes()[:100])
                die()

    with patched() as patch:
        patch.setenv("PRUNEKIT_CACHE", str(settings.output / "cache"))  # each run trains by itself
        patch.setattr(states, "save_tensors", save)
        finetune(settings, log=log, resume=resume, finish=lambda _: die() if dying == "report" else None)


def require_same_tensors(one: Path, other: Path, *names: str) -> None:
    """Checks that files of two runs hold the same, bit for bit.

    Args:
        names: without `.safetensors`.
    """
    for name in names:
        first, second = (safetensors.torch.load_file(folder / f"{name}.safetensors") for folder in (one, other))
        assert first.keys() == second.keys()
        assert [key for key in first if not torch.equal(first[key], second[key])] == [], name


def require_same_tables(one: Path, other: Path, *names: str) -> None:
    """Checks that tables of two runs are the same, but for what was timed.

    Args:
        names: without `.csv`.
    """
    for name in names:
        first, second = (
            pd.read_csv(folder / f"{name}.csv").drop(columns=["images_per_s", "seconds"], errors="ignore")
            for folder in (one, other)
        )
        pd.testing.assert_frame_equal(first, second, check_exact=True, obj=name)


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
