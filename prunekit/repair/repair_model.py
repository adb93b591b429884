"""Repair of a masked model from unlabeled images: its outputs are fitted to those of the dense model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from prunekit.errors import DataError
from prunekit.hooks.model_copy import named_tensors, with_tensors
from prunekit.planning.plan import Plan, require_plan
from prunekit.repair.held_out_images import Inputs
from prunekit.repair.layer_fit import LayerFitter
from prunekit.repair.layer_walk import RepairSetup
from prunekit.repair.repair_report import RepairReport
from prunekit.settings.calibration import FEWEST_IMAGES, RepairSettings
from prunekit.utils.inputs import as_example, sample_count, sample_noun, split
from prunekit.utils.progress import reporting
from prunekit.utils.tensors import gather, has_sample_lists, holds_samples, is_finite


def repair(
    dense: nn.Module,
    plan: Plan,
    images: Tensor | list[Tensor] | Inputs | Mapping[str, Any],
    settings: RepairSettings | None = None,
    *,
    log: Callable[[str], None] | None = None,
    progress: bool | None = None,
) -> tuple[nn.Module, RepairReport]:
    """Return a masked copy of a model whose kept weights are fitted to the dense outputs, without training.

    Every convolution and linear layer whose weight is a parameter is refitted, in the order in which they run, and
    before them matrices in a stack: kept rows and columns change, removed entries are exactly zero. Images
    run in batches, and both models stop at each layer until all batches are there: live tensors are held there as far
    as `settings.memory_bytes` allow, and computed again beyond that.

    Args:
        dense: the dense model; only read.
        plan: which channels are kept.
        images: (B, ...) inputs without labels, on the model's device, or a list of images (C, H, W) of any sizes as
            detectors take them, or all inputs as a tuple by position or as a mapping by name; the last
            `settings.held_out` of them are held out.
        settings: of the fit.
        log: gets a line on the memory that the repair will take, before it starts.
        progress: whether to show bars on stderr; None: on a terminal and in a notebook.

    Returns:
        The masked model, dense in size, and the report. If the repaired model's output on held-out images is no
        nearer to the dense one's than without repair, only the first half of the layers is repaired, the first
        quarter and so on, down to none; the report says so.

    Raises:
        DataError: see `require_images`.
        NonFiniteError: a layer of the dense model computes NaN or Inf on them; the message names the layer.
        PlanError: the plan is that of another model.
    """
    settings = settings or RepairSettings()
    require_plan(plan, dense)
    if isinstance(images, (tuple, list, Mapping)):
        images = as_example(dense, images)
    inputs = require_images(images)
    plan.channel_map.require_plain_forward("repair")
    with RepairSetup.entered(dense, plan, inputs) as setup, reporting(progress, "repair"):
        fitter = LayerFitter(setup.original, setup.masked, plan, settings)
        walk = setup.walk(settings, fitter)
        if log is not None:
            log(f"repair: {walk.memory}")
        before = setup.difference(walk)
        stacks = setup.fit_stacks(walk, settings, before)
        walk.run()
        fitter.reports += stacks
        fitted, after, layers = setup.keep_what_helps(walk, fitter, plan, before)
    repaired = with_tensors(dense, {name: tensor.detach() for name, tensor in named_tensors(setup.masked)})
    kept = any(layer.applied for layer in layers)
    return repaired, RepairReport(layers, before, after, kept, walk.memory, fitted, setup.judge.selected)


def require_images(images: Tensor | Inputs) -> Inputs:
    """Check calibration images, and return them as an example."""
    inputs = images if isinstance(images, tuple) else (images,)
    positional, named = split(inputs)
    values, samples = (*positional, *named.values()), sample_count(inputs)
    for value in values:
        if not isinstance(value, Tensor) and not holds_samples(value, samples):
            raise DataError(
                "calibration: expected samples as one tensor (B, ...), a list of images (C, H, W), or a tuple of such; "
                f"got {type(value).__name__}"
                + ('; a datasets.Dataset gives tensors after .with_format("torch")' if isinstance(value, list) else "")
            )
    shapes = ", ".join(_shape(value) for value in values)
    few = any((isinstance(value, Tensor) and not value.dim()) or len(value) < FEWEST_IMAGES for value in values)
    if few or (len(values) == 1 and isinstance(values[0], Tensor) and values[0].dim() < 2):  # as a sample alone has
        raise DataError(
            f"calibration: expected at least {FEWEST_IMAGES} {sample_noun(inputs)} (B, ...), some of which only judge; "
            f"got {shapes if has_sample_lists(inputs) else f'a tensor of shape {shapes}'}; "
            "to prune without samples, an example is given by itself, prune(model, x, macs=0.5)"
        )
    if len({len(value) for value in values}) > 1:
        raise DataError(f"calibration: expected as many samples of each input, got tensors of shape {shapes}")
    for value in values:
        if (first := _first_not_finite(value)) is not None:
            raise DataError(f"calibration: sample {first} holds NaN or Inf; expected finite numbers")
    return inputs


def _shape(value: Any) -> str:
    return str(tuple(value.shape)) if isinstance(value, Tensor) else f"a list of {len(value)}"


def _first_not_finite(value: Any) -> int | None:
    """Return the index of the first sample with NaN or Inf in it; None if there is none."""
    if not isinstance(value, Tensor):
        return next((i for i, one in enumerate(value) if not all(map(is_finite, gather(one)))), None)
    wrong = (~torch.isfinite(value)).reshape(len(value), -1).any(1)
    return int(wrong.nonzero()[0]) if bool(wrong.any()) else None
