"""Repair of a masked model from unlabeled images: its outputs are fitted to those of the dense model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from prunekit.planning.plan import Plan
from prunekit.repair.held_out_images import Inputs
from prunekit.repair.layer_fit import LayerFitter
from prunekit.repair.layer_walk import LayerWalk, RepairSetup
from prunekit.repair.repair_report import RepairReport
from prunekit.settings.calibration import RepairSettings


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

    Images are inputs (B, ...) without labels, on the model's device, or a list of images (C, H, W) of any sizes as
    detectors take them, or all inputs as a tuple by position or as a mapping by name; the last `settings.held_out` of
    them are held out. `log` gets a line on the memory that the repair will take, before it starts.

    The copy is dense in size. If its output on held-out images is no nearer to the dense one's than without repair,
    only the first half of the layers is repaired, the first quarter and so on, down to none; the report says so.

    Raises:
        DataError: see `require_images`.
        NonFiniteError: a layer of the dense model computes NaN or Inf on them; the message names the layer.
        PlanError: the plan is that of another model.
    """
    settings = settings or RepairSettings()
    with RepairSetup.entered(dense, plan, images, "repair", progress) as setup:
        fitter = LayerFitter(setup.original, setup.masked, plan, settings)
        walk = LayerWalk(setup, settings, fitter)
        if log is not None:
            log(f"repair: {walk.memory}")
        before = setup.difference(walk)
        stacks = setup.fit_stacks(walk, settings, before)
        walk.run()
        fitter.reports += stacks
        report = setup.keep_what_helps(walk, fitter, plan, before)
    return setup.repaired(dense), report
