"""The accuracy of a model on images that training has not seen."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import torch

from prunekit.data import DataSettings, Splits, batches
from prunekit.distributed.exchange import in_turn, require_equal
from prunekit.distributed.group import rank, size
from prunekit.errors import ModelError, UsageError
from prunekit.measure import accuracy, count_macs, count_parameters
from prunekit.models import logits
from prunekit.training import share_corrupt
from prunekit.workflow.agreeing import share_model
from prunekit.workflow.own import RECIPE_ONLY, Own, job_splits
from prunekit.workflow.targets import Target, probe


def evaluate(target: Target, data: DataSettings | None, device: torch.device, own: Own = RECIPE_ONLY) -> dict[str, Any]:
    """Measures top-1 on the test split. The processes of a group share its batches; each image counts once.

    Args:
        target: the model, with its own images when it came from a job.
        data: the images when the target has none, and how they are fed (batch, workers).
        device: where the model runs.
        own: where the images are the user's own.

    Returns:
        `model`, `top1` (percent), `correct`, `n_test`, `low` and `high` (95 % Wilson interval, percent), `params`,
        `macs` (one sample), `device`, and `corrupt_images` (name -> reason), which are not in `n_test`.

    Raises:
        UsageError: there are no images to test on.
        ModelError: the model has no trained weights, does not run on the images, or knows other classes.
    """
    with in_turn():
        splits = _splits(target, data, own)
    require_equal(splits.fingerprint, "the images (their fingerprint)")
    share_model(target.model, "the model")
    target = replace(target, sample_shape=splits.sample_shape)
    _check(target, len(splits.classes))
    settings = data or DataSettings()
    test = batches(splits.test, settings.batch, shuffle_seed=None, workers=settings.reading)
    costs = {"params": count_parameters(target.model), "macs": count_macs(target.model, target.example_inputs())}
    result = asdict(accuracy(target.model, test.dealt(rank(), size()), device, together=True))
    share_corrupt(test)
    return {"model": target.name, **result, **costs, "device": str(device), "corrupt_images": splits.corrupt}


def _splits(target: Target, data: DataSettings | None, own: Own) -> Splits:
    if target.splits is not None:
        return target.splits
    if data is None:
        raise UsageError(
            f"{target.name}: expected images to test on; name the recipe that has them: --recipe PATH, or give your "
            "own: --data file.py:factory"
        )
    return job_splits(data, own)


def _check(target: Target, classes: int) -> None:
    if not target.trained:
        raise ModelError(
            f"{target.name}: expected trained weights, but they are random; give --weights, or a recipe or model folder"
        )
    output = probe(target)
    try:
        found = logits(output).shape[-1]
    except ModelError as error:
        raise ModelError(f"{target.name}: {error}") from error
    if found != classes:
        raise ModelError(f"{target.name}: expected {classes} scores, one for each class of the data, got {found}")
