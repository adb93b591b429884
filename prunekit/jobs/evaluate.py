"""Evaluation of a model on test data, which training has not seen."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from prunekit.data.loader import batches
from prunekit.data.sources import Splits
from prunekit.distributed.process_group import in_turn, rank, require_equal, size
from prunekit.errors import ModelError, UsageError
from prunekit.formats.exported_model import ExportedModel
from prunekit.jobs.run.agreement import share_model
from prunekit.jobs.run.exported_model import figures_of
from prunekit.jobs.run.job_inputs import RECIPE_ONLY, Own, bound_splits
from prunekit.jobs.run.model_sources import InputModel, inputs_of_task, probe, splits_of
from prunekit.measure.accuracy import evaluate as measure
from prunekit.settings.inputs import DataSettings
from prunekit.tasks.task import described_task
from prunekit.training.compatibility import require_class_count, require_vocabulary
from prunekit.training.replicas import share_corrupt


def evaluate(
    target: InputModel,
    data: DataSettings | None,
    device: torch.device,
    own: Own = RECIPE_ONLY,
    task: str | None = None,
    dense: Callable[[], nn.Module] | None = None,
) -> dict[str, Any]:
    """Measure the scores of the task on the test split, whose batches the processes of a group share."""
    with in_turn():
        splits = splits_of(target, data, own, "test on", task)
    require_equal(splits.fingerprint, "the images (their fingerprint)")
    share_model(target.model, "the model")
    splits = _bound(splits, target, dense)
    target = replace(target, sample_shape=splits.sample_shape, inputs=inputs_of_task(target.model, splits))
    _check(target, splits)
    settings = data or DataSettings()
    test = batches(splits.test, settings.batch, shuffle_seed=None, workers=settings.reading)
    costs = figures_of(target)
    found = measure(target.model, test.dealt(rank(), size()), splits.task, device, together=True)
    share_corrupt(test)
    figures = {"task": described_task(splits.task), **found.figures(), **costs}
    return {"model": target.name, **figures, "device": str(device), "corrupt_images": splits.corrupt}


def _bound(splits: Splits, target: InputModel, dense: Callable[[], nn.Module] | None) -> Splits:
    """Return the data with its task complete, see `Task.bound`."""
    if not splits.task.from_dense:
        return bound_splits(splits, target.model)
    if splits.task.binding is not None and dense is None:
        raise UsageError(
            f"{target.name}: the targets of task {splits.task.name!r} are the dense model's outputs: give the recipe "
            "that has it, --recipe PATH"
        )
    return splits if dense is None or splits.task.binding is None else bound_splits(splits, dense())


def _check(target: InputModel, splits: Splits) -> None:
    if not target.trained:
        raise ModelError(
            f"{target.name}: expected trained weights, but they are random; give --weights, or a recipe or model folder"
        )
    output, classes = probe(target), len(splits.classes)
    if not isinstance(target.model, ExportedModel):
        require_class_count(target.model, splits.task, classes)
        require_vocabulary(target.model, splits)
    if splits.task.logits is None or not classes:
        return
    try:
        found = splits.task.logits(output).shape[-1]
    except ModelError as error:
        raise ModelError(f"{target.name}: {error}") from error
    if found != classes:
        raise ModelError(f"{target.name}: expected {classes} scores, one for each class of the data, got {found}")
