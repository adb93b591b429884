"""The channel map builder: a trace with its constraints solved, and maps that trials made stricter."""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from torch import nn

from prunekit.channels.depth.branch_search import find_branches
from prunekit.channels.labels.branch import BranchLock, is_inside
from prunekit.channels.labels.code_places import CodePlace
from prunekit.channels.labels.constraint_solver import WHOLE_AXIS, LabeledAxes, numbered, solve
from prunekit.channels.labels.constraints import (
    Constraint,
    Contracted,
    Crossed,
    EqualParts,
    EqualWidths,
    FixedPositions,
    Grouped,
    LockRecord,
    Normalized,
    Removal,
    Repeated,
)
from prunekit.channels.labels.label_flow import Field, WidthMultiple, rows_along
from prunekit.channels.labels.label_union import LOCKED, Labels
from prunekit.channels.rewrite.size_expressions import avoidable
from prunekit.channels.rewrite.source_rewriter import is_named_layer
from prunekit.channels.rules.rule import Trait
from prunekit.channels.tracing.channel_map import ChannelMap, Lock, MapSource, SizeAttribute, Stored, group_labels
from prunekit.channels.tracing.channel_norms import renumbered_norms
from prunekit.channels.tracing.execution import is_layer_of_torch
from prunekit.channels.tracing.kept_state import NO_STATE
from prunekit.channels.tracing.tracer import Trace
from prunekit.hooks.model_copy import named_tensors
from prunekit.utils.display import listed

_LEADING = {Removal.POSITIONS: (Contracted, Crossed, Normalized), Removal.QUERIES: (Repeated,)}
"""Kinds of channels with a solution of their own -> constraints that lead to one; without any it is that of heads."""
NOT_USED = (
    "not used by the example inputs, so it stays, and what it reads may not: give inputs that use it as more_examples"
)
LEFT_OUT = "the example inputs read other entries of the same axis, and longer inputs may read these"
BESIDE_UNUSED = (
    "beside a tensor of this size that the example inputs do not use: give inputs that use it as more_examples, or put "
    "what does not belong together in modules of its own"
)
CALLS_NAMED = 3
"""How many calls of a module the reason of a lock names."""


def build_map(model: nn.Module, trace: Trace) -> ChannelMap:
    """Return the channel map of a traced model."""
    tensors = dict(named_tensors(model))
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    stored = {name: Stored(t.element_size(), isinstance(t, nn.Parameter)) for name, t in tensors.items()}
    return _built(MapSource(trace, (), (), np.zeros(0, dtype=np.int64)), shapes, stored)


def with_extra(channel_map: ChannelMap, extra: Iterable[LockRecord | EqualParts]) -> ChannelMap:
    """Return a new map with further locks and constraints, whose labels are in the trace's own numbering."""
    return _rebuilt(channel_map, extra=(*channel_map.traced.extra, *extra))


def with_all_constraints(channel_map: ChannelMap) -> ChannelMap:
    """Return a new map that leaves no constraint out."""
    return _rebuilt(channel_map, all_constraints=True)


def without_expressions(channel_map: ChannelMap) -> ChannelMap:
    """Return a new map that states no size and no order in a module's Python."""
    sizes = tuple(size for size in channel_map.traced.sizes if CodePlace.named(size.name) is None)
    return _rebuilt(channel_map, all_constraints=True, sizes=sizes)


def with_sizes(channel_map: ChannelMap, sizes: Iterable[SizeAttribute]) -> ChannelMap:
    """Return a new map with further sizes of modules, whose labels are in the trace's own numbering."""
    source, new = channel_map.traced, tuple(sizes)
    known = (*channel_map.sizes, *(size.renumbered(source.final) for size in new))
    return replace(channel_map, sizes=known, source=replace(source, sizes=(*source.sizes, *new)))


def with_staying(channel_map: ChannelMap, branches: Iterable[BranchLock]) -> ChannelMap:
    """Return a new map in which some branches stay."""
    return _rebuilt(channel_map, branches_stay=(*channel_map.traced.branches_stay, *branches))


def with_equal_widths(channel_map: ChannelMap, equal: EqualWidths) -> ChannelMap:
    """Return the map with groups that keep the same share as others, or stay whole."""
    return replace(channel_map, source=replace(channel_map.traced, equal_widths=equal))


def _rebuilt(channel_map: ChannelMap, **changes: Any) -> ChannelMap:
    return _built(replace(channel_map.traced, **changes), channel_map.shapes, channel_map.stored)


def _built(source: MapSource, shapes: Mapping[str, tuple[int, ...]], stored: Mapping[str, Stored]) -> ChannelMap:
    """Solve the constraints, number the classes of labels and group them; sets `source.final` and `source.stated`."""
    trace = source.trace
    axes = LabeledAxes(trace.labels)
    unused = _unused(trace, axes)
    constraints, sizes, heads, records = _least_locked(source, axes, unused)
    solutions = [heads]
    for removal, kinds in _LEADING.items():
        differs = any(isinstance(constraint, kinds) for constraint in constraints)
        given = trace.flow, axes, constraints, source.extra, unused
        solutions.append(solve(*given, removal=removal)[0] if differs else heads)
    numbers = numbered(solutions, axes.all)
    final = numbers.final
    labels = {name: tuple(None if a is None else final[a] for a in axes) for name, axes in trace.labels.items()}
    # channels that stay where whole heads are removed may go in another solution, so that their locks hold nothing
    holding = [one for one in records if one.only is not None or not one.labels.size or not final[one.labels].all()]
    least = [WidthMultiple(one.labels, 1, one.known.least) for one in trace.flow.interchangeable.values()]
    chart = ChannelMap(
        labels=labels,
        shapes=shapes,
        n_labels=numbers.n_labels,
        groups=group_labels(labels, numbers.n_labels, numbers.joint),
        joint=numbers.joint,
        locks=tuple(_locks(holding, trace.calls)),
        activations={key: final[axis] for key, axis in trace.activations.items()},
        mac_terms=tuple(
            replace(term, factors=tuple(final[factor] for factor in term.factors))
            for term in trace.flow.macs
            if not is_inside(term.module, trace.fused_away)
        ),
        source=replace(source, final=final, stated=bool(sizes)),
        norms=renumbered_norms(trace.norms.norms, final) if trace.norms.norms else {},
        blocks=renumbered_norms(trace.norms.blocks, final) if trace.norms.blocks else {},
        sizes=tuple(
            one.renumbered(final)
            for one in (
                *_sizes_of_groups(trace, final),
                *_sizes_of_positions(trace),
                *_sizes_of_named_axes(trace),
                *sizes,
                *source.sizes,
            )
        ),
        multiples=tuple(replace(one, labels=final[one.labels]) for one in (*trace.flow.multiples, *least)),
        stored=stored,
        inputs=trace.inputs,
        read=trace.read,
        state=trace.state.renumbered(final) if trace.state else NO_STATE,
        divided=frozenset(
            (name, index)
            for name, axes in trace.labels.items()
            for index, axis in enumerate(axes)
            if axis is not None and any(np.array_equal(axis, one) for one in trace.flow.divided)
        ),
    )
    return replace(chart, branches=find_branches(chart))


def _least_locked(
    source: MapSource, axes: LabeledAxes, unused: list[LockRecord]
) -> tuple[list[Constraint], list[SizeAttribute], Labels, list[LockRecord]]:
    """Return the constraints to hold, the sizes stated in place of others, and the solution: classes and locks."""
    trace, every = source.trace, source.trace.flow.constraints
    best: tuple[list[Constraint], list[SizeAttribute], Labels, list[LockRecord]]
    best = (every, [], *solve(trace.flow, axes, every, source.extra, unused))
    # with all of them the model's Python runs as it is, so they are left out only if that frees channels
    for fixed in () if source.all_constraints else (True, False):
        _, sizes, heads, records = best
        whole = any(record.reason == WHOLE_AXIS for record in records)
        if not (any(isinstance(one, FixedPositions) for one in every) if fixed else whole):
            continue
        found = [one for one in avoidable(trace) if one.fixed is fixed]
        needless = {constraint for one in found for constraint in one.constraints}
        needed = [constraint for constraint in best[0] if constraint not in needless]
        free, others = solve(trace.flow, axes, needed, source.extra, unused)
        if np.count_nonzero(free[axes.all]) > np.count_nonzero(heads[axes.all]):
            stated = [size for one in found for size in one.sizes if not fixed or free[size.labels].any()]
            best = needed, [*sizes, *stated], free, others
    return best


def _unused(trace: Trace, axes: LabeledAxes) -> list[LockRecord]:
    """Return locks of parameters that no operator read: they belong to branches that the examples do not take."""
    read = np.zeros(trace.flow.union.size, dtype=bool)
    inputs = [f.labels.reshape(-1) for run in trace.runs for operator in run.operators for f in operator.inputs]
    if inputs:
        read[np.concatenate(inputs)] = True
    unread = np.flatnonzero(~np.logical_or.reduceat(read[axes.all], axes.starts)).tolist() if axes.axes else []
    records = [LockRecord(NOT_USED, axes.modules[index], "", axes.axes[index]) for index in unread]
    return records + (_beside_unused(trace, axes, unread) if unread else []) + _left_out(trace, axes)


def _left_out(trace: Trace, axes: LabeledAxes) -> list[LockRecord]:
    """Return locks of the entries of axes of which the examples read a part, as of positions beyond their length.

    What is computed of parameters alone, as a scaled table of positions is, reads nothing yet.
    """
    read, fields = trace.flow.union.find(np.arange(trace.flow.union.size)) == LOCKED, dict[int, Field]()
    for run in trace.runs:
        constant = set[int]()
        for number, operator in enumerate(run.operators):
            if constant.issuperset(operator.reads):
                constant.add(number)
            elif operator.name not in Trait.PASSES:
                fields |= {id(field): field for field in operator.inputs}
    for field in fields.values():
        read[trace.flow.union.find(field.labels.reshape(-1))] = True
    found = [
        (path, axis[~there], there)
        for path, axis in zip(axes.modules, axes.axes, strict=True)
        if not (there := read[trace.flow.union.find(axis)]).all()
    ]
    return [LockRecord(LEFT_OUT, path, "", rest) for path, rest, there in found if there.any()]


def _beside_unused(trace: Trace, axes: LabeledAxes, unread: list[int]) -> list[LockRecord]:
    """Return locks of axes as long as one that is never read, beside it in a layer whose train mode does not run."""
    model, missing = trace.model(), set(unread)
    sizes: dict[str, set[int]] = {}
    for index in unread:
        sizes.setdefault(axes.modules[index], set()).add(axes.axes[index].size)
    trained = {run.example for run in trace.runs if run.training}
    # their Python has another way to compute, in which these meet; where both modes ran, neither reads the tensor
    asking = set[str]().union(*(run.asks_mode for run in trace.runs if run.example not in trained))
    own = {path for path in sizes if path in asking and not is_layer_of_torch(model.get_submodule(path))}
    beside = [i for i, path in enumerate(axes.modules) if path in own and i not in missing]
    places = [(axes.modules[index], axes.axes[index]) for index in beside]
    return [LockRecord(BESIDE_UNUSED, path, "", axis) for path, axis in places if axis.size in sizes[path]]


def _sizes_of_groups(trace: Trace, final: Labels) -> Iterator[SizeAttribute]:
    """Yield the sizes that convolutions remember of groups that may be removed."""
    for grouped in trace.flow.constraints:
        if isinstance(grouped, Grouped):
            rows = np.sort(final[grouped.inputs], axis=1)
            if not (rows == rows[0]).all():
                yield SizeAttribute(grouped.module, "groups", None, grouped.inputs)
                yield SizeAttribute(grouped.module, "in_channels", None, grouped.inputs.reshape(-1, 1))


def _sizes_of_named_axes(trace: Trace) -> Iterator[SizeAttribute]:
    """Yield lengths of labeled axes that layers of einops hold, as `Rearrange("b n (h d) -> b h n d", h=8)` does 8."""
    modules = dict[str, Any](trace.model().named_modules(remove_duplicate=False))
    layers = {path: module for path, module in modules.items() if is_named_layer(module)}
    seen = set[str]()
    for operator in (one for run in trace.runs for one in run.operators if one.module in layers):
        layer = layers[operator.module]
        names = re.findall(r"\w+|\.\.\.", layer.pattern.partition("->")[0])
        if operator.module in seen or len(operator.call[2][0]) != len(names):
            continue
        seen.add(operator.module)  # its first operator takes apart what the pattern has in brackets
        for place, name in enumerate(layer.axes_lengths):
            axis = names.index(name) if name in names else None
            for field in operator.outputs[0]:
                if axis in field.span:
                    yield SizeAttribute(operator.module, "axes_lengths", place, rows_along(field.labels, axis))


def _sizes_of_positions(trace: Trace) -> Iterator[SizeAttribute]:
    """Yield the numbers that modules remember of interchangeable positions."""
    for positions in trace.flow.interchangeable.values():
        labels, parts = positions.labels[:, None], positions.known.parts
        for module, name, of_part in positions.known.sizes:
            yield SizeAttribute(module, name, None, labels[: len(labels) // parts] if of_part else labels)


def _locks(records: Iterable[LockRecord], calls: Mapping[str, int]) -> list[Lock]:
    """Return one lock for each reason and place."""
    places: dict[tuple[str, str, str], list[LockRecord]] = {}
    for record in records:
        places.setdefault((record.reason, record.module, record.operator), []).append(record)
    return [
        Lock(reason + _calls(alike, calls.get(module, 0)), module, operator, max(int(one.labels.size) for one in alike))
        for (reason, module, operator), alike in places.items()
    ]


def _calls(records: Iterable[LockRecord], count: int) -> str:
    """Return which of a module's calls locked something, in words; empty if all did."""
    found = {record.call.number: record.call for record in records if record.call is not None}
    if len(found) == count or not found:
        return ""
    named = listed((f"{number} at {call}" for number, call in sorted(found.items())), CALLS_NAMED)
    return f" (of {count} calls of this module, number {named})"
