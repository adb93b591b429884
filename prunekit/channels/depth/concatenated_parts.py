"""Parts of a concatenation that may go as a whole, such as the layers of a DenseNet: nothing is left in their place."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from prunekit.channels.depth.run_search import RunSearch
from prunekit.channels.labels import Labels
from prunekit.channels.labels.branch import Branch, Replacement
from prunekit.channels.rules.compute import COUNTED

JOINS = frozenset({"aten.cat"})


def concatenated_parts(search: RunSearch) -> Iterator[tuple[frozenset[int], Branch]]:
    """Yield the parts of concatenations that may go, each with the operators that compute it.

    A part is what one module computes for concatenations alone, among which are other tensors that stay. It goes with
    its output channels, which readers of the concatenation lose as well.
    """
    for call in search.run.module_calls:
        made = call.outputs[0] if len(call.outputs) == 1 and call.place is None else -1
        if made < call.first or search.calls[call.path] != len(search.passes) or not _is_part(search, made):
            continue
        ends = [other.outputs[0] for other in search.run.module_calls if other.path == call.path]
        inside = search.cone(ends)
        own, here = set(range(call.first, call.end)), {one for one in inside if one < search.passes[0].end}
        if not here <= own:
            continue  # a module around it computes all of the part
        if search.call_of[call.path] is not call or not any(search.operators[one].name in COUNTED for one in inside):
            continue
        found = _part(search, call.path, made, inside)
        if found is not None and not own - inside - search.idle(own - inside, set(inside)):
            yield inside, found


def _is_part(search: RunSearch, number: int) -> bool:
    """Return whether only concatenations read a result, and each has other parts besides."""
    readers = search.consumers[number]
    return (
        bool(readers)
        and number not in search.run.returned
        and all(search.operators[one].name in JOINS and len(search.operators[one].reads) > 1 for one in readers)
    )


def _part(search: RunSearch, path: str, made: int, inside: frozenset[int]) -> Branch | None:
    """Return the part that a module computes; None if its output channels may not all go, or are not its own."""
    chart, operator = search.chart, search.operators[made]
    axis = _joined_axis(search, made)
    fields = [chart.resolve(one) for one in operator.outputs[0] if one.span == (axis,)]
    shape = tuple(operator.call[2][0])
    if len(fields) != 1:
        return None
    rows = np.unique(fields[0])
    ending = [chart.groups[index].labels for index in np.unique(chart.group_of[rows]) if index >= 0]
    if not rows.all() or not ending or not np.array_equal(np.sort(np.concatenate(ending)), rows):
        return None
    outside = {read for one in inside for read in search.operators[one].reads} - inside - {-1}
    sizes = [tuple(search.operators[one].call[2][0]) for one in outside]
    if not sizes or any(_without(size, axis) != _without(shape, axis) for size in sizes):
        return None  # its module cannot tell the size of what it returns from what it is given
    names = {name for one in inside for name in search.operators[one].tensors}
    own = {name for name in names if search.uses[name] <= inside}
    groups = [group.labels for group in chart.groups if all(name in own for name, _ in group.slots)]
    inner = [labels for labels in groups if not np.isin(labels, rows).any()]
    weights = tuple(
        dict.fromkeys(
            name
            for one in sorted(inside)
            if search.operators[one].name in COUNTED
            for name in search.operators[one].tensors
            if len(chart.shapes.get(name, ())) > 1
        )
    )
    parts: tuple[Labels, ...] = (*ending, *inner)
    return Branch(
        name=path,
        labels=np.concatenate(parts),
        presence=min(parts, key=len),
        parts=parts,
        last=rows,
        replacements=(Replacement(path, empty=axis),),
        layers=weights,
    )


def _joined_axis(search: RunSearch, made: int) -> int:
    """Return the axis along which the first reader of a result concatenates it."""
    reader = search.operators[search.consumers[made][0]]
    args, named, _ = reader.call
    axis = args[1] if len(args) > 1 else named.get("dim", 0)
    return int(axis) % len(search.operators[made].call[2][0])


def _without(shape: tuple[int, ...], axis: int) -> tuple[int, ...]:
    return shape[:axis] + shape[axis + 1 :]
