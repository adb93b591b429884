"""Sensitivity measured: what a model computes with one channel group after the other masked."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from prunekit.calibration.gradients import Loss
from prunekit.channels import ChannelMap
from prunekit.channels.labels import Labels
from prunekit.channels.running import plain_attention
from prunekit.context import training_mode
from prunekit.masking import WeightMasks
from prunekit.measure.outputs import Spread, Sums, labelled_alike, observed, require_alike
from prunekit.measure.prefix import DensePrefix
from prunekit.planning import MeasuredPoint, Plan
from prunekit.planning.curves import keeping, kept_counts


def forward_passes(orders: Mapping[str, Labels]) -> int:
    """How often `measure_sensitivity` runs the model on each batch: once as it is, and once for each point."""
    return 1 + sum(len(kept_counts(labels.size)) - 1 for labels in orders.values())


def measure_sensitivity(
    model: nn.Module,
    channel_map: ChannelMap,
    orders: Mapping[str, Labels],
    batches: Iterable[Any],
    *,
    loss: Loss | None = None,
    progress: bool = False,
) -> dict[str, tuple[MeasuredPoint, ...]]:
    """Runs a model with each group masked to a few numbers of kept labels, and compares its outputs with its own.

    Nothing is approximated: each point is the model under `WeightMasks`, its norms on the kept channels alone, which is
    what the compact model computes. Each batch is read once; the model runs on it as `forward_passes` says.

    Args:
        model: the dense model; its tensors and modes are afterwards what they were.
        channel_map: of that model, after a trial.
        orders: by a group's name its labels in the order in which they go.
        batches: images (B, ...), or pairs of images and labels; moved to the model's device.
        loss: of what the model returned and the labels, mean over the batch; None: the cross entropy, where there are
            labels and class scores.
        progress: shows a bar on stderr.

    Returns:
        By a group's name its points, from all labels kept to one. With all of them the model is the dense one.

    Raises:
        DataError: there are no batches, or not all or none of them have labels.
        UsageError: a loss is given, and there are no labels.
        ModelError: no tensor of floating-point numbers, one row for each image, is in what the model returns, or its
            shape is another under masks.
        NonFiniteError: an output is NaN or Inf; names the first layer that gives one.
    """
    points = [(name, kept) for name, labels in orders.items() for kept in kept_counts(labels.size)[1:]]
    sums: dict[tuple[str, int], Sums] = {point: Sums() for point in points}
    dense, spread = Sums(), Spread()
    device = next(model.parameters()).device
    plans = {point: Plan(channel_map, keeping(channel_map, orders[point[0]], point[1])) for point in points}
    prefix: DensePrefix | None = None
    bar = tqdm(desc="sensitivity", unit="pass", disable=not progress, dynamic_ncols=True)
    with training_mode(model, False), torch.no_grad(), plain_attention(), bar:
        for batch in labelled_alike(batches, loss):
            images = batch.images.to(device)
            prefix = prefix or _prefix(model, images, plans)
            wanted = observed(model, images, prefix.record(images), "the dense model")
            spread.add(wanted)
            dense.add(wanted, wanted, batch, loss)
            bar.update()
            for name, kept in points:
                where = f"group {name} masked to {kept} of {orders[name].size} channels"
                with WeightMasks(model, plans[name, kept], restore=True):
                    found = observed(model, images, prefix.run(name, images), where)
                require_alike(wanted, found, where)
                sums[name, kept].add(found, wanted, batch, loss)
                bar.update()
    variances = spread.variances()
    return {
        name: tuple(
            (sums.get((name, kept)) or dense).point(kept, variances) for kept in kept_counts(labels.size)
        )
        for name, labels in orders.items()
    }  # fmt: skip


def _prefix(model: nn.Module, images: Tensor, plans: Mapping[tuple[str, int], Plan]) -> DensePrefix:
    """What the dense model and all masked ones share, tried with the fewest channels of each group."""
    last = {name: plan for (name, _), plan in plans.items()}
    tensors = {name: list(plan.kept_indices) for name, plan in last.items()}
    return DensePrefix(
        model, images[:2], tensors, lambda name: WeightMasks(model, last[name], restore=True), batch=len(images)
    )
