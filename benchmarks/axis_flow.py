"""Which axis of a weight meets which: one forward pass, in which the axes of parameters are followed by themselves.

It knows nothing of labels, locks or constraints, so that what prunekit cannot prune stays visible. Every axis of every
parameter is an id. Axes of activations have the ids of the weights that make them; those of the model's inputs have
`INPUT`, such as positions, pixels and the channels of an image, and those that the model's Python makes up of numbers
alone have `CONSTANT`. Ids that one and the same size decides are one class (union-find): both sides of a sum, the axis
that a layer reads and the one that made it. What an unknown operator returns has axes without ids.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from prunekit.channels.tracing.operator_mode import OperatorMode
from prunekit.utils.tensors import gather

INPUT, CONSTANT = 0, 1
Ids = frozenset[int]
Axis = tuple[tuple[int, Ids], ...]
"""An axis: parts of it one after the other, each with its size and the ids of what made it."""
UNKNOWN: Ids = frozenset()


@dataclass(frozen=True)
class Axes:
    """What is known of a tensor.

    Attributes:
        axes: its axes.
        data: whether any input of the model is in its values.
        picked: ids of axes that it has no more, as positions of them were picked one by one, and no product came since:
            of scores of one class, those of the axis of classes.
    """

    axes: tuple[Axis, ...]
    data: bool
    picked: Ids = UNKNOWN


@dataclass(frozen=True)
class Reading:
    """An axis of a weight that a product sums over, and the axis of its partner."""

    ids: Ids
    partner: Axis


@dataclass(eq=False)
class Found:
    """What a forward pass showed.

    Attributes:
        names: parameter and axis of each id.
        root: the class of each id, to be followed up to one that is its own.
        made: ids on an axis that a product with a weight makes.
        read: axes of weights that products sum over.
        parts: by the ids that an axis has after it was split, the id that it had before.
        tables: parameters of which rows are looked up by their numbers in an embedding.
        used: parameters that any operator reads.
    """

    names: dict[int, tuple[str, int]] = field(default_factory=dict)
    root: dict[int, int] = field(default_factory=lambda: {INPUT: INPUT, CONSTANT: CONSTANT})
    made: list[Ids] = field(default_factory=list)
    read: list[Reading] = field(default_factory=list)
    parts: dict[tuple[int, ...], int] = field(default_factory=dict)
    tables: set[str] = field(default_factory=set)
    used: set[str] = field(default_factory=set)

    def find(self, one: int) -> int:
        """The class of an id."""
        while self.root[one] != one:
            self.root[one] = one = self.root[self.root[one]]
        return one

    def union(self, left: int, right: int) -> None:
        """Makes the classes of two ids one."""
        first, second = sorted((self.find(left), self.find(right)))
        self.root[second] = first

    def new(self, name: str, index: int) -> int:
        """A new id for an axis of a parameter."""
        number = len(self.root)
        self.root[number], self.names[number] = number, (name, index)
        return number

    def pinned(self, roots: Ids) -> Ids:
        """All classes that cannot change where given ones cannot: parts of an axis with all of it, and it with all."""
        known, before = set(roots), 0
        while len(known) != before:
            before = len(known)
            for parts, whole_axis in self.parts.items():
                if self.find(whole_axis) in known:
                    known |= self.roots(parts)
                elif self.roots(parts) <= known:
                    known.add(self.find(whole_axis))
        return frozenset(known)

    def roots(self, ids: Iterable[int]) -> Ids:
        """The classes of some ids."""
        return frozenset(map(self.find, ids))


def whole(size: int, ids: Iterable[int]) -> Axis:
    """An axis in one part; one of size 1 is no width."""
    return ((size, frozenset((CONSTANT,)) if size == 1 else frozenset(ids)),)


def size_of(axis: Axis) -> int:
    """The size of an axis."""
    return sum(size for size, _ in axis)


def ids_of(*axes: Axis) -> Ids:
    """All ids on some axes; `CONSTANT` only where there is nothing else."""
    parts = [ids for axis in axes for _, ids in axis]
    found = frozenset().union(*parts)
    if UNKNOWN in parts and found <= {CONSTANT}:
        return UNKNOWN
    return found - {CONSTANT} or found


def part_of(axis: Axis, start: int, size: int) -> Axis:
    """Some positions of an axis one after the other."""
    found, at = [], 0
    for length, ids in axis:
        low, high = max(at, start), min(at + length, start + size)
        if low < high:
            found.append((high - low, ids))
        at += length
    return tuple(found) if size > 1 else whole(size, ())


Result = list[tuple[Axis, ...]] | None
"""The axes of each result; None: what `default` says."""
Rule = Callable[["AxisFlow", Any, Any, dict[str, Any], list[Tensor]], Result]
PRODUCTS = frozenset({"mm", "bmm", "mv", "dot", "addmm", "baddbmm", "addmv", "_grouped_mm", "convolution",
                      "deform_conv2d"})  # fmt: skip
PICKS = frozenset({"select", "unbind", "index", "index_select", "gather", "max", "min", "argmax", "argmin", "amax",
                   "amin", "topk"})  # fmt: skip


class AxisFlow(OperatorMode):
    """A dispatch mode that follows axes through every operator.

    Args:
        model: that will run.
        inputs: that it will be called with.
        rules: by the name of an operator, without overload, what the axes of its results are.
    """

    def __init__(self, model: nn.Module, inputs: Any, rules: Mapping[str, Rule]) -> None:
        super().__init__()
        self.rules = rules
        self.found = Found()
        self.known: Any = WeakIdKeyDictionary()
        self.owned: Any = WeakIdKeyDictionary()
        self.written: set[int] = set()
        self._splits: dict[tuple[int, ...], tuple[int, ...]] = {}
        self._joined: dict[Ids, Ids] = {}
        for tensor in gather(inputs):
            self.known[tensor] = Axes(tuple(whole(size, (INPUT,)) for size in tensor.shape), data=True)
        for name, parameter in model.named_parameters():
            self.owned[parameter] = name
            self.known[parameter] = Axes(
                tuple(self._new(name, i, n) for i, n in enumerate(parameter.shape)), data=False
            )

    def _new(self, name: str, index: int, size: int) -> Axis:
        return whole(size, (self.found.new(name, index),))

    def split(self, axis: Axis, sizes: Sequence[int]) -> list[Axis]:
        """The axes that one is split into, such as heads and the positions in them: each is an axis of its own."""
        ids = ids_of(axis)
        if len(axis) > 1 or len(ids) != 1 or ids <= {INPUT, CONSTANT}:
            return [whole(size, ids) for size in sizes]
        key = (*ids, *sizes)
        if key not in self._splits:
            self._splits[key] = tuple(self.found.new(*self.found.names[next(iter(ids))]) for _ in sizes)
            self.found.parts[self._splits[key]] = next(iter(ids))
            self._joined[frozenset(self._splits[key])] = ids
        return [whole(size, (part,)) for size, part in zip(sizes, self._splits[key], strict=True)]

    def joined(self, axes: Sequence[Axis]) -> Ids:
        """The ids of an axis that several become: those that it had before it was split, if these are all of it."""
        ids = ids_of(*axes)
        return self._joined.get(ids, ids)

    def of(self, tensor: Tensor) -> Axes:
        """What is known of a tensor; one that no operator made is made of numbers alone."""
        known: Axes = self.known.get(tensor) or Axes(tuple(whole(size, (CONSTANT,)) for size in tensor.shape), False)
        if tensor.layout != torch.strided or tensor.untyped_storage().data_ptr() not in self.written:
            return known
        axes = (((n, UNKNOWN if ids <= {CONSTANT} and n > 1 else ids) for n, ids in axis) for axis in known.axes)
        return Axes(tuple(map(tuple, axes)), True, known.picked)  # another view of its memory was written to

    def axes(self, tensor: Tensor) -> tuple[Axis, ...]:
        """The axes of a tensor."""
        return self.of(tensor).axes

    def operator(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Runs an operator, and says what the axes of its results are."""
        out = func(*args, **kwargs)
        operands, name = gather((args, kwargs)), str(func._schema.name).partition("::")[2]
        self.found.used.update(self.owned[tensor] for tensor in operands if tensor in self.owned)
        outs = gather(out)
        storages = {tensor.untyped_storage().data_ptr() for tensor in operands if tensor.layout == torch.strided}
        before = [self.of(tensor) for tensor in operands]
        rule = self.rules.get(name)
        results = None if rule is None else rule(self, func, args, kwargs, outs)
        for index, tensor in enumerate(outs):
            axes = results[index] if results and index < len(results) else default(self, operands, tensor)
            if tuple(map(size_of, axes)) != tuple(tensor.shape):
                axes = tuple(whole(size, UNKNOWN) for size in tensor.shape)
            self._written(tensor, storages, operands)
            if tensor not in self.owned:
                self.known[tensor] = Axes(axes, _has_data(name, before), _picked(name, before, axes))
        return out

    def _written(self, tensor: Tensor, storages: set[int], operands: list[Tensor]) -> None:
        if tensor.layout == torch.strided:
            here = tensor.untyped_storage().data_ptr()
            if here not in storages:  # memory of its own, maybe where a tensor was before
                self.written.discard(here)
            elif any(tensor is operand for operand in operands):  # in place
                self.written.add(here)

    def combine(self, left: Axis, right: Axis) -> Axis:
        """The axis of what is computed element by element: its size is that of either."""
        if size_of(left) != size_of(right):
            return left if size_of(left) > 1 else right
        for one, other in ((left, right), (right, left)):
            if len(one) == 1 < len(other) and self.found.roots(ids_of(other)) == {INPUT}:
                return self.combine(one, whole(size_of(other), (INPUT,)))  # such as a token beside patches
        parts = []
        for (size, a, a_whole), (_, b, b_whole) in zip(*_cut_alike(left, right), strict=True):
            parts.append((size, self._same_size(a, b, a_whole, b_whole)))
        return tuple(parts)

    def _same_size(self, a: Ids, b: Ids, a_whole: bool, b_whole: bool) -> Ids:
        """The ids of two parts of equal size, of which one cannot shrink without the other."""
        if a <= {CONSTANT} or b <= {CONSTANT}:
            return max(a, b, key=lambda ids: (not ids <= {CONSTANT}, ids == UNKNOWN))
        fixed = [self.found.roots(ids) == {INPUT} for ids in (a, b)]
        if len(a) == len(b) == 1 and (not any(fixed) or (a_whole and b_whole)):
            self.found.union(*a, *b)
            return a
        if any(fixed):
            return frozenset((INPUT,))
        return a if len(a) <= len(b) else b

    def product(
        self, left: Tensor, right: Tensor, pairs: Sequence[tuple[int, int]], made: Sequence[Sequence[int]]
    ) -> None:
        """Notes a product: pairs of axes that are summed over, and those of each side that are left in the result."""
        both = (self.of(left), self.of(right))
        for i, j in pairs:
            one, other = both[0].axes[i], both[1].axes[j]
            for mine, partner, known in ((one, other, both[0]), (other, one, both[1])):
                if not known.data:
                    self.found.read.append(Reading(ids_of(mine), partner))
            if len(one) == len(other) == 1:
                self.combine(one, other)
        for known, axes in zip(both, made, strict=True):
            if not known.data:
                self.found.made += [ids_of(known.axes[axis]) for axis in axes]


def _has_data(name: str, operands: list[Axes]) -> bool:
    """Whether values depend on the input; matrices that it picks from a stack of weights do not."""
    if name in ("index", "index_select") and len(operands[0].axes) > 2:
        return operands[0].data
    return any(operand.data for operand in operands)


def _picked(name: str, operands: list[Axes], axes: tuple[Axis, ...]) -> Ids:
    """The ids of axes of which a result has single positions."""
    if name in PRODUCTS:
        return UNKNOWN
    earlier = frozenset[int]().union(*(operand.picked for operand in operands))
    if name not in PICKS:
        return earlier
    gone = ids_of(*(axis for operand in operands for axis in operand.axes)) - ids_of(*axes)
    return earlier | (gone - {INPUT, CONSTANT})


def _cut_alike(left: Axis, right: Axis) -> tuple[list[tuple[int, Ids, bool]], list[tuple[int, Ids, bool]]]:
    """The parts of two axes of equal size, cut where either is cut, each with whether it is a whole part."""
    ends = sorted({end for axis in (left, right) for end in _ends(axis)})
    return _cut(left, ends), _cut(right, ends)


def _ends(axis: Axis) -> Iterator[int]:
    at = 0
    for size, _ in axis:
        at += size
        yield at


def _cut(axis: Axis, ends: list[int]) -> list[tuple[int, Ids, bool]]:
    found, start, own = [], 0, set(_ends(axis)) | {0}
    for end in ends:
        (only,) = [ids for last, (_, ids) in zip(_ends(axis), axis, strict=True) if last >= end][:1]
        uncut = start in own and end in own and not any(start < one < end for one in own)
        found.append((end - start, only, uncut))
        start = end
    return found


def default(flow: AxisFlow, operands: list[Tensor], out: Tensor) -> tuple[Axis, ...]:
    """Element by element where all operands fit the result; else axis by axis of the first that has as many."""
    shape = tuple(out.shape)
    if all(_fits(tuple(tensor.shape), shape) for tensor in operands):
        return elementwise(flow, operands, out)
    first = next((tensor for tensor in operands if tensor.dim() == out.dim()), None)
    if first is None:
        return tuple(whole(size, UNKNOWN) for size in shape)
    return tuple(resized(axis, size) for axis, size in zip(flow.axes(first), shape, strict=True))


def resized(axis: Axis, size: int) -> Axis:
    """An axis of another size that the same things decide on, as pixels behind a stride."""
    return axis if size_of(axis) == size else whole(size, ids_of(axis))


def _fits(shape: tuple[int, ...], to: tuple[int, ...]) -> bool:
    pairs = zip(reversed(shape), reversed(to), strict=False)
    return len(shape) <= len(to) and all(a in (1, b) for a, b in pairs)


def elementwise(flow: AxisFlow, operands: list[Tensor], out: Tensor) -> tuple[Axis, ...]:
    """Operands that broadcast to the result."""
    axes = [whole(size, (CONSTANT,)) for size in out.shape]
    for tensor in operands:
        for axis, known in zip(range(-tensor.dim(), 0), flow.axes(tensor), strict=True):
            if size_of(known) == out.shape[axis]:
                axes[axis] = flow.combine(known, axes[axis])
    return tuple(axes)
