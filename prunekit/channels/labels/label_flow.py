"""Label flow: the labels on every tensor of a traced run, and what happens to them where tensors meet.

A tensor has *fields*. A field is an array of labels that broadcasts to the tensor's shape: an entry of the tensor goes
when its label in any field goes.

    output of a convolution, (N, C, H, W)              one field, (1, C, 1, 1)
    queries in heads, (N, heads, tokens, positions)    one field, (1, heads, 1, positions), or one on each of these axes

Every rule is given the one `LabelFlow` of its trace. It reads the fields of what goes into an operator and sets those
of what comes out; on the way it merges and locks labels, leaves constraints, and counts multiply-accumulates:

    a + b     fields on the same axes are merged, label by label; where only one side has labels, the other has a size
              that no parameter decides, and they are locked (`pointwise`)
    a @ b     the same in the joint space (m, k, n), then the fields on k are summed over (`contract`)

1. Labels are merged or locked, never taken apart. What can be decided only when it is known which labels are coupled in
   the end becomes a constraint, such as whether attention loses whole heads or positions in all of them.
2. `zero` is a promise: where the label is removed, the masked model has exact zeros. Only then may a sum run over it.
   Who writes to memory takes the promise back for all tensors that share it (`forget_zeros`).
3. Labels from `first_made` on are of tensors that the forward pass made. They may be merged with any others, and their
   locks are not reported: no parameter has them.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from prunekit.channels.labels.code_places import CodePlace, Expression, ModuleCall
from prunekit.channels.labels.constraints import (
    NOT_ZERO,
    Constraint,
    Contracted,
    Crossed,
    FixedPositions,
    Flattened,
    LockRecord,
    Nested,
    Positions,
    Repeated,
)
from prunekit.channels.labels.label_union import LOCKED, Labels, LabelUnion

BUFFER_INSTEAD = "; of a buffer in its place, channels can be removed as well"
MEETS_FIXED = "meets an axis whose size no parameter decides, such as one of the input"


class Field:
    """Labels that lie on a tensor: an integer array that broadcasts to its shape. Immutable.

    Attributes:
        labels: as many axes as the tensor, of full size where the label depends on that axis and of size 1 elsewhere.
        zero: whether entries of a removed label are exactly 0 when the model runs under masks.
        true: whether they are True instead, as comparisons of 0 with another number may be.
        span: the axes along which the labels differ.
    """

    __slots__ = ("labels", "span", "true", "zero")

    def __init__(self, labels: Labels, zero: bool, true: bool = False) -> None:
        self.labels = labels
        self.zero = zero
        self.true = true
        self.span = tuple([axis for axis, size in enumerate(labels.shape) if size > 1])

    def with_labels(self, labels: Labels) -> Field:
        """Return the same field with other labels."""
        return Field(labels, self.zero, self.true)

    def behind(self, axes: int) -> Field:
        """Return the field of a tensor that has as many axes of size 1 before the others."""
        return self.with_labels(self.labels.reshape((1,) * axes + self.labels.shape)) if axes else self

    def fits(self, shape: Sequence[int]) -> bool:
        """Return whether the labels lie on every position of their axes in a tensor of a shape."""
        whole = self.labels.ndim == len(shape)
        return whole and all(self.labels.shape[axis] == shape[axis] for axis in self.span)


def along(labels: Labels, axis: int, ndim: int) -> Labels:
    """Return a vector of labels shaped to lie on one axis of an `ndim`-dimensional tensor."""
    shape = [1] * ndim
    shape[axis] = labels.size
    return labels.reshape(shape)


def apart(fields: Iterable[Field]) -> tuple[tuple[Labels, ...], set[int]]:
    """Return the flat labels of the fields of one tensor that share no axis with an earlier one, and their axes."""
    covered: set[int] = set()
    factors = []
    for field in fields:
        if not covered & set(field.span):
            covered |= set(field.span)
            factors.append(field.labels.reshape(-1))
    return tuple(factors), covered


def rows_along(labels: Labels, axis: int) -> Labels:
    """Return the labels with a row for each position of an axis, (size, n)."""
    return np.moveaxis(labels, axis, 0).reshape(labels.shape[axis], -1)


def collapse(labels: Labels) -> Labels:
    """Reduce every axis along which the labels are constant to size 1."""
    for axis, size in enumerate(labels.shape):
        if size > 1:
            first = np.take(labels, [0], axis=axis)
            if (labels == first).all():
                labels = first
    return labels


@dataclass(frozen=True, eq=False)
class MacTerm:
    """Multiply-accumulates of one operator for one sample: `constant` times the kept labels of every factor."""

    module: str
    operator: str
    constant: float
    factors: tuple[Labels, ...]


@dataclass(frozen=True, eq=False)
class WidthMultiple:
    """A width that is needed in multiples of a number, as by kernels that load 16 bytes at once, and a least one."""

    labels: Labels
    number: int
    least: int = 1


Shape = tuple[int, ...]
Operand = tuple[Shape, Sequence[Field]]
Fields = set[Field]


class LabelFlow:
    """The state of one trace, and the operations that rules share.

    Fields, and what waits for a reader of a tensor, are kept on the tensors themselves, as long as these live.
    """

    kept_as = "_prunekit_fields"  # the attribute in which tensors keep fields; others begin with its name

    def __init__(self, model: nn.Module | None = None) -> None:
        self.model = model  # with the sizes that its modules remember
        self.owner = object()  # marks the fields of this trace
        self.union = LabelUnion()
        self.first_made: int | None = None  # labels from here on are of tensors that the forward pass made
        self._any_size: set[int] = set()  # the first labels of axes on whose size Python alone decides
        self._copies: list[int] = []  # ranges of labels of copies: first, end, first, end, ...
        self._repeated: list[Repeated] = []  # what each of these ranges was made of
        self.locks: list[LockRecord] = []
        self.constraints: list[Constraint] = []  # are solved once the trace is complete
        self.statistics: dict[str, list[LockRecord]] = {}  # by path, reductions in modules that may be norms
        self.macs: list[MacTerm] = []
        self.multiples: list[WidthMultiple] = []
        self.count_macs = True
        self.batch = 1  # samples in the example
        self.substituted: set[str] = set()  # paths of modules whose equivalents run in their place
        self.interchangeable: dict[str, Positions] = {}  # by path, positions that operators inside do not lock
        self.running: Callable[[], Iterable[str]] = tuple  # returns the paths of all modules that run now
        # returns whether an axis of a tensor comes from the inputs of the model, or may
        self.of_input: Callable[[torch.Tensor, int], bool] = lambda tensor, axis: True
        self.expression: Expression | None = None  # runs now, and its tensors may be taken at stated positions
        # labels of axes of parameters that are divided by, or whose slices are by their own norm: they must not be zero
        # where a channel is removed, and need not be, because a factor of the result is
        self.divided: list[Labels] = []
        # labels and sizes of tensors that are divided by, and are zero where a channel is removed
        self.divisors: list[tuple[Labels, int]] = []
        self.parted: dict[Field, list[Field]] = {}  # by a field that a norm read, the fields as which it did
        self.module, self.operator = "", ""  # run now
        self.call: ModuleCall | None = None  # the call of the module in which the operator runs

    def end_run(self) -> None:
        """Drop the functions that hold the tensors of a run."""
        self.running, self.of_input = tuple, lambda tensor, axis: True

    def fields(self, tensor: Any) -> tuple[Field, ...]:
        """Return the fields of a tensor that this trace set; none for anything but a tensor."""
        owner, found = getattr(tensor, self.kept_as, (None, ()))
        return found if owner is self.owner else ()

    def set(self, tensor: torch.Tensor, fields: Iterable[Field]) -> None:
        """Set the fields of a tensor, without those that lie on no axis."""
        setattr(tensor, self.kept_as, (self.owner, tuple([field for field in fields if field.labels.size > 1])))

    def forget_zeros(self, tensors: Iterable[torch.Tensor], written: Sequence[Labels]) -> None:
        """Take back the promise of zeros on tensors that share their memory with one where some labels lost theirs."""
        roots = self.union.find(np.concatenate([labels.reshape(-1) for labels in written]))
        for tensor in tensors:
            fields = self.fields(tensor)
            if any(field.zero for field in fields):
                self.set(tensor, [
                    Field(field.labels, field.zero and not np.isin(self.union.find(field.labels), roots).any())
                    for field in fields
                ])  # fmt: skip

    def lock(self, fields: Iterable[Field | Labels | None], reason: str) -> None:
        """Lock every label of some fields, with the reason and the running operator."""
        for field in fields:
            labels = field.labels if isinstance(field, Field) else field
            if labels is not None and labels.size and not self._interchangeable_here(labels):
                if not self.only_made(labels):
                    self.locks.append(self.record(labels, reason))
                self.union.lock(labels)

    def divide_by(self, tensor: Any) -> None:
        """Take note that an operator is not finite where a tensor is zero."""
        for field in self.fields(tensor):
            if field.zero:
                sizes = [size for size, step in zip(tensor.shape, tensor.stride(), strict=True) if step]  # not expanded
                self.divisors.append((field.labels.reshape(-1), prod(sizes)))

    def _interchangeable_here(self, labels: Labels) -> bool:
        """Return whether labels are of positions that may change places in a module that is running now."""
        if not self.interchangeable:
            return False
        known = (self.interchangeable.get(path) for path in self.running())
        return any(positions is not None and positions.hold(labels) for positions in known)

    def only_made(self, labels: Labels) -> bool:
        """Return whether no parameter has any of these labels: a user need not know of their lock."""
        if self.first_made is None or ((labels < self.first_made) & (labels != LOCKED)).any():  # which most have
            return False
        if not (self._made(labels) | (labels == LOCKED)).all():
            return False
        roots = self.union.find(labels)
        return bool((self._made(roots) | (roots == LOCKED)).all())

    def _made(self, labels: Labels) -> NDArray[np.bool_]:
        """Return which labels are neither of parameters nor of copies of these."""
        made: NDArray[np.bool_] = labels >= (self.first_made or 0)
        if self._copies:
            made &= np.searchsorted(self._copies, labels, side="right") % 2 == 0  # they come in ranges, ascending
        return made

    def is_made(self, field: Field) -> bool:
        """Return whether a field has only labels of tensors that the forward pass made: it may meet any other axis."""
        return self.first_made is not None and bool(self._made(field.labels).all())

    def made_labels(self, tensor: torch.Tensor, axes: Iterable[int], *, zero: bool = False) -> list[Field]:
        """Return new labels for some axes on whose size nothing but Python decides.

        They are coupled with what they meet, and the trial tells whether the size really follows.
        """
        found = []
        for axis in axes:
            if tensor.shape[axis] > 1:
                labels = self.union.new(tensor.shape[axis])
                self._any_size.add(int(labels[0]))
                found.append(Field(along(labels, axis, tensor.dim()), zero))
        return found

    def repeated(self, field: Field, repeats: Field) -> Field:
        """Return new labels for the copies of a field on an axis that was merged with the repeated one.

        Copies are removed with their source, or the same copies of every source: these are not zero then.
        """
        source, number = field.labels.reshape(-1), np.broadcast_to(repeats.labels, field.labels.shape).reshape(-1)
        _, first, index = np.unique(source * self.union.size + number, return_index=True, return_inverse=True)
        copies = self.union.new(first.size)
        self._copies += [int(copies[0]), int(copies[-1]) + 1]
        self._repeated.append(Repeated(source[first], number[first], copies))
        self.constraints.append(self._repeated[-1])
        return Field(copies[index].reshape(field.labels.shape), zero=False)

    def unrepeated(self, field: Field) -> list[Field]:
        """Return what a field of copies was made of where the repetitions have an axis of their own; else the field."""
        place = bisect_right(self._copies, int(field.labels.min()))
        if place % 2 == 0 or field.labels.max() >= self._copies[place]:
            return [field]
        made, at = self._repeated[place // 2], field.labels - self._copies[place - 1]
        parts = [field.with_labels(collapse(labels[at])) for labels in (made.source, made.repeats)]
        return [field] if set(parts[0].span) & set(parts[1].span) else parts

    def is_repeated(self, field: Field) -> bool:
        """Return whether a field has the labels that `made_labels` gave it, whatever they are coupled with by now."""
        return int(field.labels.min()) in self._any_size

    def has_any_size(self, field: Field) -> bool:
        """Return whether a field still has the labels that `made_labels` gave it, coupled with no parameter's."""
        return self.is_repeated(field) and self.only_made(field.labels)

    def record(self, labels: Labels, reason: str) -> LockRecord:
        """Return a lock at the running operator."""
        return LockRecord(reason, self.module, self.operator, labels.reshape(-1), call=self.call)

    def lock_if_read(self, tensor: torch.Tensor, labels: Labels, reason: str) -> None:
        """Lock labels once an operator or the model's output reads a tensor: few callers read attention's weights."""
        if self._interchangeable_here(labels):
            return
        setattr(tensor, f"{self.kept_as}_unread", self.record(labels, reason))

    def cross_if_read(self, tensor: torch.Tensor, crossed: Sequence[Crossed]) -> None:
        """Leave constraints once an operator reads a tensor, unless its rule drops the axes that became one."""
        setattr(tensor, f"{self.kept_as}_crossed", (self.owner, crossed))

    def crossed(self, tensor: torch.Tensor) -> Sequence[Crossed]:
        """Return the constraints on a tensor's axes that were made of several labeled ones."""
        owner, crossed = getattr(tensor, f"{self.kept_as}_crossed", (None, ()))
        return crossed if owner is self.owner else ()

    def read(self, tensor: torch.Tensor, *, drops_axes: bool = False) -> None:
        """Take note that an operator or the model's output reads a tensor."""
        if not drops_axes:
            self.constraints.extend(self.crossed(tensor))
        record = getattr(tensor, f"{self.kept_as}_unread", None)
        if record is not None:
            self.union.lock(record.labels)
            self.locks.append(record)

    def take_statistics(self, field: Field, reason: str | None) -> None:
        """Take note that the running module reduces over all of a labeled axis; see `NormFinder` for what follows."""
        if self._interchangeable_here(field.labels):
            return
        taken = self.statistics.setdefault(self.module, [])
        if reason is not None:
            taken.append(self.record(field.labels, reason))

    def state(self, labels: Labels, place: CodePlace, order: Labels, reason: str) -> None:
        """Leave the constraint that labels stay unless the compact model states positions at the running expression."""
        assert self.expression is not None
        record = self.record(labels, reason)
        self.constraints.append(FixedPositions(record, self.expression, place, order))

    def fix(self, labels: Labels | None) -> None:
        """Lock labels that no user expects to prune, such as a kernel's height, without a report."""
        if labels is not None:
            self.union.lock(labels)

    def on_axis(self, tensor: Any, axis: int, reason: str) -> tuple[Labels | None, bool]:
        """Return the labels along one axis as a vector, with their zero flag; lock fields that mix it with others."""
        return self.vector(self.fields(tensor), axis, reason)

    def vector(self, fields: Iterable[Field], axis: int, reason: str) -> tuple[Labels | None, bool]:
        """Return the labels along one axis of some fields, as `on_axis` does of those of a tensor."""
        on_axis = [field for field in fields if axis in field.span]
        found = [field for field in on_axis if field.span == (axis,)]
        for field in on_axis:
            if field not in found:
                self.lock([field], reason)
        if len(found) < 2:
            return (found[0].labels.reshape(-1), found[0].zero) if found else (None, False)
        factors = tuple(field.labels.reshape(-1) for field in found)  # of an axis that was made of several, as heads
        whole = self.union.new(factors[0].size)
        self.constraints.append(Flattened(factors, whole))
        return whole, all(field.zero for field in found)

    def tied_along(self, axes: Collection[int], fields: Iterable[Field], reason: str) -> list[Field]:
        """Lock the fields that lie on no other axes than some that are mixed, and return the others, tied along them.

        What lies on channels and positions, as a linear layer's outputs do that become a map, then loses whole
        channels, where what lies on positions alone cannot lose any.
        """
        every = list(fields)
        mixed = [field for field in every if field.span and set(field.span) <= set(axes)]
        self.lock(mixed, reason)
        return [self.tied(field, axes) for field in every if field not in mixed]

    def tied(self, field: Field, axes: Collection[int]) -> Field:
        """Return a field tied along those of its axes that are among some, if it has others as well."""
        shared = [axis for axis in field.span if axis in axes]
        return field if len(shared) in (0, len(field.span)) else field.with_labels(self.union.tie(field.labels, shared))

    def join(self, left: Labels | None, right: Labels | None, reason: str) -> Labels | None:
        """Merge two label vectors of one axis; lock them if only one side is labeled, or the sizes differ."""
        if left is None or right is None or left.shape != right.shape:
            self.lock([left, right], reason)
            return None
        self.union.merge(left, right)
        return left

    def add_macs(self, constant: float, factors: Iterable[Labels | None]) -> None:
        """Count an operator's multiply-accumulates, given for the whole batch."""
        if self.count_macs:
            labels = tuple(factor for factor in factors if factor is not None)
            self.macs.append(MacTerm(self.module, self.operator, constant / self.batch, labels))

    def pointwise(self, operands: Sequence[Operand], *, product: bool, others_zero: bool = True) -> list[Field]:
        """Return the fields of several operands, of equally many axes, broadcast against each other and merged."""
        shape = np.broadcast_shapes(*[shape for shape, _ in operands])
        done: set[Field] = set()
        for index, (_, fields) in enumerate(operands):
            for field in fields:
                for other in range(len(operands)):
                    if other != index:
                        done |= self._meet(field, operands[index], operands[other], shape, forward=other > index)
        by_span: dict[tuple[int, ...], dict[int, list[Field]]] = {}
        for index, (_, fields) in enumerate(operands):
            for field in (field for field in fields if field not in done):
                by_span.setdefault(field.span, {}).setdefault(index, []).append(field)
        result = []
        for parts in by_span.values():
            most = max(parts.values(), key=len)  # a flattened kernel has several on one axis
            others = [fields[0].zero for fields in parts.values() if fields is not most]
            for field in most:
                zeros, everywhere = [field.zero, *others], len(parts) == len(operands)
                zero = any(zeros) if product else all(zeros) and everywhere and others_zero
                true = everywhere and all(one.true for fields in parts.values() for one in fields)
                result.append(Field(field.labels, zero, true))
        return result

    def _meet(self, field: Field, own: Operand, other: Operand, shape: Shape, *, forward: bool) -> Fields:
        """Merge a field with another operand's, or lock it if that has none; return the fields to be dropped."""
        full = tuple(axis for axis in field.span if other[0][axis] == shape[axis])
        if not full:
            return set()
        overlapping = [match for match in other[1] if set(match.span) & set(full)]
        if not overlapping and len(full) < len(field.span):
            self.union.tie(field.labels, full)
            return set()
        if not overlapping:
            self.lock([field], MEETS_FIXED)
            return {field}
        theirs = [match for match in overlapping if match.span == field.span]
        ours = [one for one in own[1] if one.span == field.span]
        if forward and theirs:
            self._merge_same_span(field, ours, theirs)
        covered = {axis for match in overlapping for axis in match.span} >= set(full)
        nested: set[Field] = set()
        for match in overlapping:  # the wider one decides, else the first operand's, and what is covered is dropped
            wider = set(field.span) > set(match.span)
            if wider and covered:
                matched = any(one.span == match.span for one in own[1])
                self._nest(field, match, matched=matched)
                nested |= set() if matched else {match}
            elif wider or (forward and not set(field.span) <= set(match.span)):
                self.union.merge(field.labels, match.labels)
        return nested

    def _merge_same_span(self, field: Field, ours: Sequence[Field], theirs: Sequence[Field]) -> None:
        """Merge one of our fields with those of the same span; a flattened kernel has several on one axis."""
        if len(theirs) == len(ours) == 1:
            self.union.merge(field.labels, theirs[0].labels)
        elif 1 in (len(theirs), len(ours)):
            whole, factors = (field, theirs) if len(ours) == 1 else (theirs[0], ours)
            if field is ours[0]:
                self.constraints.append(Flattened(tuple([factor.labels for factor in factors]), whole.labels))
        elif not any(self.union.equal(field.labels, match.labels) for match in theirs):
            for match in [theirs[ours.index(field)]] if len(theirs) == len(ours) else theirs:
                self.union.merge(field.labels, match.labels)

    def _nest(self, wide: Field, part: Field, *, matched: bool) -> None:
        others = [axis for axis in wide.span if axis not in part.span]
        shared = wide.labels[tuple(slice(None) if axis in wide.span else 0 for axis in range(wide.labels.ndim))]
        labels = np.moveaxis(shared, [wide.span.index(axis) for axis in others], range(len(others)))
        record = self.record(part.labels, MEETS_FIXED)
        self.constraints.append(Nested(labels.reshape(-1, record.labels.size), record, matched))

    def contract(
        self, left: torch.Tensor, right: torch.Tensor, left_axes: str, right_axes: str, out_axes: str
    ) -> list[Field]:
        """Return the fields of an einsum of two tensors, whose axes are named by letters as in `torch.einsum`."""
        return self.summed([(left, left_axes), (right, right_axes)], out_axes)

    def summed(
        self,
        factors: Iterable[tuple[torch.Tensor | Operand, str]],
        out_axes: str,
        *,
        product: bool = True,
        count: bool = True,
    ) -> list[Field]:
        """Return the fields of tensors that meet in the joint space of their axes and are summed over most of them.

        A tensor may also be given by shape and fields, such as one of a stack.
        """
        factors = list(factors)
        joint = "".join(dict.fromkeys("".join(axes for _, axes in factors)))
        operands = [self._lift(one, axes, joint) for one, axes in factors]
        fields = self.pointwise(operands, product=product)
        if count:
            shape = np.broadcast_shapes(*[shape for shape, _ in operands])
            counted, covered = apart(fields)
            self.add_macs(float(np.prod([size for axis, size in enumerate(shape) if axis not in covered])), counted)
        kept = []
        for field in fields:
            contracted = tuple(axis for axis in field.span if joint[axis] not in out_axes)
            if contracted == field.span and contracted and not field.zero:
                self.lock([field], NOT_ZERO)
            if contracted == field.span:
                continue
            batched = all(joint[axis] in axes for axis in field.span for _, axes in factors)
            labels = self._summed(field, contracted) if contracted or batched else field.labels
            order = [joint.index(letter) for letter in out_axes]
            rest = [axis for axis in range(len(joint)) if axis not in order]
            kept.append(Field(np.transpose(labels, order + rest).reshape([labels.shape[a] for a in order]), field.zero))
        return kept

    def _summed(self, field: Field, axes: Sequence[int]) -> Labels:
        """Return labels of the sum of a field over some of its axes, which are reduced to size 1."""
        first = field.labels[tuple(slice(1) if axis in axes else slice(None) for axis in range(field.labels.ndim))]
        values, index = np.unique(first, return_inverse=True)
        part = self.union.new(values.size)[index].reshape(first.shape)
        labels = np.moveaxis(field.labels, axes, range(len(axes))).reshape(-1, part.size)
        self.constraints.append(Contracted(labels, part.reshape(-1), field.zero, self.module))
        return part

    def _lift(self, operand: torch.Tensor | Operand, axes: str, joint: str) -> Operand:
        """Return an operand with the axes of the joint space, of size 1 where it has none."""
        shape, fields = operand if isinstance(operand, tuple) else (tuple(operand.shape), self.fields(operand))
        order = [axes.index(letter) for letter in joint if letter in axes]
        new = [index for index, letter in enumerate(joint) if letter not in axes]
        lifted = [Field(np.expand_dims(np.transpose(field.labels, order), new), field.zero) for field in fields]
        return tuple(shape[axes.index(letter)] if letter in axes else 1 for letter in joint), lifted


class MadeAxes(LabelFlow):
    """A flow of labels of its own, on tensors that the model's code makes, such as the channels of a time embedding.

    An axis of an input has the size that the input has. One that comes from a range of numbers, with which the input is
    only multiplied, does not: of that axis the compact model may take some positions. Labels say which is which, and
    the rules that move the labels of parameters move these as well.
    """

    kept_as = "_prunekit_made"

    def add(self, tensor: torch.Tensor) -> None:
        """Give every axis of a tensor labels."""
        shape = enumerate(tensor.shape)
        self.set(tensor, [Field(along(self.union.new(n), i, tensor.dim()), zero=False) for i, n in shape if n > 1])

    def made(self, tensor: torch.Tensor, axis: int) -> bool:
        """Return whether all positions of an axis were made by code."""
        return any(axis in field.span and bool(field.labels.all()) for field in self.fields(tensor))
