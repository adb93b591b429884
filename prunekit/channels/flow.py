"""How labels flow: what happens to fields that meet, element by element or along an axis that is summed over."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from prunekit.channels.constraints import NOT_ZERO, Contracted, Flattened, Nested
from prunekit.channels.labels import Field, Labels, apart
from prunekit.channels.state import FlowState

Shape = tuple[int, ...]
Operand = tuple[Shape, Sequence[Field]]
Fields = set[Field]
MEETS_FIXED = "meets an axis whose size no parameter decides, such as one of the input"


class Flow(FlowState):
    """Handed to every rule: the state of one trace, and what several rules do with it."""

    def pointwise(self, operands: Sequence[Operand], *, product: bool, others_zero: bool = True) -> list[Field]:
        """Broadcasts the fields of several operands against each other and merges them elementwise.

        Args:
            operands: shape and fields of each tensor operand, all with the same number of axes.
            product: whether a zero in one operand makes the result zero (multiplication), or only zeros in all.
            others_zero: False when something that is not a tensor (a number) is added as well.
        """
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
                zeros = [field.zero, *others]
                zero = any(zeros) if product else all(zeros) and len(parts) == len(operands) and others_zero
                result.append(Field(field.labels, zero))
        return result

    def _meet(self, field: Field, own: Operand, other: Operand, shape: Shape, *, forward: bool) -> Fields:
        """Merges a field with those of another operand, or locks it where that has none.

        Returns fields that say nothing more: locked ones, and those of the other that this one says all about.
        """
        full = tuple(axis for axis in field.span if other[0][axis] == shape[axis])
        if not full:
            return set()
        overlapping = [match for match in other[1] if set(match.span) & set(full)]
        if overlapping:
            return self._match(field, own, overlapping, full, forward=forward)
        if len(full) < len(field.span):
            self.union.tie(field.labels, full)
        else:
            self.lock([field], MEETS_FIXED)
            return {field}
        return set()

    def _match(
        self, field: Field, own: Operand, overlapping: Sequence[Field], full: Sequence[int], *, forward: bool
    ) -> Fields:
        """Of two fields the wider one decides, whichever operand it is on; else the first operand's."""
        alike = [match for match in overlapping if match.span == field.span]
        beside = [one for one in own[1] if one.span == field.span]
        if forward and alike:
            self._merge_alike(field, beside, alike)
        covered = {axis for match in overlapping for axis in match.span} >= set(full)
        nested: set[Field] = set()
        for match in overlapping:
            wider = set(field.span) > set(match.span)
            if wider and covered:
                matched = any(beside.span == match.span for beside in own[1])
                self._nest(field, match, matched=matched)
                nested |= set() if matched else {match}
            elif wider or (forward and not set(field.span) <= set(match.span)):
                self.union.merge(field.labels, match.labels)
        return nested

    def _merge_alike(self, field: Field, beside: Sequence[Field], alike: Sequence[Field]) -> None:
        """Merges a field with those of the same span; a flattened kernel has several: itself and those `beside` it."""
        if len(alike) == len(beside) == 1:
            self.union.merge(field.labels, alike[0].labels)
        elif 1 in (len(alike), len(beside)):
            whole, factors = (field, alike) if len(beside) == 1 else (alike[0], beside)
            if field is beside[0]:
                self.constraints.append(Flattened(tuple([factor.labels for factor in factors]), whole.labels))
        elif not any(self.union.equal(field.labels, match.labels) for match in alike):
            for match in [alike[beside.index(field)]] if len(alike) == len(beside) else alike:
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
        """An einsum of two tensors: a product in the joint space, then contracted axes are dropped or tied.

        Axes are named by letters as in `torch.einsum`; returns the fields of the result.
        """
        joint = "".join(dict.fromkeys(left_axes + right_axes))
        operands = [self._lift(tensor, axes, joint) for tensor, axes in ((left, left_axes), (right, right_axes))]
        fields = self.pointwise(operands, product=True)
        self._count_contraction(operands, fields, joint)
        kept = []
        for field in fields:
            contracted = tuple(axis for axis in field.span if joint[axis] not in out_axes)
            if contracted == field.span and contracted and not field.zero:
                self.lock([field], NOT_ZERO)
            if contracted == field.span:
                continue
            batched = all(joint[axis] in left_axes and joint[axis] in right_axes for axis in field.span)
            labels = self._summed(field, contracted) if contracted or batched else field.labels
            order = [joint.index(letter) for letter in out_axes]
            rest = [axis for axis in range(len(joint)) if axis not in order]
            kept.append(Field(np.transpose(labels, order + rest).reshape([labels.shape[a] for a in order]), field.zero))
        return kept

    def _summed(self, field: Field, axes: Sequence[int]) -> Labels:
        """Labels of what is left of a field summed over some of its axes, with those reduced to size 1.

        Heads whose positions hang together already are summed over no axis that the field has.
        """
        first = field.labels[tuple(slice(1) if axis in axes else slice(None) for axis in range(field.labels.ndim))]
        values, index = np.unique(first, return_inverse=True)
        part = self.union.new(values.size)[index].reshape(first.shape)
        labels = np.moveaxis(field.labels, axes, range(len(axes))).reshape(-1, part.size)
        self.constraints.append(Contracted(labels, part.reshape(-1), field.zero, self.module))
        return part

    def _lift(self, tensor: torch.Tensor, axes: str, joint: str) -> tuple[Shape, list[Field]]:
        def lifted(shape: Sequence[int]) -> list[int]:
            return [shape[axes.index(letter)] if letter in axes else 1 for letter in joint]

        order = [axes.index(letter) for letter in joint if letter in axes]
        fields = [
            Field(np.transpose(field.labels, order).reshape(lifted(field.labels.shape)), field.zero)
            for field in self.fields(tensor)
        ]
        return tuple(lifted(tensor.shape)), fields

    def _count_contraction(self, operands: Sequence[Operand], fields: Sequence[Field], joint: str) -> None:
        shape = np.broadcast_shapes(*[shape for shape, _ in operands])
        factors, covered = apart(fields)
        constant = float(np.prod([size for axis, size in enumerate(shape) if axis not in covered]))
        self.add_macs(constant, factors)
