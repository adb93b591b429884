"""The activation masks of a job: their thresholds, and what they do on the test images."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import nn

from prunekit.data.loader import batches
from prunekit.jobs.calibrate import calibration_batches
from prunekit.jobs.run.job_inputs import Prepared
from prunekit.masks.activation_masks import ActivationMasks
from prunekit.masks.thresholds import ActivationBudget, ActivationThresholds, calibrate_thresholds, chosen_paths
from prunekit.measure.accuracy import evaluate
from prunekit.utils.display import in_unit
from prunekit.utils.progress import Log

TOLERANCE = 0.01
"""How far from its target a layer's share of zeros may be."""


def find_thresholds(prepared: Prepared, compact: nn.Module, *, log: Log) -> ActivationThresholds | None:
    """Return the thresholds of the recipe, or those that meet its target on calibration images; None without masks."""
    settings = prepared.job.activations
    if settings is None:
        return None
    if settings.threshold is not None:
        paths = chosen_paths(compact, settings)
        return ActivationThresholds(dict.fromkeys(paths, settings.threshold), {}, None, settings.side, 0)
    found = calibrate_thresholds(
        compact,
        calibration_batches(prepared),
        settings.modules,
        device=prepared.device,
        target=settings.target,
        overall=settings.overall,
        by=settings.by,
        side=settings.side,
        progress=False,
    )
    asked = f"{settings.target:.1%} zeros" if found.budget is None else f"{found.budget.overall:.1%} zeros overall"
    log(f"activations: thresholds of {len(found)} layers for {asked}, passes: {found.rounds}")
    if found.budget is not None:
        log(f"activations: {_spread(found.budget)}")
    for path, share in found.off_target().items():
        log(f"activations: {path} has {share:.1%} zeros at threshold {found[path]:.3g}")
    return found


def _spread(budget: ActivationBudget) -> str:
    spread, uniform = (f"{budget.errors[way]:.2%}" for way in ("spread", "uniform"))
    if budget.way == "spread":
        return f"spread by errors: on held-out images the output differs by {spread} of its variance, uniform {uniform}"
    return f"one share for all layers: on held-out images the output differs by {uniform}, spread by errors {spread}"


def masks(model: nn.Module, thresholds: ActivationThresholds | None) -> AbstractContextManager[Any]:
    """Return the masks for a training, a context that does nothing without thresholds."""
    if thresholds is None:
        return nullcontext()
    return ActivationMasks(model, thresholds, side=thresholds.side, count=False)


def measure_masks(
    prepared: Prepared, compact: nn.Module, thresholds: ActivationThresholds, *, log: Log
) -> dict[str, Any]:
    """Return sparsity and accuracy under the masks on the test images, which nothing has seen before."""
    data, task = prepared.job.data, prepared.splits.task
    test = batches(prepared.splits.test, data.batch, shuffle_seed=None, workers=data.reading)
    with ActivationMasks(compact, thresholds, side=thresholds.side) as active:
        found = evaluate(compact, test, task, prepared.device)
    compact.cpu()
    sparsity = active.sparsity()
    budget = thresholds.budget
    overall = sparsity.overall if budget is None else thresholds.budget_share(sparsity.layers)
    weighted = "" if budget is None or budget.by == "values" else ", weighted by MACs"
    log(
        f"test: {overall:.1%} of the masked activations are zero{weighted}; "
        f"{task.main.label} under the masks {in_unit(found.values[task.main.name], task.main.unit)}"
    )
    layers = [
        {
            "module": path,
            "threshold": threshold,
            "calibrated": thresholds.reached.get(path),
            "sparsity": sparsity.layers[path],
            **({} if budget is None else {"weight": budget.weights[path]}),
        }
        for path, threshold in thresholds.items()
    ]
    asked: dict[str, Any] = {"side": thresholds.side, "target": thresholds.target}
    if budget is not None:
        asked |= {"overall": budget.overall, "by": budget.by, "way": budget.way, "errors": dict(budget.errors)}
    return {**asked, "sparsity": overall, **found.figures(), "layers": layers}


def missed_targets(measured: Mapping[str, Any] | None) -> list[str]:
    """Return what is more than a point off its target on the test images: layers, or the overall share of zeros."""
    if measured is None:
        return []
    overall, target = measured.get("overall"), measured["target"]
    if overall is not None and abs(measured["sparsity"] - overall) > TOLERANCE:
        return [f"activations overall {overall:.1%}: {measured['sparsity']:.1%} zeros on the test images"]
    return [
        f"activations target {target:.1%}: {row['module']} has {row['sparsity']:.1%} zeros on the test images"
        for row in measured["layers"]
        if target is not None and abs(row["sparsity"] - target) > TOLERANCE
    ]
