"""Rules of shape operators: replayed on the labels; splits of a labeled axis leave a constraint, the rest locks."""

from collections.abc import Sequence
from itertools import combinations

import numpy as np
import torch

from prunekit.channels.labels.constraints import Crossed, Padded, Rectangle
from prunekit.channels.labels.label_flow import Field, LabelFlow, collapse, rows_along
from prunekit.channels.labels.label_union import Labels
from prunekit.channels.rules.rule import OperatorCall, Trait, aten, register_rule


def axis_groups(old: Sequence[int], new: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """Return the smallest groups of old axes of a reshape, each with the new axes that it becomes."""
    groups: list[tuple[list[int], list[int]]] = []
    i = j = 0
    while i < len(old) or j < len(new):
        left, right = [], []
        a = b = 1
        if i < len(old):
            a, left, i = old[i], [i], i + 1
        if j < len(new):
            b, right, j = new[j], [j], j + 1
        while a != b:
            if a < b:
                a *= old[i]
                left.append(i)
                i += 1
            else:
                b *= new[j]
                right.append(j)
                j += 1
        groups.append((left, right))
    return groups


def reshape_labels(labels: Labels, old: Sequence[int], new: Sequence[int]) -> tuple[Labels, list[list[int]]]:
    """Return labels reshaped like a view from `old` to `new`, and the groups of new axes that one axis became."""
    if 0 in old:
        return np.zeros([1] * len(new), dtype=np.int64), []
    full, target, splits = list(labels.shape), [1] * len(new), []
    for left, right in axis_groups(old, new):
        if any(labels.shape[axis] > 1 for axis in left):
            for axis in left:
                full[axis] = old[axis]
            for axis in right:
                target[axis] = new[axis]
            splits.append([axis for axis in right if new[axis] > 1])
    return np.broadcast_to(labels, full).reshape(target), [axes for axes in splits if len(axes) > 1]


Trait.RESHAPES_IN_PLACE.declare(*aten("squeeze_ unsqueeze_ transpose_ t_"))
Trait.SIZED.declare(*aten("view _unsafe_view reshape expand slice"))
Trait.COPIES.declare(*aten("_unsafe_view as_strided_"))
Trait.REARRANGES.declare(*aten("view _unsafe_view permute transpose unsqueeze squeeze"))
Trait.PASSES.declare(
    *aten("view _unsafe_view reshape permute transpose t movedim unsqueeze squeeze expand slice narrow select"),
    *aten("split split_with_sizes unsafe_split unsafe_split_with_sizes chunk unbind clone alias detach _to_copy"),
)
Trait.KEEPS_CONSTANTS.declare(*aten("view _unsafe_view reshape permute transpose t expand roll slice"))


@register_rule(*aten("view _unsafe_view reshape unsqueeze squeeze unsqueeze_ squeeze_"))
def view(flow: LabelFlow, call: OperatorCall) -> None:
    """Repeat labels where axes are merged; leave a rectangle constraint for each pair that an axis is split into."""
    source, out = call.args[0], call.out
    if call.name.endswith("_") and source is out:  # the old shape is unknown by now
        _view_in_place(flow, call)
        return
    fields: list[Field] = []
    before: list[Field] = []
    for field in flow.fields(source):
        labels, splits = reshape_labels(field.labels, source.shape, out.shape)
        for axes in splits:
            _constrain(flow, labels, axes)
        reshaped = field.with_labels(collapse(labels))
        fields += flow.unrepeated(reshaped) if splits else [reshaped]
        before += [field] * (len(fields) - len(before))
    fields, crossed = _merged(flow, fields, before)
    flow.set(out, fields)
    flow.cross_if_read(out, [*flow.crossed(source), *crossed])


def _merged(flow: LabelFlow, fields: list[Field], before: Sequence[Field]) -> tuple[list[Field], list[Crossed]]:
    """Return fields some of whose axes became one, and constraints where both axes may lose channels."""
    dropped: set[int] = set()
    crossed = []
    for i, j in combinations(range(len(fields)), 2):
        if not set(fields[i].span) & set(fields[j].span) or set(before[i].span) & set(before[j].span):
            continue
        locked = {k for k in (i, j) if not flow.union.find(fields[k].labels).any()}
        repeated = {k for k in (i, j) if flow.has_any_size(fields[k])}
        if not locked and not repeated:
            crossed.append(Crossed(*(flow.record(fields[k].labels, "merged with another axis") for k in (i, j))))
        # an axis that was repeated any number of times gives the other new labels; a locked one is like one without
        for k in repeated if not locked and len(repeated) == 1 else ():
            if set(fields[k].span) <= set(fields[i + j - k].span):
                fields[i + j - k] = flow.repeated(fields[i + j - k], fields[k])
        dropped |= locked | repeated
    return [field for k, field in enumerate(fields) if k not in dropped], crossed


def _view_in_place(flow: LabelFlow, call: OperatorCall) -> None:
    """Add or drop the axes of size 1 that an operator names; where it names none, nothing tells which were dropped."""
    fields, axes = flow.fields(call.out), call.arg(1, "dim", ())
    axes = (axes,) if isinstance(axes, int) else tuple(axes)
    change = np.expand_dims if call.name == "aten.unsqueeze_" else np.squeeze
    sizes = {field.labels.ndim + (len(axes) if change is np.expand_dims else -len(axes)) for field in fields}
    if not axes or sizes - {call.out.dim()}:
        flow.lock(fields, "shape changed in place")
        fields = ()
    flow.set(call.out, [field.with_labels(change(field.labels, axes)) for field in fields])


def _constrain(flow: LabelFlow, labels: Labels, axes: list[int]) -> None:
    """Leave a rectangle for each place at which an axis that became several is cut in two, (rows, columns)."""
    grid = np.moveaxis(labels, axes, range(labels.ndim - len(axes), labels.ndim))
    sizes = grid.shape[labels.ndim - len(axes) :]
    grid = grid.reshape(-1, int(np.prod(sizes)))
    for cut in range(1, len(sizes)):
        columns = int(np.prod(sizes[cut:]))
        for block in grid.reshape(-1, sizes[cut - 1], columns):
            flow.constraints.append(Rectangle(block))


@register_rule("aten.permute", "aten.transpose", "aten.t", "aten.movedim", "aten.transpose_", "aten.t_")
def permute(flow: LabelFlow, call: OperatorCall) -> None:
    """Reorder axes."""
    ndim = call.args[0].dim()
    order = list(range(ndim))
    if "transpose" in call.name:
        a, b = call.args[1], call.args[2]
        order[a], order[b] = order[b], order[a]
    elif call.name.startswith("aten.t"):
        order.reverse()
    else:
        order = [axis % ndim for axis in call.args[1]]
    flow.set(call.out, [field.with_labels(np.transpose(field.labels, order)) for field in flow.fields(call.args[0])])


@register_rule("aten.as_strided_")
def layout(flow: LabelFlow, call: OperatorCall) -> None:
    """Pass strides that pooling to one position writes in place for axes of size 1, and lock on anything more."""
    fields = flow.fields(call.out)
    if not (all(field.fits(call.out.shape) for field in fields) and call.out.is_contiguous()):
        flow.lock(fields, "strides written in place")


def _repeated(call: OperatorCall) -> list[int]:
    """Return the axes along which one position is repeated."""
    sizes = [*[1] * (call.out.dim() - call.args[0].dim()), *call.args[0].shape]
    return [axis for axis, size in enumerate(sizes) if size == 1 < call.out.shape[axis]]


@register_rule("aten.expand", traits=[Trait.MAKES])
def expand(flow: LabelFlow, call: OperatorCall) -> None:
    """Repeat axes of size 1: the labels do not depend on them, and such an axis may have any size.

    An index has new labels there: arithmetic on it makes a tensor of that size, which may be that of the channels.
    """
    source, out = call.args[0], call.out
    fields = [field.behind(out.dim() - source.dim()) for field in flow.fields(source)]
    axes = _repeated(call) if fields or out.dtype in (torch.int64, torch.int32) else ()
    flow.set(out, [*fields, *flow.made_labels(out, axes)])


def replay(flow: LabelFlow, call: OperatorCall, axes: Sequence[int], reason: str, *, zero: bool = True) -> None:
    """Lock fields that lie only on `axes`, whose positions the operator changes, and tie the others along them."""
    passing = flow.tied_along(axes, flow.fields(call.args[0]), reason)
    flow.set(call.out, [Field(field.labels, field.zero and zero) for field in passing])


PICKED = "positions of this axis are picked by number"
BY_POSITION = "cut, padded or rolled by positions that the model's code fixes"


@register_rule("aten.slice", "aten.narrow")
def cut(flow: LabelFlow, call: OperatorCall) -> None:
    """Cut labels like the values; the trial tells whether the positions can be set to match the kept ones.

    Labels of a part of every head are tied along that part, so that whole heads are removed.
    """
    source = call.args[0]
    axis = call.arg(1, "dim", 0) % source.dim()
    first, size = call.arg(2, "start", 0) or 0, call.out.shape[axis]
    step = call.arg(4, "step", 1) if call.name == "aten.slice" else 1
    if step != 1:
        _every(flow, call, axis, first, step)
    elif size == source.shape[axis]:
        flow.set(call.out, flow.fields(source))
    else:
        first = min(first + source.shape[axis] if first < 0 else first, source.shape[axis])
        tied = [flow.tied(field, [axis]) for field in flow.fields(source)]
        flow.set(call.out, part(flow, tied, axis, first, first + size))


def _every(flow: LabelFlow, call: OperatorCall, axis: int, first: int, step: int) -> None:
    """Tie each run of as many positions as the step of a slice, from which it takes one, as from gates and values."""
    source = call.args[0]
    size, taken = source.shape[axis], call.out.shape[axis]
    if not 0 <= first < step or size % step or taken * step != size:
        replay(flow, call, [axis], BY_POSITION)
        return
    fields = []
    for field in flow.fields(source):
        if axis in field.span:
            runs = field.labels.reshape(*field.labels.shape[:axis], taken, step, *field.labels.shape[axis + 1 :])
            field = field.with_labels(flow.union.tie(runs, [axis + 1]).squeeze(axis + 1))
        fields.append(field)
    flow.set(call.out, fields)


def part(flow: LabelFlow, fields: Sequence[Field], axis: int, start: int, stop: int) -> list[Field]:
    """Return the fields of some positions of an axis; a single position is locked."""
    if stop - start == 1:
        flow.lock([np.take(f.labels, [start], axis=axis) for f in fields if f.span == (axis,)], PICKED)
    taken = [np.take(f.labels, range(start, stop), axis=axis) if axis in f.span else f.labels for f in fields]
    return [field.with_labels(labels) for field, labels in zip(fields, taken, strict=True)]


@register_rule("aten.roll")
def roll(flow: LabelFlow, call: OperatorCall) -> None:
    """Move positions along axes: a labeled axis is locked."""
    dims = call.arg(2, "dims") or range(call.out.dim())
    replay(flow, call, [axis % call.out.dim() for axis in dims], BY_POSITION)


@register_rule(*aten("constant_pad_nd"), *aten("reflection_pad replication_pad", ("1d", "2d", "3d")))
def pad(flow: LabelFlow, call: OperatorCall) -> None:
    """Lock positions added to a labeled axis; lock the axis where positions are cut off or copied."""
    amounts, last = call.args[1], call.out.dim() - 1
    changed = {last - i // 2: amounts[i - i % 2 : i - i % 2 + 2] for i, amount in enumerate(amounts) if amount}
    if call.name == "aten.constant_pad_nd" and all(amount >= 0 for amount in amounts):
        filled = bool(call.arg(2, "value", 0))
        flow.set(call.out, [_padded(flow, field, changed, filled) for field in flow.fields(call.args[0])])
    else:
        replay(flow, call, list(changed), BY_POSITION, zero=False)


def _padded(flow: LabelFlow, field: Field, changed: dict[int, Sequence[int]], filled: bool) -> Field:
    """Return the field with the added positions, which stay or are removed with what they were added to."""
    if sum(axis in field.span for axis in changed) > 1:
        field = flow.tied(field, changed)  # on channels too, a map padded on several axes loses whole ones
    amounts = [tuple(changed.get(axis, (0, 0))) if axis in field.span else (0, 0) for axis in range(field.labels.ndim)]
    added = [axis for axis in changed if axis in field.span]
    labels = np.pad(field.labels, amounts)
    if len(added) == 1 and len(field.span) > 1:
        rows = rows_along(field.labels, added[0])
        part = flow.union.new(rows.shape[1])
        flow.constraints.append(Padded(rows, part))
        shape = [1 if axis == added[0] else size for axis, size in enumerate(field.labels.shape)]
        labels = np.where(np.pad(np.ones_like(field.labels), amounts), labels, part.reshape(shape))
    # on other axes of a field, only added zeros leave removed entries zero
    outside = any(axis not in field.span or len(field.span) > 1 for axis in changed)
    return Field(labels, field.zero and not (filled and outside))


@register_rule("aten.tril", "aten.triu", "aten.tril_", "aten.triu_")
def triangle(flow: LabelFlow, call: OperatorCall) -> None:
    """Set all but a triangle of the last two axes to zero: they stay, or lose the same positions.

    A symmetric matrix is made of its triangle. Only the sides of the diagonal are the same whatever goes: a triangle
    that begins elsewhere counts positions.
    """
    source, axes, diagonal = call.args[0], [call.out.dim() - 2, call.out.dim() - 1], call.arg(1, "diagonal", 0)
    fields = flow.fields(source)
    rows, columns = ([field for field in fields if axis in field.span] for axis in axes)
    alone = all(len(found) == 1 and len(found[0].span) == 1 for found in (rows, columns))
    if alone and source.shape[-2] == source.shape[-1] and diagonal in ((0, 1) if "triu" in call.name else (0, -1)):
        flow.union.merge(rows[0].labels.reshape(-1), columns[0].labels.reshape(-1))
        flow.set(call.out, fields)
    else:
        replay(flow, call, axes, BY_POSITION)


@register_rule("aten.flip")
def flip(flow: LabelFlow, call: OperatorCall) -> None:
    """Reverse labels together with the values."""
    axes = tuple(int(axis) % call.out.dim() for axis in call.args[1])
    flow.set(call.out, [field.with_labels(np.flip(field.labels, axes)) for field in flow.fields(call.args[0])])


@register_rule("aten.repeat", traits=[Trait.MAKES])
def repeat(flow: LabelFlow, call: OperatorCall) -> None:
    """Repeat labels together with the values; an axis along which one position is repeated may have any size.

    A mask or an index is repeated as often as there are channels.
    """
    fields = flow.made_labels(call.out, _repeated(call))
    for field in (one.behind(call.out.dim() - call.args[0].dim()) for one in flow.fields(call.args[0])):
        times = [int(n) if size > 1 else 1 for n, size in zip(call.args[1], field.labels.shape, strict=True)]
        fields.append(field.with_labels(np.tile(field.labels, times)))
    flow.set(call.out, fields)
