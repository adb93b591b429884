"""Candidates of a plan: which labels it may remove, in which order, and how many may be kept."""

from collections import Counter
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from prunekit.channels.labels.constraints import NO_EQUAL_WIDTHS, LockRecord, Removal
from prunekit.channels.labels.label_union import Labels
from prunekit.channels.tracing.channel_map import ChannelGroup, ChannelMap, Keep, Lock
from prunekit.channels.tracing.execution import PRUNE_FIRST, hint_at_child, quantized_parts
from prunekit.errors import PlanError
from prunekit.planning.budgets.cost_model import GroupPart
from prunekit.settings.pruning import SERVERS, PruneSettings
from prunekit.utils.display import listed
from prunekit.utils.globs import globs, matching

Scores = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class PlanBounds:
    """Two plans that bound another one, as in a step of a schedule: bool (n_labels,) each, None for no bound."""

    most: Keep | None = None  # labels that may be kept
    least: Keep | None = None  # labels that must be kept; all of them are in `most`


UNBOUNDED = PlanBounds()
NAMED = 3
"""How many modules an error names."""
WIDE = 16
"""Multiple that widths have where no other is given and an axis has eight of them: kernels compute sixteen at once."""


def free_parts(
    channel_map: ChannelMap, scores: Scores, settings: PruneSettings, bounds: PlanBounds = UNBOUNDED
) -> list[GroupPart]:
    """Return the parts of a model that a plan may prune, with exclusions and ratios applied.

    A part is ordered by scores, but labels that `bounds` requires come first, and those that it forbids come last. A
    glob that matches no module path is a `PlanError`, and so is a model of which nothing may be pruned.
    """
    excluded = labels_matching(channel_map, settings.ignore, "ignore")
    ratio = np.ones(channel_map.n_labels) * np.nan
    owners = list[ChannelGroup]()
    for pattern, share in settings.ratios.items():
        ratio[labels_matching(channel_map, [pattern], "ratios")] = share
    parts = []
    for group, *needed in zip(channel_map.groups, channel_map.steps, channel_map.least, strict=True):
        kind = channel_map.kind_of(group)
        if kind == Removal.POSITIONS and settings.layout in SERVERS:
            continue  # their kernels are made for heads of some widths
        free = group.labels[~excluded[group.labels]]
        channels, unit = channels_per_label(channel_map, group), _unit(channel_map, group, settings)
        for share in np.unique(ratio[free]):
            labels = free[np.isnan(ratio[free]) if np.isnan(share) else ratio[free] == share]
            order = labels[np.lexsort((labels, -scores[labels]))]
            counts = _allowed(labels.size, unit or channels, settings, *needed)
            part = GroupPart(order, _served(channel_map, group, counts, settings), channels)
            if not np.isnan(share):
                wanted = labels.size * (1 if kind else share)
                part = GroupPart(order, np.array([part.at_most(wanted)]), channels)
            parts.append(part if bounds is UNBOUNDED else _bounded(part, bounds))
            owners.append(group)
    if settings.layout != "free":
        parts = with_equal_widths(channel_map, parts, owners, settings)
    if not parts:
        raise nothing_free_error(channel_map)
    return parts


def _bounded(part: GroupPart, bounds: PlanBounds) -> GroupPart:
    none, every = np.zeros(part.labels.size, dtype=bool), np.ones(part.labels.size, dtype=bool)
    least = none if bounds.least is None else bounds.least[part.labels]
    most = every if bounds.most is None else bounds.most[part.labels]
    order = part.labels[np.lexsort((~most, ~least))]  # stable: the order among equals stays
    low, high = np.count_nonzero(least), np.count_nonzero(most)
    counts = part.counts[(part.counts >= low) & (part.counts <= high)]
    return GroupPart(order, counts if counts.size else np.array([high]), part.channels)


def with_equal_widths(
    channel_map: ChannelMap, parts: list[GroupPart], owners: list[ChannelGroup], settings: PruneSettings
) -> list[GroupPart]:
    """Return parts, of which each holds all groups that have to keep the same share.

    Groups of repeated layers have to, if they are of one size: the names of their axes differ in numbers alone. So have
    groups that the map says to be as wide. For a library's configuration a group stays whole where another one that has
    to be as wide is not free.
    """
    said = settings.as_configuration and channel_map.source is not None
    equal = channel_map.traced.equal_widths if said else NO_EQUAL_WIDTHS
    members: dict[Hashable, list[GroupPart]] = {}
    for part, group in zip(parts, owners, strict=True):
        family = channel_map.family_of(group)
        if family not in equal.whole:
            counts = part.counts[
                (part.counts % equal.multiples.get(family, 1) == 0) | (part.counts == part.labels.size)
            ]
            part = replace(part, counts=counts if counts.size else part.counts[-1:])
            together = equal.with_family(family)
            alone = (part.labels.size, part.counts.tobytes()) if len(together) == 1 else ()
            members.setdefault((together, *alone), []).append(part)
    found = list(members.items())
    if settings.as_configuration and equal.holds_for(channel_map.families.keys()):
        everywhere = Counter(equal.with_family(channel_map.family_of(group)) for group in channel_map.groups)
        found = [(key, own) for key, own in found if len(own) == everywhere[key[0]]]  # type: ignore[index]
    return [part for _, own in found for part in _merged(own)]


def _merged(parts: list[GroupPart]) -> list[GroupPart]:
    """Merge parts into one that keeps the same share of each; return them unchanged if no share is allowed.

    Its labels are in rows: the most important ones of each part, then the next ones of each.
    """
    steps = int(np.gcd.reduce([part.labels.size for part in parts]))
    sizes = [part.labels.size // steps for part in parts]
    rows = np.concatenate([part.labels.reshape(steps, size) for part, size in zip(parts, sizes, strict=True)], axis=1)
    allowed = np.arange(1, steps + 1)
    for part, size in zip(parts, sizes, strict=True):
        allowed = allowed[np.isin(allowed * size, part.counts)]
    if len(parts) == 1 or not allowed.size:
        return parts
    return [GroupPart(rows.reshape(-1), allowed * sum(sizes), parts[0].channels, sum(sizes))]


def _unit(channel_map: ChannelMap, group: ChannelGroup, settings: PruneSettings) -> int | None:
    """Return how many channels a head, or a position in heads, counts as for rounding; None for other labels.

    Positions are rounded on their own, and heads as much as the smallest allowed number of positions requires. Each
    head of keys may then have any number of query heads, as the heads make a rounded width already.
    """
    if channel_map.kind_of(group):
        return 1 if channel_map.kind_of(group) == Removal.POSITIONS else settings.round_to or settings.target.block
    of_heads = np.isin(channel_map.joint[:, 1], group.labels)
    if not of_heads.any():
        return None
    columns = [column[of_heads] for column in channel_map.joint.T[2:]]
    groups = [np.unique(channel_map.group_of[labels[labels > 0]]) for labels in columns]
    sizes = [[int(channel_map.groups[index].labels.size) for index in each] for each in groups]
    if sizes[0]:
        rounded = settings if settings.round_to else settings.in_blocks  # heads of any number are as wide as these
        return int(np.gcd.reduce(np.concatenate([_allowed(size, 1, rounded) for size in sizes[0]])))
    return max(1, channels_per_label(channel_map, group) // max(sizes[1]))


def _allowed(size: int, channels: int, settings: PruneSettings, step: int = 1, least: int = 1) -> Labels:
    """Return allowed numbers of labels; `step` and `least` are those that the model itself needs."""
    counts = np.arange(1, size + 1)
    wide = counts * channels
    # where no rounding is given, the width of the whole axis decides on the multiple
    block = max(settings.target.block, WIDE)
    step_of = settings.round_to or min(block, 1 << max(0, (int(wide[-1]) // 8).bit_length() - 1))
    fits = (wide % step_of == 0) | ((wide < step_of) & (not settings.round_to))
    fits &= wide >= settings.min_channels
    allowed: Labels = counts[(fits & (counts % step == 0) & (counts >= least)) | (counts == size)]
    return allowed


def _served(channel_map: ChannelMap, group: ChannelGroup, counts: Labels, settings: PruneSettings) -> Labels:
    """Return the counts with which the server of a layout stores rows in blocks, and splits them among its devices."""
    if settings.layout not in SERVERS or channel_map.kind_of(group) == Removal.QUERIES:
        return counts
    block, _ = SERVERS[settings.layout]
    if any(0 < axis == len(channel_map.labels[name]) - 1 for name, axis in group.slots):  # else experts, or a vector
        each = min(_carried(channel_map, group, slot) for slot in group.slots)
        counts = counts[(counts * each % block == 0) | (counts == group.labels.size)]
    split: Labels = counts[counts % settings.tensor_parallel == 0]
    if not split.size:
        raise PlanError(
            f"tensor_parallel: {settings.tensor_parallel} devices cannot share the {group.labels.size} of {group.name}"
            f", of which {', '.join(map(str, counts))} may stay; give a divisor of one of these"
        )
    return split


def channels_per_label(channel_map: ChannelMap, group: ChannelGroup) -> int:
    """Return how many channels of its producer are removed with one label of a group."""
    return _carried(channel_map, group, next((slot for slot in group.slots if slot[1] == 0), group.slots[0]))


def _carried(channel_map: ChannelMap, group: ChannelGroup, slot: tuple[str, int]) -> int:
    """Return how many entries of an axis are removed with one label of a group."""
    name, axis = slot
    on_axis = channel_map.labels[name][axis]
    assert on_axis is not None
    carried = sum(int(np.isin(labels, group.labels).sum()) for labels in channel_map.deciding(on_axis))
    return max(1, carried // group.labels.size)


def labels_matching(channel_map: ChannelMap, patterns: Iterable[str], key: str) -> NDArray[np.bool_]:
    """Return which labels are output channels of modules whose path matches one of the globs: bool (n_labels,)."""
    result = np.zeros(channel_map.n_labels, dtype=bool)
    if not patterns:
        return result
    paths = {path for path, _, _ in channel_map.activations} | {n.rpartition(".")[0] for n in channel_map.labels}
    paths.discard("")
    outputs = [(path, labels) for (path, kind, _), labels in channel_map.activations.items() if kind == "output"]
    called = {path for path, _ in outputs}  # of a module that is never called, its weight's rows are the outputs
    owned = [(name.rpartition(".")[0], axes[0]) for name, axes in channel_map.labels.items() if axes]
    outputs += [(path, rows) for path, rows in owned if rows is not None and path not in called]
    for pattern in globs(patterns, key):
        found = set(matching(pattern, paths, key, PlanError))
        for path, labels in outputs:
            if path in found:
                for deciding in channel_map.deciding(labels):
                    result[deciding] = True
    result[0] = False
    return result


def nothing_free_error(channel_map: ChannelMap) -> PlanError:
    """Return the error for a model without a free channel; it names the lock that holds most channels.

    Where a trial locked what was free before, that is the reason.
    """
    if reason := calls_no_own_module(channel_map):
        return PlanError(reason)
    if found := found_by_trial(channel_map):
        return PlanError(f"no channel is free: all are locked or excluded, after the trial of a plan locked {found}")
    quantized = () if channel_map.source is None else quantized_parts(channel_map.source.trace.model())
    if quantized:
        named = listed(sorted(quantized), NAMED)
        return PlanError(f"no channel is free: all are locked beside {named}, which observe or quantize; {PRUNE_FIRST}")
    locks = [lock for lock in channel_map.locks if lock.channels and (lock.module or lock.operator)]
    most = max(locks, key=lambda lock: lock.channels, default=None)
    why = "" if most is None else f", most of them in {_named(most)}: {most.reason}"
    return PlanError(f"no channel is free: all are locked or excluded{why}; `prunekit inspect` lists all reasons")


def _named(lock: Lock | LockRecord) -> str:
    """Return the module and the operator of a lock, in words."""
    return " ".join(filter(None, (lock.module or "the top-level forward", lock.operator and f"({lock.operator})")))


def found_by_trial(channel_map: ChannelMap) -> str:
    """Return the lock of a trial that holds most channels, in words; empty if no trial locked any."""
    extra = () if channel_map.source is None else channel_map.source.extra
    locks = [lock for lock in extra if isinstance(lock, LockRecord)]
    if not locks:
        return ""
    most = max(locks, key=lambda lock: lock.labels.size)
    more = f" (the most of {len(locks)} places)" if len(locks) > 1 else ""
    return f"those in {_named(most)}{more}: {most.reason}"


def calls_no_own_module(channel_map: ChannelMap) -> str:
    """Return a message if the model calls none of its own modules with parameters; empty otherwise.

    This is the case for a predictor that makes its own copy of the model that it holds.
    """
    if channel_map.source is None:
        return ""
    trace = channel_map.source.trace
    model = trace.model()
    holders = {path for path, module in model.named_modules() if any(True for _ in module.parameters(recurse=False))}
    inside = hint_at_child(model)
    if not inside or holders & trace.ran:
        return ""
    return f"{type(model).__name__} calls no module of its own that has parameters, on the example{inside}"
