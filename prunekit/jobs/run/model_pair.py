"""A dense and a pruned model side by side: which channels are kept, and how images become inputs."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from prunekit.compaction.model_folder import read_manifest
from prunekit.data.datasets import ImageDataset
from prunekit.data.splits import image_transform_of
from prunekit.errors import ArtifactError, ModelError, UsageError
from prunekit.hooks.model_copy import named_tensors, with_tensors
from prunekit.inspection.visualize.image_grids import Pixels, as_picture, stretched
from prunekit.jobs.run.command_subject import RECIPE_ONLY, Own, Subject
from prunekit.jobs.run.early_checks import MANIFEST, NO_IMAGE
from prunekit.jobs.run.subject_sources import resolve
from prunekit.models.preprocessing import Preprocessing
from prunekit.models.zoo import build_model, from_build, load_factory
from prunekit.planning.plan import Plan, load_plan
from prunekit.reading.array_files import read_tensors
from prunekit.settings.inputs import DataSettings
from prunekit.settings.job import JobSettings
from prunekit.tasks.classification import IMAGE_CLASSIFICATION
from prunekit.tasks.task import Task, get_task
from prunekit.utils.context import seeded, set_mode
from prunekit.utils.inputs import described

Mask = NDArray[np.bool_]
DENSE, PRUNED = "dense", "pruned"


@dataclass(frozen=True, eq=False, kw_only=True)
class ModelPair(Subject):
    """A dense and a pruned model, or one of them; in eval mode on the CPU."""

    models: Mapping[str, nn.Module]  # `dense`, `pruned` or both, in this order
    own: Own = RECIPE_ONLY  # the user's own code that its data is from
    plan: Plan | None = None  # of the pruned model; None if unknown
    # which outputs of the dense layer are kept, (channels,), by module path, of layers with smaller weights
    rows: Mapping[str, Mask] = field(default_factory=dict)
    notes: tuple[str, ...] = ()  # what to know when reading pictures and figures of the models
    run: Path | None = None  # folder of the run that the pruned model is from
    job: JobSettings | None = None  # the recipe of the models; None without one

    @property
    def task(self) -> Task | None:
        """The task of the models; None if nothing says which."""
        if self.splits is not None:
            return self.splits.task
        return None if self.job is None else get_task(self.job.task)

    def picture(self, values: Tensor) -> Pixels:
        """Return an input (C, H, W) as an image; samples of a task's own from their least to their largest value."""
        if self.task is None or self.task.labeled_images:
            return as_picture(values, self.image_conversion)
        return stretched(values)

    @property
    def image_conversion(self) -> Preprocessing:
        """The conversion of an image file into an input."""
        shape = self.sample_shape
        if len(shape) != 3 or shape[0] not in (1, 3):
            got = " x ".join(map(str, shape))
            raise UsageError(f"--image: expected a model that takes images of 1 or 3 channels, but it takes {got}")
        feed = image_transform_of(DataSettings(source="imagefolder") if self.job is None else self.job.known_data)
        mean, std = ((sum(part) / len(part),) if shape[0] == 1 else part for part in (feed.mean, feed.std))
        return Preprocessing(*shape[1:], round(max(shape[1:]) * 8 / 7), mean=mean, std=std)

    def input(self, image: Path | None, index: int = 0) -> tuple[Tensor, str]:
        """Return an input (1, C, H, W) and its name, from an image file or a test image of the recipe."""
        if image is not None:
            return self.image_conversion(image), image.name
        if self.job is None and self.own.data is None:
            raise UsageError(f"{self.name}: {NO_IMAGE}")
        job = self.job
        settings = DataSettings(source="own") if job is None else job.known_data
        splits = self.data(settings, self.own, "look at", IMAGE_CLASSIFICATION.name if job is None else job.task)
        if not 0 <= index < len(splits.test):
            raise UsageError(f"expected the number of a test image, 0 to {len(splits.test) - 1}, got {index}")
        if isinstance(splits.test, ImageDataset):
            values, label = splits.test[index]
            known = f", class {splits.classes[label]}" if splits.classes else ""
            return values[None], f"test image {index}{known}"
        inputs, _ = splits.test.fetch(torch.tensor([index]))
        if not isinstance(inputs, Tensor) or inputs.ndim != 4 or not inputs.is_floating_point():
            raise UsageError(
                f"{self.name}: expected a task whose inputs are images (C, H, W), got {splits.task.name!r} with "
                f"{described(inputs)}"
            )
        return inputs, f"test image {index}"

    def kept(self, path: str, call: int) -> Mask | None:
        """Return which channels of the dense output of a module are kept, (channels,); None if unknown."""
        labels = None if self.plan is None else self.plan.channel_map.activations.get((path, "output", call))
        return self.rows.get(path) if labels is None or self.plan is None else self.plan.keep[labels]


def single_model(subject: Subject, job: JobSettings | None = None, own: Own = RECIPE_ONLY) -> ModelPair:
    """Return one model, as a command names it."""
    notes = () if subject.trained else (f"{subject.name}: its weights are random",)
    model = set_mode(subject.model, False)
    return ModelPair(
        model, subject.name, subject.sample_shape, subject.splits, models={DENSE: model}, own=own, notes=notes, job=job
    )


def model_folder(folder: Path) -> Path:
    """Return the model folder of a path: the path itself, or the folder `model` of a run."""
    if (folder / MANIFEST).is_file():
        return folder
    if not (folder / "model" / MANIFEST).is_file():
        raise ModelError(f"{folder}: expected a model folder, or the folder of a run that has one; it has no model yet")
    return folder / "model"


def load_model_pair(
    folder: Path, job: JobSettings | None = None, *, factory: str | None = None, own_data: str | None = None
) -> ModelPair:
    """Load the pruned model of a folder, and the dense one if its run has kept the weights."""
    folder, given = model_folder(folder), folder
    pruned = resolve(folder, factory=factory)
    run = folder.resolve().parent
    dense, notes = _load_dense(run, folder, factory)
    models = {PRUNED: pruned.model} if dense is None else {DENSE: dense, PRUNED: pruned.model}
    return ModelPair(
        pruned.model if dense is None else dense,
        str(given),
        pruned.sample_shape,
        models=models,
        own=Own(factory, own_data),
        plan=load_plan(run) if (run / "plan.json").is_file() else None,
        rows=_rows(read_manifest(folder), pruned.model),
        notes=notes,
        run=run if (run / "status.json").is_file() else None,
        job=job,
    )


def build_dense(folder: Path, factory: str | None = None) -> nn.Module:
    """Build the dense model that a folder's model was pruned from, with random weights."""
    manifest = read_manifest(folder)
    with seeded(0):
        if (known := from_build(manifest.get("build"))) is not None:
            return build_model(known, num_classes=None)
        if factory is None:
            raise ModelError(
                f"{folder}: the dense model ({manifest.get('class')}) was built by its owner's code; give that as "
                "--model file.py:factory, or another model as --dense"
            )
        return load_factory(factory)


def _load_dense(run: Path, folder: Path, factory: str | None) -> tuple[nn.Module | None, tuple[str, ...]]:
    path = run / "checkpoints" / "dense.safetensors"
    if not path.is_file():
        return None, (f"{folder}: the pruned model alone, because no run beside it has kept the dense weights",)
    dense = load_factory(factory) if factory is not None else build_dense(folder)
    tensors, _ = read_tensors(path, "the dense weights of the run (.safetensors)")
    shapes = {name: tensor.shape for name, tensor in named_tensors(dense)}
    found = {name: tensor.shape for name, tensor in tensors.items()}
    wrong = sorted(name for name in shapes.keys() | found.keys() if found.get(name) != shapes.get(name))
    if wrong:
        raise ArtifactError(f"{path}: does not belong to this dense model: {', '.join(wrong[:3])} differ")
    return set_mode(with_tensors(dense, tensors), False), ()


def _rows(manifest: Mapping[str, Any], model: nn.Module) -> dict[str, Mask]:
    found, modules = {}, dict(model.named_modules())
    for name, axes in manifest["kept"].items():
        path, _, kind = name.rpartition(".")
        if kind != "weight" or path not in modules:
            continue
        axis = 1 if getattr(modules[path], "transposed", False) else 0
        dense = manifest["dense_shapes"][name][axis]
        found[path] = np.ones(dense, bool) if axes[axis] is None else np.isin(np.arange(dense), axes[axis])
    return found
