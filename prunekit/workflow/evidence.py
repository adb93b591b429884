"""What a criterion and a repair look at, collected from images: from a tensor, a loader, or a job's training images."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from prunekit.calibration import ChannelStats, collect
from prunekit.calibration.gains import RIDGE, with_gains
from prunekit.calibration.patch_stats import ROWS, PatchStats, collect_patches
from prunekit.calibration.patches import pixel_by_pixel
from prunekit.calibration.settings import Moments
from prunekit.calibration.shortage import with_raised_ridge
from prunekit.channels import ChannelGroup, ChannelMap
from prunekit.channels.copying import named_tensors, with_tensors
from prunekit.channels.substitutes import substitute_all
from prunekit.criteria import get_criterion
from prunekit.errors import DataError
from prunekit.planning.select import labels_matching
from prunekit.planning.settings import Criterion
from prunekit.repair import RepairSettings, require_images

BATCH = 128
AT_ONCE = 4096
"""Patches of a layer, about, that are looked at together: 151 MB of 512 channels and a 3 x 3 kernel in float64."""
FEWEST = 8
"""Images, at least, on which the gains of layers are measured."""


def gathered(data: Tensor | Iterable[Any], count: int) -> Tensor:
    """Images as one tensor: all of a tensor, or the first `count` of a loader.

    Args:
        data: (B, ...), or batches, tensors or tuples and lists whose first entry is one.
        count: how many are taken from batches.

    Raises:
        DataError: fewer than 8 images, or no tensors.
    """
    if not isinstance(data, Tensor):
        if not isinstance(data, Iterable):
            raise DataError(f"calibration: expected images, a tensor or batches of them, got {type(data).__name__}")
        data = _joined(data, count)
    require_images(data)
    return data


def _joined(batches: Iterable[Any], count: int) -> Tensor:
    found: list[Tensor] = []
    for batch in batches:
        images = batch[0] if isinstance(batch, (tuple, list)) and batch else batch
        if not isinstance(images, Tensor) or images.dim() < 2:
            raise DataError(
                "calibration: expected batches of images, tensors or (images, ...) each, got "
                + (f"a tensor of shape {tuple(images.shape)}" if isinstance(images, Tensor) else type(images).__name__)
            )
        found.append(images)
        if sum(map(len, found)) >= count:
            break
    if len({each.shape[1:] for each in found}) > 1:
        shapes = sorted({tuple(each.shape[1:]) for each in found})
        raise DataError(
            f"calibration: expected images of one size, got batches of {' and '.join(map(str, shapes[:2]))}"
        )
    return torch.cat(found)[:count] if found else torch.empty(0, 0)


def in_batches(images: Tensor, size: int = BATCH) -> list[Tensor]:
    """Images in batches of 128, or of another size."""
    return [images[start : start + size] for start in range(0, len(images), size)]


def needs_activations(criterion: Criterion) -> bool:
    """Whether a criterion looks at activations."""
    return not {"stats", "moments", "ranks"}.isdisjoint(get_criterion(criterion).needs)


def statistics(model: nn.Module, images: Tensor, criterion: Criterion) -> ChannelStats | None:
    """The activation statistics that a criterion needs; None where it needs none."""
    needs = get_criterion(criterion).needs
    if not needs_activations(criterion):
        return None
    moments: Moments = "full" if "moments" in needs else "none"
    return collect(model, in_batches(images), images.device, moments=moments, ranks="ranks" in needs)


def patch_statistics(
    model: nn.Module,
    images: Tensor,
    channel_map: ChannelMap,
    settings: RepairSettings | None = None,
    exclude: Iterable[str] = (),
    groups: Sequence[ChannelGroup] | None = None,
    log: Callable[[str], None] | None = None,
) -> PatchStats:
    """Patch statistics of the layers that read channels which may go, with their measured gains.

    Where positions are too few for a Gram matrix its ridge is raised; `too_few_rows` says so.

    Args:
        model: the dense one, on the images' device.
        images: (B, ...)
        channel_map: of the model.
        settings: of the repair that follows, which says how many rows and how much memory may be used.
        exclude: globs over module paths whose output channels stay.
        groups: those of the map whose readers are looked at; None: all.
        log: gets a line on the memory that the statistics take before they are collected.
    """
    settings, images = settings or RepairSettings(), pixel_by_pixel(images)
    may_go = ~labels_matching(channel_map, exclude, "exclude")
    may_go[0] = False
    if groups is not None:
        may_go &= np.isin(np.arange(channel_map.n_labels), [label for group in groups for label in group.labels])
    free = [
        (name, axis)
        for name, axes in channel_map.labels.items()
        for axis, on in enumerate(axes[:2])
        if len(axes) > 1 and on is not None and may_go[channel_map.deciding(on)].any()
    ]
    copy = with_tensors(model, {name: tensor.detach() for name, tensor in named_tensors(model)})
    substitute_all(copy)  # attention that calls its projections as layers
    rows = min(ROWS, settings.rows)
    found = collect_patches(
        copy,
        in_batches(images, max(1, min(BATCH, AT_ONCE * len(images) // rows))),
        norms=channel_map.norms,
        inputs=free,
        rows=rows,
        images=len(images),
        memory_bytes=settings.memory_bytes,
        log=log,
    )
    return with_gains(copy, with_raised_ridge(found, RIDGE), images[: max(FEWEST, len(images) // 16)])
