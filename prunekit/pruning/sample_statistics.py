"""Statistics that criteria and repairs need, collected from samples in any form."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from prunekit.channels.tracing.channel_map import ChannelGroup, ChannelMap
from prunekit.channels.tracing.substitutes import substituted_copy
from prunekit.criteria.criterion import get_criterion
from prunekit.hooks.model_copy import named_tensors
from prunekit.jobs.stages.memory_need import require_memory
from prunekit.measure.memory_format import in_fastest_format
from prunekit.planning.candidates import labels_matching
from prunekit.repair.repair_model import require_images
from prunekit.repair.share_check import ShareCheck
from prunekit.settings.calibration import Moments, RepairSettings
from prunekit.settings.pruning import PruneSettings
from prunekit.statistics.calibration import calibrate
from prunekit.statistics.channel_stats import ChannelStats
from prunekit.statistics.layer_errors import RIDGE, with_gains
from prunekit.statistics.patch_moments import ROWS, PatchStats, collect_patches, with_raised_ridge
from prunekit.tasks.batches import BATCH, ModelBatches, holds_all, joined_inputs
from prunekit.tasks.collation import IMAGES
from prunekit.tasks.task import Task
from prunekit.utils.context import device_of
from prunekit.utils.inputs import counted_positions, sample_count, select_samples, to_device
from prunekit.utils.sample_lists import has_sample_lists
from prunekit.utils.tensors import gather

AT_ONCE = 4096
"""Patches of a layer, about, in a batch: 151 MB for 512 channels and a 3 x 3 kernel in float64."""
OUTPUTS = 2**25
"""Values of a layer's output for which token numbers run at a time, about: 134 MB in float32."""
FEWEST = 8
"""Images, at least, on which the gains of layers are measured."""


def joined_samples(model: nn.Module, data: Any, count: int, task: Task | str | None = None) -> Any:
    """Return the inputs of a model as one tensor, or as a tuple if it takes several, or a list of samples."""
    found: list[tuple[Any, ...]] = []
    whole = holds_all(model, data)
    for inputs, _ in ModelBatches(model, data, task, count=count):
        found.append(inputs)
        if not whole and sum(map(sample_count, found)) >= count:
            break
    given = joined_inputs(model, found) if found else (torch.empty(0, 0),)
    given = given if whole else select_samples(given, slice(count))
    require_images(given)
    given = select_samples(given, padding_order(model, given))
    return given[0] if len(given) == 1 and not isinstance(given[0], list) else given


def samples_for(model: nn.Module, data: Any, count: int, task: Task | str | None = None) -> Any:
    """Return `joined_samples` on the model's device, in the memory format that is the fastest for it."""
    return in_fastest_format(model, to_device(joined_samples(model, data, count, task), device_of(model)))


def padding_order(model: nn.Module, inputs: tuple[Any, ...]) -> slice | Tensor:
    """Return an order of samples in which those with padding are spread evenly, beginning with one of them.

    So every batch has padding: a transformer leaves out a mask that masks nothing, and then calls other operators.
    """
    counted = counted_positions(model, inputs)
    if counted is None:
        return slice(None)
    whole = counted.flatten(1).all(1)
    number = torch.where(whole, whole.cumsum(0) - 0.5, (~whole).cumsum(0) - 1.0)
    return (number / torch.where(whole, whole.sum(), (~whole).sum())).argsort(stable=True)


def in_batches(inputs: Any, size: int = BATCH) -> list[Any]:
    """Return inputs in batches; several tensors become the first entry of each batch."""
    size = min(size, IMAGES) if has_sample_lists(inputs) else size
    parts = [select_samples(inputs, slice(start, start + size)) for start in range(0, sample_count(inputs), size)]
    return parts if isinstance(inputs, Tensor) else [(part,) for part in parts]


def needs_activations(criterion: str) -> bool:
    """Return whether a criterion looks at activations."""
    return not {"stats", "moments", "ranks"}.isdisjoint(get_criterion(criterion).needs)


def activation_statistics(model: nn.Module, images: Any, criterion: str) -> ChannelStats | None:
    """Return the activation statistics that a criterion needs; None if it needs none."""
    needs = get_criterion(criterion).needs
    if not needs_activations(criterion):
        return None
    moments: Moments = "full" if "moments" in needs else "none"
    return calibrate(
        model, in_batches(images), device=gather(images)[0].device, moments=moments, ranks="ranks" in needs
    )


def _positions(inputs: Any) -> int:
    """Return the positions of a sample that a layer reads at most: those of token numbers; of others, `ROWS`."""
    given = gather(inputs)
    tokens = [tensor.shape[1] for tensor in given if tensor.dim() == 2 and not tensor.is_floating_point()]
    return max(tokens) if given and len(tokens) == len(given) else ROWS


def _most_samples(model: nn.Module, inputs: Any) -> int:
    """Return how many samples of token numbers may run at a time, as the scores of a vocabulary are wide."""
    widest = max((len(tensor) for _, tensor in named_tensors(model) if tensor.dim() > 1), default=1)
    return BATCH if _positions(inputs) == ROWS else OUTPUTS // (_positions(inputs) * widest)


def patch_statistics(
    model: nn.Module,
    images: Any,
    channel_map: ChannelMap,
    settings: RepairSettings | None = None,
    ignore: Iterable[str] = (),
    groups: Sequence[ChannelGroup] | None = None,
    log: Callable[[str], None] | None = None,
) -> PatchStats:
    """Return patch statistics of the layers that read channels which may be removed, with their measured gains.

    If there are too few positions for a Gram matrix, its ridge is raised; `too_few_rows` names such layers.

    Args:
        model: the dense one, on the images' device.
        images: (B, ...), or a tuple of all inputs.
        channel_map: of the model.
        settings: of the repair that follows, with the limits of rows and memory; None: none follows.
        ignore: globs over module paths whose output channels are kept.
        groups: whose readers are looked at; None: all groups of the map.
        log: gets lines on the memory that pruning and the statistics will take.

    Raises:
        UsageError: much less memory is free than pruning the model takes.
    """
    said = require_memory(model, channel_map, settings)
    if said is not None and log is not None:
        log(said)
    settings, images = settings or RepairSettings(), in_fastest_format(model, images)
    channel_map.require_plain_forward("the criterion 'elimination'")
    copy = substituted_copy(model, own=lambda name: False)
    found = _moments(copy, images, channel_map, settings, ignore, groups, log)
    few = select_samples(images, slice(max(FEWEST, sample_count(images) // 16)))
    return with_gains(copy, with_raised_ridge(found, RIDGE), few, channel_map.read)


def share_check(
    model: nn.Module,
    images: Any,
    channel_map: ChannelMap,
    patches: PatchStats,
    prune: PruneSettings,
    repair: RepairSettings | None = None,
) -> ShareCheck | None:
    """Return the check of how like layers share a cut, where `elimination` decides that and samples are too few.

    Else it is None. See `patch_statistics`.
    """
    if prune.criterion != "elimination" or not prune.groups_compete:
        return None
    settings = repair or RepairSettings()

    def collect(some: Any) -> PatchStats:
        copy = substituted_copy(model, own=lambda name: False).to(gather(some)[0].device)
        found = _moments(copy, in_fastest_format(copy, some), channel_map, settings, prune.ignore)
        return with_raised_ridge(found, RIDGE)

    return ShareCheck.of(model, images, channel_map, patches, settings.held_out, collect)


def _moments(
    copy: nn.Module,
    images: Any,
    channel_map: ChannelMap,
    settings: RepairSettings,
    ignore: Iterable[str] = (),
    groups: Sequence[ChannelGroup] | None = None,
    log: Callable[[str], None] | None = None,
) -> PatchStats:
    """Return the moments of what layers read, without gains."""
    samples = sample_count(images)
    may_go = ~labels_matching(channel_map, ignore, "ignore")
    may_go[0] = False
    if groups is not None:
        may_go &= np.isin(np.arange(channel_map.n_labels), [label for group in groups for label in group.labels])
    free = [
        (name, axis)
        for name, axes in channel_map.labels.items()
        for axis, on in enumerate(axes[:3])
        if len(axes) > 1 and on is not None and may_go[channel_map.deciding(on)].any()
    ]
    rows = min(ROWS, settings.rows, samples * _positions(images))
    return collect_patches(
        copy,
        in_batches(images, max(1, min(BATCH, AT_ONCE * samples // rows, _most_samples(copy, images)))),
        norms=channel_map.norms,
        inputs=free,
        rows=rows,
        images=samples,
        memory_bytes=settings.memory_bytes,
        log=log,
    )
