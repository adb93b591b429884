"""What halving every width by hand would leave of a model's inner weights: the measure of the coverage tables.

**Inner weights** are the parameters that an example runs, but for

- embeddings: tables whose rows are looked up by number, even where they are layers of class scores as well, and tables
  of positions: parameters of two or more axes that no product reads, and of which one axis has the input's positions;
- layers that make what the user reads, such as class scores, boxes or the pixels of an image: parameters whose product
  or sum has an axis that an output has, or of which an output has single positions, picked by their numbers. Which
  outputs are read is up to the case; state is not, which a model returns under the name of one of its own arguments
  that the example leaves out, as a cache of keys and values.

**A width** is an axis of a weight as a product has it: what a matrix product or a convolution sums over, and what it
makes. Axes of a parameter that are one axis of the product, such as heads and the positions in them, are one width;
axes that are no axis of the product, such as pixels of a kernel or the number of experts in a stack, are none. A
convolution in at least as many groups as there are channels in each, such as a depthwise one, loses whole groups, and
has one width alone. Parameters that are in no product, such as biases, scales and norms, have the widths of what they
are added to or multiplied with.

**Halved** leaves ceil(n / 2) of n: of every width, but for those that an expert cannot change: what reads the channels
of the model's input, or numbers that no parameter decides, as the sines of a time step; and what positions or pixels of
the input decide, as the layers of an MLP-Mixer along them. An axis that reads several things one after the other keeps
of each what is left of it. Where two axes have to be of one size, because they are added or because one reads the
other, none can change where one cannot.

The axes are followed by `axis_flow`, which knows nothing of prunekit's labels and locks: what prunekit cannot prune
counts as halved here, and so does what this pass loses track of.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import ceil, prod
from typing import Any

import torch
from axis_flow import CONSTANT, INPUT, Axis, AxisFlow, Found, Ids, size_of
from axis_rules import RULES
from torch import nn

from prunekit.channels.tracing.execution import mode_for_trace, plain_attention
from prunekit.utils.inputs import arguments_by_name, as_example, call
from prunekit.utils.outputs import ReadOutputs
from prunekit.utils.tensors import gather


@dataclass(frozen=True)
class Least:
    """What halving every width of a model leaves.

    Attributes:
        entries: how many numbers the inner weights have.
        widths: how many of these halving leaves of each, by its name.
        alike: the number of a class for each axis of each parameter: those of one class have one size.
    """

    entries: int
    widths: Mapping[str, int]
    alike: Mapping[tuple[str, int], int]

    @property
    def left(self) -> int:
        """How many numbers halving leaves."""
        return sum(self.widths.values())

    @property
    def share(self) -> float:
        """The share that is left."""
        return self.left / max(self.entries, 1)


def least_left(model: nn.Module, given: Any, outputs: Any = None) -> Least:
    """What halving every width of a model by hand would leave of its inner weights.

    Args:
        model: runs in eval mode, and in train mode where parameters are left over.
        given: an example, as users give it.
        outputs: which outputs are read, as `prunekit.prune` takes it.
    """
    example = as_example(model, given)
    flow = AxisFlow(model, example, RULES)
    seen = _read_in(flow, model, example, outputs, training=False)
    if len(flow.found.used) < sum(1 for _ in model.parameters()):  # auxiliary heads
        with suppress(Exception):  # of inputs that train mode does not take
            seen |= _read_in(flow, model, example, outputs, training=True)
    return _counted(dict(model.named_parameters()), _Widths(flow.found, flow.found.roots(seen) - {INPUT, CONSTANT}))


def _read_in(flow: AxisFlow, model: nn.Module, example: tuple[Any, ...], outputs: Any, *, training: bool) -> Ids:
    """The ids of what the user reads of the outputs of one forward pass."""
    with torch.no_grad(), mode_for_trace(model, training), plain_attention(), flow:
        output = call(model, example)
    tensors = [flow.of(tensor) for tensor in gather(read_by_user(model, example, output, outputs))]
    parts = [ids for tensor in tensors for axis in tensor.axes for _, ids in axis]
    return frozenset[int]().union(*parts, *(tensor.picked for tensor in tensors))


def read_by_user(model: nn.Module, example: tuple[Any, ...], output: Any, outputs: Any) -> Any:
    """The outputs that are read: those asked for, else all but state, which has the name of an argument left out."""
    if outputs is not None or not isinstance(output, Mapping):
        return ReadOutputs.given(outputs).of(output)
    given = arguments_by_name(model, example)
    left_out = {name for name in inspect.signature(model.forward).parameters if given.get(name) is None}
    return {name: value for name, value in output.items() if name not in left_out}


class _Widths:
    """The widths of parameters: which axes are one width, and what is left of each."""

    def __init__(self, found: Found, seen: Ids) -> None:
        self.found = found
        self.seen = seen
        self.pinned = found.pinned(seen | {INPUT, CONSTANT})
        self.split_from = {found.find(part): found.find(one) for parts, one in found.parts.items() for part in parts}
        self.together: dict[str, list[set[int]]] = defaultdict(list)
        self.shares: dict[tuple[str, int], list[float]] = defaultdict(list)
        self.ids_of: dict[tuple[str, int], list[int]] = defaultdict(list)
        for one, place in found.names.items():  # first the axis itself, then what it is split into
            self.ids_of[place].append(one)
        self.made = {found.names[one] for ids in found.made for one in ids - {INPUT, CONSTANT}}
        for ids in found.made:
            self._note(ids)
        for reading in found.read:
            self._note(reading.ids, self._share(reading.partner))

    def _note(self, ids: Ids, share: float | None = None) -> None:
        own: dict[str, set[int]] = defaultdict(set)
        for one in ids - {INPUT, CONSTANT}:
            name, axis = self.found.names[one]
            own[name].add(axis)
            self.shares[name, axis] += [] if share is None else [share]
        for name, axes in own.items():
            overlapping = [group for group in self.together[name] if group & axes]
            apart = [group for group in self.together[name] if not group & axes]
            self.together[name] = [*apart, axes.union(*overlapping)]

    def _share(self, axis: Axis) -> float:
        """The share of an axis that is left when every part of it that can change is halved."""
        left = sum(n if ids and self.found.roots(ids) <= self.pinned else ceil(n / 2) for n, ids in axis)
        return left / size_of(axis)

    def is_read(self, name: str, axes: Iterable[int]) -> bool:
        """Whether it makes what the user reads: an axis that it makes is of the size of an output's."""
        makes = [axis for axis in axes if name not in self.together or (name, axis) in self.made]
        return any(self.found.find(one) in self.seen for axis in makes for one in self.ids_of[name, axis])

    def is_table(self, name: str, axes: Sequence[int]) -> bool:
        """Whether rows are looked up, or belong to positions of the input."""
        positions = any(self._root(name, axis) == INPUT for axis in axes)
        return name in self.found.tables or (name not in self.together and len(axes) > 1 and positions)

    def _root(self, name: str, axis: int) -> int:
        return self.found.find(self.ids_of[name, axis][0])

    def left(self, name: str, shape: torch.Size) -> int:
        """How many entries of a parameter halving leaves."""
        groups = self.together.get(name) or self._apart(name, len(shape))
        other = prod(size for axis, size in enumerate(shape) if not any(axis in group for group in groups))
        return other * prod(self._of_width(name, group, prod(shape[axis] for axis in group)) for group in groups)

    def _apart(self, name: str, axes: int) -> list[set[int]]:
        """The widths of a parameter that is in no product: its axes, those in one that another axis was split into."""
        groups: dict[int, set[int]] = {}
        for axis in range(axes):
            root = self._root(name, axis)
            groups.setdefault(self.split_from.get(root, root), set()).add(axis)
        return list(groups.values())

    def _of_width(self, name: str, group: set[int], size: int) -> int:
        if any(self._root(name, axis) in self.pinned for axis in group):
            return size
        shares = [share for axis in group for share in self.shares[name, axis]]
        return ceil(size * max(shares, default=0.5) - 1e-9)


def _counted(parameters: Mapping[str, nn.Parameter], widths: _Widths) -> Least:
    inner = []
    for name, parameter in parameters.items():
        axes = [axis for axis, size in enumerate(parameter.shape) if size > 1]
        if name in widths.found.used and not widths.is_table(name, axes) and not widths.is_read(name, axes):
            inner.append(name)
    entries = sum(parameters[name].numel() for name in inner)
    alike = {place: widths.found.find(ids[0]) for place, ids in widths.ids_of.items()}
    return Least(entries, {name: widths.left(name, parameters[name].shape) for name in inner}, alike)
