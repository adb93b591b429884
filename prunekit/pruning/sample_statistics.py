"""Statistics that criteria and repairs need, collected from samples in any form, and the memory that this takes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import psutil
import torch
from torch import Tensor, nn

from prunekit.channels.tracing.channel_map import ChannelGroup, ChannelMap
from prunekit.channels.tracing.substitutes import substituted_copy
from prunekit.channels.tracing.traced_run import TracedOperator
from prunekit.criteria.criterion import CRITERIA
from prunekit.criteria.elimination import most_state_bytes, unread_stacks
from prunekit.distributed.shared_work import batch_parts, workers
from prunekit.errors import DataError, UsageError
from prunekit.hooks.model_copy import named_tensors
from prunekit.measure.memory_format import in_fastest_format
from prunekit.models.hugging_face import embedded_tokens
from prunekit.planning.candidates import labels_matching
from prunekit.pruning.plan_search import CriterionInputs
from prunekit.repair.held_out_images import require_images
from prunekit.repair.similar_layer_shares import ShareCheck
from prunekit.settings.calibration import RepairSettings
from prunekit.settings.pruning import PruneSettings
from prunekit.statistics.channel_stats import ChannelStats
from prunekit.statistics.channel_stats_collector import calibrate
from prunekit.statistics.gram_matrices import (
    IN_MEMORY,
    ROWS,
    VOCABULARY,
    LayerMoments,
    PatchStats,
    collect_patches,
    shortfalls,
    with_raised_ridge,
)
from prunekit.statistics.layer_errors import RIDGE, with_gains
from prunekit.tasks.batches import BATCH, IMAGES, ModelBatches, holds_all, joined_inputs
from prunekit.tasks.task import Task
from prunekit.utils.context import device_of, is_large
from prunekit.utils.display import size
from prunekit.utils.inputs import counted_positions, sample_count, select_samples, to_device
from prunekit.utils.progress import stage
from prunekit.utils.tensors import FileMemory, gather, has_sample_lists

AT_ONCE = 4096
"""Patches of a layer, about, in a batch: 151 MB for 512 channels and a 3 x 3 kernel in float64."""
OUTPUTS = 2**21
"""Values of a layer's output for which token numbers run at a time, about: 8 MB in float32, as freed pieces of more
than a hundred layers may not fit together."""
FITTED = 0.75
"""Share of the samples that errors on the others are compared with."""
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


def samples_for(model: nn.Module, data: Any, count: int, task: Task | str | None) -> Any:
    """Return `joined_samples` on the model's device, in the memory format that is the fastest for it."""
    samples = joined_samples(model, data, count, task)
    _require_known_tokens(model, samples)
    return in_fastest_format(model, to_device(samples, device_of(model)))


def _require_known_tokens(model: nn.Module, samples: Any) -> None:
    """Raise a `DataError` if a model of transformers has no embedding of a token number."""
    rows = embedded_tokens(model)
    tokens = [one for one in gather(samples) if one.dim() == 2 and one.numel() and not one.is_floating_point()]
    if rows is not None and (most := max((int(one.max()) for one in tokens), default=0)) >= rows:
        raise DataError(
            f"calibration: expected token numbers below {rows}, the model's vocabulary, got {most}; give the tokenizer "
            f"that it was trained with, or a model with a vocabulary of {most + 1} at least"
        )


def padding_order(model: nn.Module, inputs: tuple[Any, ...]) -> slice | Tensor:
    """Return an order of samples in which those with padding are spread evenly, beginning with one of them.

    So every batch has padding: a transformer leaves out a mask that masks nothing, and then calls other operators.
    """
    counted = counted_positions(model, inputs)
    if counted is None:
        return slice(None)
    whole = next(mask for mask in counted.masks if not bool(mask.all())).flatten(1).all(1)
    number = torch.where(whole, whole.cumsum(0) - 0.5, (~whole).cumsum(0) - 1.0)
    return (number / torch.where(whole, whole.sum(), (~whole).sum())).argsort(stable=True)


def in_batches(inputs: Any, size: int = BATCH) -> list[Any]:
    """Return inputs in batches; several tensors become the first entry of each batch."""
    size = min(size, IMAGES) if has_sample_lists(inputs) else size
    parts = [select_samples(inputs, slice(start, start + size)) for start in range(0, sample_count(inputs), size)]
    return parts if isinstance(inputs, Tensor) else [(part,) for part in parts]


def needs_activations(criterion: str) -> bool:
    """Return whether a criterion looks at activations."""
    return "stats" in CRITERIA.get(criterion).needs


def activation_statistics(model: nn.Module, images: Any, criterion: str) -> ChannelStats | None:
    """Return the activation statistics that a criterion needs; None if it needs none."""
    if not needs_activations(criterion):
        return None
    return calibrate(model, in_batches(images), device=gather(images)[0].device)


def _positions(inputs: Any) -> int:
    """Return how many positions of a sample a layer reads at most: one for each token number; of others `ROWS`."""
    given = gather(inputs)
    tokens = [tensor.shape[1] for tensor in given if tensor.dim() == 2 and not tensor.is_floating_point()]
    return max(tokens) if given and len(tokens) == len(given) else ROWS


def patch_statistics(
    model: nn.Module,
    images: Any,
    channel_map: ChannelMap,
    settings: RepairSettings | None = None,
    ignore: Iterable[str] = (),
    groups: Sequence[ChannelGroup] | None = None,
    log: Callable[[str], None] | None = None,
    *,
    held_out: bool = False,
    batch: int | None = None,
) -> PatchStats:
    """Return patch statistics of the layers that read channels which may be removed, with their measured gains.

    With `held_out`, inputs other than tokens get `parts`: moments of most samples and of the others.
    If there are too few positions for a Gram matrix, its ridge is raised; `too_few_rows` names such layers. Images are
    (B, ...), or a tuple of all inputs, of which at most `batch` run at once if given; settings are those of the repair
    that follows, if one does; only readers of `groups` are looked at, if these are given. Much less free memory than
    pruning takes is a `UsageError`.
    """
    said = require_memory(model, channel_map, settings)
    if said is not None and log is not None:
        log(said)
    settings, images = settings or RepairSettings(), in_fastest_format(model, images)
    channel_map.require_plain_forward("the criterion 'elimination'")
    copy = substituted_copy(model, own=lambda name: False)
    samples = sample_count(images)
    fitted, some = round(FITTED * samples), list[PatchStats]()
    if held_out and _positions(images) == ROWS and fitted >= FEWEST:
        each = [select_samples(images, part) for part in (slice(fitted), slice(fitted, None))]
        logs = (log, None)  # once
        pairs = zip(each, logs, strict=True)
        some = [_moments(copy, part, channel_map, settings, ignore, groups, own, of=samples) for part, own in pairs]
    found = _together(some)
    if found is None:
        found, some = _moments(copy, images, channel_map, settings, ignore, groups, log, batch=batch), []
    few = select_samples(images, slice(max(FEWEST, samples // 16)))
    stats = with_gains(copy, with_raised_ridge(found, RIDGE), few, channel_map.read)
    if not some:
        return stats
    return replace(stats, parts=(_with_grams(stats, with_raised_ridge(some[0], RIDGE)), _with_grams(stats, some[1])))


def _together(parts: Sequence[PatchStats]) -> PatchStats | None:
    """Return the moments of all samples by those of some and those of the others; None if these made other calls."""
    if len({tuple(moments.layer.use for moments in part.layers) for part in parts}) != 1:
        return None
    memory, known, layers = FileMemory(IN_MEMORY), dict[tuple[int, ...], Tensor](), list[LayerMoments]()
    for alike in zip(*(part.layers for part in parts), strict=True):
        if alike[0].layer.stack:
            return None
        rows = [moments.counts[0] for moments in alike]
        grams = list[Tensor]()
        for matrices in zip(*(moments.grams for moments in alike), strict=True):
            key = tuple(map(id, matrices))
            if key not in known:
                whole = sum(matrix * (count / sum(rows)) for matrix, count in zip(matrices, rows, strict=True))
                known[key] = memory.keep(whole)
            grams.append(known[key])
        for each in (memory, *(part.memory for part in parts)):
            each.release()
        shares = [(one, count / sum(rows)) for one, count in zip(alike, rows, strict=True)]
        variance = sum(one.variance * part for one, part in shares)
        means = [(one.mean, part) for one, part in shares if one.mean is not None]
        mean = sum(own * part for own, part in means) if len(means) == len(shares) else None
        if mean is not None:
            variance += sum((own - mean).square() * part for own, part in means)
        counts = (sum(rows),) * len(grams)
        whole = replace(alike[0], grams=tuple(grams), variance=variance, counts=counts, mean=mean, read=())
        layers.append(whole)
    return PatchStats(tuple(layers), memory=memory)


def _with_grams(stats: PatchStats, other: PatchStats) -> PatchStats:
    """Return statistics with the Gram matrices of other samples."""
    pairs = zip(stats.layers, other.layers, strict=True)
    return replace(other, layers=tuple(replace(one, grams=two.grams, counts=two.counts, read=()) for one, two in pairs))


def evidence_of_samples(
    model: nn.Module,
    samples: Any,
    channel_map: ChannelMap,
    settings: PruneSettings,
    repair: RepairSettings | None,
    given: CriterionInputs,
) -> tuple[CriterionInputs, tuple[str, ...]]:
    """Return what a criterion reads, collected from samples unless it is given, and what the samples are short of."""
    needs, patches, check, short = CRITERIA.get(settings.criterion).needs, None, None, list[str]()
    if "patches" in needs:
        patches = given.patches
        if patches is None:
            stage(f"patch statistics of {sample_count(samples)} samples")
            held_out, ignore = settings.errors_compete, settings.ignore
            patches = patch_statistics(model, samples, channel_map, repair, ignore, log=stage, held_out=held_out)
        short += shortfalls(patches)
    if patches is not None and settings.criterion == "elimination":
        short += unread_stacks(channel_map, patches)
        check = share_check(model, samples, channel_map, patches, settings, repair)
    stats = given.stats or activation_statistics(model, samples, settings.criterion)
    return replace(given, stats=stats, patches=patches, check=check), tuple(short)


def share_check(
    model: nn.Module,
    images: Any,
    channel_map: ChannelMap,
    patches: PatchStats,
    prune: PruneSettings,
    repair: RepairSettings | None = None,
) -> ShareCheck | None:
    """Return the check of how layers share a cut; None unless `elimination` decides that, and may be misled."""
    if not prune.errors_compete:
        return None
    if patches.parts:
        return ShareCheck.of(model, images, channel_map, patches, 1 - FITTED, lambda _: patches.parts[0])
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
    *,
    of: int | None = None,
    batch: int | None = None,
) -> PatchStats:
    """Return the moments of what layers read, without gains; `of` is the number of all samples, of which these are."""
    samples = of or sample_count(images)
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
    positions = _positions(images)
    rows, most = min(ROWS, settings.rows, samples * positions), BATCH
    if positions != ROWS:  # of token numbers, as the scores of a vocabulary are wide
        shapes = [tensor.shape[:2] for _, tensor in named_tensors(copy) if tensor.dim() > 1]
        widest = max((width for width, read in shapes if width < VOCABULARY * read), default=1)
        most = OUTPUTS // (positions * widest)
    limit = -(-sample_count(images) // batch_parts())
    return collect_patches(
        copy,
        in_batches(images, max(1, min(batch or min(BATCH, AT_ONCE * samples // rows, most), limit))),
        norms=channel_map.norms,
        inputs=free,
        rows=rows,
        images=samples,
        memory_bytes=settings.memory_bytes,
        log=log,
    )


SAMPLES = 2
"""Samples that are traced, and compared."""
ROOM = 1.3
"""Memory that a process has, by what its tensors take: allocators keep freed pieces."""
DOUBT = 0.6
"""Share of the need that is counted: a little less than that may be enough, and is only said."""
_VIEWS = frozenset(
    f"aten.{name}" for name in ("view", "t", "transpose", "permute", "expand", "slice", "select", "unsqueeze", "detach")
)  # fmt: skip


@dataclass(frozen=True)
class MemoryNeed:
    """Bytes that the stages of `prune` take at most beside the model."""

    # of the gradients of one sample, and of the changes that layers get: a linear one a prediction of half of what it
    # reads, any other a change of its weight
    gains: int
    order: int  # of elimination, for the group that the most layers read
    trial: int  # of two compact models, the largest module in float64, and the largest results of a pass
    repair: int  # of a masked copy, and the limit of `RepairSettings`; 0 without a repair

    @classmethod
    def of(cls, model: nn.Module, channel_map: ChannelMap, repair: RepairSettings | None) -> MemoryNeed:
        """Return the need of a model whose weights are ranked by `elimination`."""
        tensors = {id(tensor): tensor for _, tensor in named_tensors(model)}.values()
        copy, largest = sum(tensor.nbytes for tensor in tensors), max((tensor.nbytes for tensor in tensors), default=0)
        changes = sum(tensor.nbytes if tensor.dim() > 2 else tensor.numel() for tensor in tensors)
        run = channel_map.traced.trace.runs[0]
        made = [_made(operator) for operator in run.operators]
        activations, results = sum(made) * _item(model) // SAMPLES, 8 * max(made, default=0)
        return cls(
            int(ROOM * (IN_MEMORY + changes + 2 * largest + activations)),
            int(ROOM * (IN_MEMORY + most_state_bytes(channel_map))),
            int(ROOM * (IN_MEMORY + 2 * copy + 24 * largest // _item(model) + 2 * results)),
            0 if repair is None else int(ROOM * copy) + repair.memory_bytes,
        )

    @property
    def most(self) -> int:
        """The need of the stage that takes the most."""
        return max(self.gains, self.order, self.trial, self.repair)

    def __str__(self) -> str:
        parts = {
            "the gradients of one sample": self.gains,
            "the order of elimination": self.order,
            "the trial of the plan in float64": self.trial,
            "a masked copy, and what the repair may use": self.repair,
        }
        said = ", ".join(f"{size(taken)} for {what}" for what, taken in parts.items() if taken)
        return f"about {size(self.most)} beside the model: {said}"


def require_memory(model: nn.Module, channel_map: ChannelMap, repair: RepairSettings | None) -> str | None:
    """Return a sentence on the memory that pruning a large model on the CPU takes; None for other models."""
    if not is_large(model) or device_of(model).type != "cpu":
        return None
    beside = int(os.environ.get("LOCAL_WORLD_SIZE", 1)) if workers() > 1 else 1  # processes on this machine
    need, free = MemoryNeed.of(model, channel_map, repair), int(psutil.virtual_memory().available) // beside
    short = "" if need.most <= free else ", which may be too little"
    if DOUBT * need.most <= free:
        return f"memory: {need}; {size(free)} are free{short}"
    advice = "shorter samples take less for the gradients and the trial; criterion='l2' needs no gradients and no order"
    if repair is not None and need.repair == need.most:
        least = max(need.gains, need.order, need.trial, need.repair - repair.memory_bytes)
        left = max(0, int(free / DOUBT) - need.repair + repair.memory_bytes) // 2**20 * 2**20
        advice = (
            f"repair=prunekit.RepairSettings(memory_bytes={left}), repair.memory_bytes in a recipe, fits"
            if left >= 2**28
            else f"the least is {size(least)}, with a small memory_bytes in prunekit.RepairSettings; " + advice
        )
    raise UsageError(f"memory: {need}; but only {size(free)} are free: {advice}")


def _made(operator: TracedOperator) -> int:
    """Return how many numbers an operator makes."""
    if operator.name in _VIEWS:
        return 0
    return sum(int(np.prod(shape, dtype=np.int64)) for shape in operator.call[2] if isinstance(shape, tuple))


def _item(model: nn.Module) -> int:
    return max((tensor.element_size() for tensor in model.parameters()), default=4)
