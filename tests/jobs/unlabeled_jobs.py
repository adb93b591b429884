"""Jobs on a folder of images without labels, and a model whose answers differ."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from efforts import HERE
from PIL import Image
from training_models import Ends

from prunekit.jobs.analyses.evaluate import evaluate
from prunekit.jobs.finetune import finetune
from prunekit.jobs.run.command_subject import Own
from prunekit.jobs.run.job_subject import job_model
from prunekit.jobs.run.subject_sources import resolve
from prunekit.measure.measurement_effort import effort_of
from prunekit.recipe.loading import load
from prunekit.settings.job import JobSettings

NET = '''
import torch
from torch import nn


def net():
    """The answer is the color that an image has the most of; half of the channels repeat the others, faintly."""
    layers = nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 1), nn.ReLU()
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3))
    colors = torch.tensor([1.0, 1, 1, 1, 0.3, 0.2, 0.3, 0.2])[:, None] * torch.eye(3).repeat(3, 1)[:8]
    torch.manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(0.1)
        model[0].weight[:, :, 1, 1] += colors
        model[2].weight[:, :, 0, 0] += torch.eye(8)
        model[6].weight += 4 * colors.T
    return model
'''
RECIPE = """
name: small
model: {name: own, zoo: own}
data: {source: imagefolder, root: photos, labels: false, image_size: 16, batch: 10, augment: flip}
calibration: {images: 20}
prune: {budget: {channels: 0.5}}
finetune: {epochs: 2, lr: 0.01, distill: auto}
checkpoint: {every_steps: 1}
latency: {batches: [1], threads: [1], repeats: 5, explain: false}
device: cpu
threads: 1
"""


def written(folder: Path) -> Path:
    """A folder with 60 photos, a model and the recipe."""
    generator = np.random.default_rng(0)
    (folder / "photos").mkdir()
    for index, pixels in enumerate(generator.integers(0, 200, (60, 16, 16, 3), dtype=np.uint8)):
        pixels[..., index % 3] += 20
        Image.fromarray(pixels).save(folder / "photos" / f"{index:02}.png")
    (folder / "own.py").write_text(NET)
    (folder / "recipe.yaml").write_text(RECIPE)
    return folder


def own(folder: Path) -> Own:
    return Own(model=f"{folder / 'own.py'}:net")


def job(folder: Path, output: Path, *changes: str) -> JobSettings:
    return load(folder / "recipe.yaml", [f"data.root={folder / 'photos'}", f"output={output}", *changes])


def ran(
    folder: Path, output: Path, *changes: str, stop_after: int = 0, training: bool = True
) -> tuple[Path, dict[str, Any], list[str]]:
    """Folder, metrics and log of a run, which goes on where an earlier one was stopped after some epochs."""
    log: list[str] = []

    def stop(row: dict[str, Any]) -> None:
        if row["run"] == "pruned" and row["epoch"] == stop_after:
            raise Ends

    with effort_of(HERE):
        result = finetune(
            job(folder, output, *changes),
            log=log.append,
            own=own(folder),
            on_epoch=stop,
            resume="auto" if output.exists() else None,
            training=training,
        )
    return result.folder, result.metrics, log


def evaluated(folder: Path, run: Path) -> tuple[dict[str, Any], str]:
    """What the pruned model of a run reaches by the answers of the recipe's dense model; in each process of a group."""
    settings, cpu = job(folder, run.parent.parent), torch.device("cpu")
    target = resolve(run / "model", factory=own(folder).model)
    dense = partial(job_model, settings, own(folder))
    found = evaluate(target, settings.known_data, cpu, task=settings.task, dense=dense)
    return found.figures(), str(found)


def in_group(folder: Path, output: Path, run: Path) -> tuple[tuple[dict[str, Any], str], dict[str, Any]]:
    """In each process of a group: what the pruned model of a run reaches, and the metrics of a run of their own."""
    return evaluated(folder, run), ran(folder, output, "finetune.epochs=1", "finetune.mixup=0.2")[1]
