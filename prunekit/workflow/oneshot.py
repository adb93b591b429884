"""Pruning without training: order and allocation by what each layer reads, then repair, from unlabelled images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from prunekit.calibration.patch_stats import ROWS, PatchStats, collect_patches
from prunekit.calibration.patches import pixel_by_pixel
from prunekit.channels import ChannelMap, trace
from prunekit.channels.map import Keep
from prunekit.channels.trial import settle
from prunekit.compaction import compact
from prunekit.context import paused_garbage_collection
from prunekit.criteria.elimination import eliminations
from prunekit.measure.verify import Verification, verify
from prunekit.planning import Plan, PruneSettings, SensitivityCurve, make_plan, marginal_scores
from prunekit.repair import RepairReport, RepairSettings, repair, require_images

BATCH = 128
ROUNDS = 3
"""How often the budget is spent: MACs of a channel depend on its neighbours' widths, which the plan before says."""


@dataclass(frozen=True, eq=False)
class OneShot:
    """A model pruned and repaired without training.

    Attributes:
        model: the compact model.
        masked: the same, dense in size.
        plan: what was kept.
        curves: what each group's channels cost, by the group's name.
        report: of the repair.
        verification: masked == compact.
    """

    model: nn.Module
    masked: nn.Module
    plan: Plan
    curves: dict[str, SensitivityCurve]
    report: RepairReport
    verification: Verification


def prune_oneshot(
    model: nn.Module,
    images: Tensor,
    settings: PruneSettings,
    repairing: RepairSettings | None = None,
    *,
    more_examples: Sequence[tuple[Any, ...]] = (),
) -> OneShot:
    """Prunes a trained model to a budget and repairs it from unlabelled images: no labels, no gradients, no training.

    Within a group, channels go in the order of an optimal brain surgeon on the patches that their consumers read
    (Hassibi & Stork 1993, by groups of weights); the budget is spent where the error, each output over its variance, is
    least for each multiply-accumulate saved. What stays is refitted, layer by layer, to what the dense model computes;
    a fit that is no better on those of the images that are held out is left out, and the report says so.

    Args:
        model: the dense model; not changed.
        images: (B, ...) calibration images, preprocessed as the model wants them, on its device; 8 or more.
        settings: budget, rounding, exclusions and ratios; its criterion and scope are not used.
        repairing: what is fitted and how; by default every kept weight, `RepairSettings()`.
        more_examples: further inputs for the trace, for branches of the model that the images do not take.

    Returns:
        The compact model with what was kept, what it cost, and what the repair did: `report.before` and `report.after`
        are errors of the model's output on held-out images, as shares of the dense output's variance.

    Raises:
        DataError: `images` is no tensor, or fewer than 8 images; a `UsageError`.
        PlanError: the budget cannot be met, removes nothing, or a glob matches no module; a `UsageError`.
        NonFiniteError: a layer reads or computes NaN or Inf on the images; names the layer.
        VerificationError: masked and compact model differ.
    """
    require_images(images)
    images = pixel_by_pixel(images)
    repairing = repairing or RepairSettings()
    examples = [(images[:2],), *more_examples]
    with paused_garbage_collection():
        chart = trace(model, *examples)
    stats = patch_statistics(model, images, chart, min(ROWS, repairing.rows), repairing.memory_bytes)
    made: list[tuple[Plan, dict[str, SensitivityCurve]]] = []

    def choose(candidate: ChannelMap) -> Keep:
        curves = sensitivity_curves(model, candidate, stats)
        made.append((spend(candidate, curves, settings), curves))
        return made[-1][0].keep

    settled = settle(model, chart, choose, examples)
    plan, curves = made[-1]
    plan = replace(plan, channel_map=settled.channel_map)
    masked, report = repair(model, plan, images, repairing)
    small = compact(masked, plan)
    return OneShot(small, masked, plan, curves, report, verify(masked, small, plan, [(images[:8],)]))


def patch_statistics(
    model: nn.Module, images: Tensor, channel_map: ChannelMap, rows: int, memory_bytes: int
) -> PatchStats:
    """Patch statistics of the layers that read channels which may go."""
    batches, norms = [images[i : i + BATCH] for i in range(0, len(images), BATCH)], channel_map.norms
    free = [
        name for name, axes in channel_map.labels.items() if len(axes) > 1 and axes[1] is not None and axes[1].any()
    ]
    return collect_patches(
        model, batches, norms=norms, weights=free, rows=rows, images=len(images), memory_bytes=memory_bytes
    )


def sensitivity_curves(model: nn.Module, channel_map: ChannelMap, stats: PatchStats) -> dict[str, SensitivityCurve]:
    """What each group's channels cost, from the statistics alone."""
    found = eliminations(model, channel_map, stats)
    return {name: SensitivityCurve(order.labels, order.errors) for name, order in found.items()}


def spend(channel_map: ChannelMap, curves: dict[str, SensitivityCurve], settings: PruneSettings) -> Plan:
    """The plan that meets a budget at the least total error of the curves."""
    keep: Keep | None = None
    for _ in range(ROUNDS):
        plan = make_plan(
            channel_map, marginal_scores(channel_map, curves.values(), keep), replace(settings, scope="global")
        )
        keep = plan.keep
    prune = {**plan.provenance["prune"], "criterion": "elimination", "scope": "error per MAC"}
    return replace(plan, provenance={**plan.provenance, "prune": prune})
