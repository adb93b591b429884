"""The search for positions that may change places, such as experts, whose numbers a router computes from all of them.

Labels cannot follow a number that is computed. But if a module's results stay the same when the positions of some axes
change places in all of its tensors at once, and change when they do in any one alone, then these axes number the same
things, and nothing outside of the module knows the numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import nn

from prunekit.channels.cut.slicing import resize, take
from prunekit.channels.float64 import ForwardCall, evaluating, first_calls, same_tensors, to_double
from prunekit.channels.labels.branch import is_inside
from prunekit.channels.labels.constraints import Interchangeable, TensorAxis, around
from prunekit.channels.labels.label_union import Labels
from prunekit.channels.rules.rule import Trait
from prunekit.channels.tracing.channel_map import ChannelMap
from prunekit.hooks.model_copy import has_gradients, named_tensors, with_tensors
from prunekit.utils.tensors import gather, map_tensors

AROUND = 3
"""How many modules around such an operator may hold the router too, the one that runs it included."""
NOISE = 0.3
"""Spread of what is added to tensors for a test, as a share of theirs: no two positions are equal by chance."""

Tensors = Mapping[str, torch.Tensor]
Results = list[torch.Tensor]
Attributes = tuple[tuple[str, str, bool], ...]
"""Paths and names of whole numbers, and whether each is the size of one part."""


def interchangeable_axes(
    model: nn.Module, chart: ChannelMap, examples: Sequence[tuple[Any, ...]]
) -> tuple[Interchangeable, ...]:
    """Return the axes of a traced model that may lose positions together, though labels cannot follow these."""
    places = _places(model, chart)
    if not places or any(tensor.is_meta for _, tensor in named_tensors(model)):
        return ()
    calls: dict[str, ForwardCall] = {}
    paths = (path for chain in places for path, _ in chain)
    with suppress(Exception):  # a model that needs its own precision
        calls = first_calls(model, paths, examples[0], chart.traced.trace.runs[0])
    found: dict[str, Interchangeable] = {}
    tested: dict[object, Interchangeable | None] = {}
    for chain in places:
        for path, axes in chain:
            if path in found or path not in calls:
                break
            own = tuple((name.removeprefix(f"{path}."), axis) for name, axis in axes)
            kind = own, _kind(model.get_submodule(path))
            if kind not in tested:
                tested[kind] = _Block.of(model.get_submodule(path), own, calls[path]).freedom()
            if (freedom := tested[kind]) is not None:
                found[path] = freedom.at(path)
                break
    return _with_sizes_around(model, list(found.values()))


def _kind(module: nn.Module) -> object:
    """Return what decides on the code that a module runs: classes, settings and sizes, but no values of tensors."""
    plain = (int, float, str, bool, type(None))
    settings = tuple(
        (path, type(part), tuple((name, value) for name, value in vars(part).items() if isinstance(value, plain)))
        for path, part in module.named_modules()
    )
    return settings, tuple((name, tuple(tensor.shape)) for name, tensor in named_tensors(module))


def _with_sizes_around(model: nn.Module, blocks: list[Interchangeable]) -> tuple[Interchangeable, ...]:
    """Add to blocks the attributes of modules around them that have name and value of an attribute in the block."""
    seen: set[tuple[str, str]] = set()
    for index, block in enumerate(blocks):
        names = {(name, vars(model.get_submodule(path))[name]) for path, name, of_part in block.sizes if not of_part}
        # a loss that balances experts takes their number from the model itself
        outside = [(path.rpartition(".")[0], name, value) for path in around(block.module) for name, value in names]
        more = {(path, name) for path, name, value in outside if vars(model.get_submodule(path)).get(name) == value}
        sizes = (*block.sizes, *((path, name, False) for path, name in sorted(more - seen)))
        blocks[index] = replace(block, sizes=sizes)
        seen |= more
    return tuple(blocks)


def _places(model: nn.Module, chart: ChannelMap) -> list[list[tuple[str, tuple[TensorAxis, ...]]]]:
    """Return for each module that picks from stacks itself and those around it, with their locked axes of that size."""
    trace, final = chart.traced.trace, chart.traced.final
    axes = [
        (name, index, axis) for name, own in trace.labels.items() for index, axis in enumerate(own) if axis is not None
    ]
    on_stacks = {axis.tobytes() for name, _, axis in axes if len(trace.labels[name]) > 1}
    picked = [record for record in trace.flow.locks if record.operator in Trait.PICKS_FROM_STACK]
    sizes = {record.module: record.labels.size for record in picked if record.labels.tobytes() in on_stacks}
    locked = [(name, index, axis.size) for name, index, axis in axes if not final[axis].any()]
    result = []
    for module, size in sizes.items():
        fitting = [(name, index) for name, index, n in locked if n == size]
        chain = [(path, tuple(one for one in fitting if is_inside(one[0], [path])))
                 for path in islice(around(module), AROUND)]  # fmt: skip
        result.append([(path, own) for path, own in chain if len(own) > 1])
    return [chain for chain in result if chain]


@dataclass(frozen=True, eq=False)
class _Block:
    """A module whose axes are tested, with the arguments of one call; its tensors are copies with noise."""

    module: nn.Module
    axes: tuple[TensorAxis, ...]
    tensors: Tensors
    call: ForwardCall

    @classmethod
    def of(cls, module: nn.Module, axes: tuple[TensorAxis, ...], call: ForwardCall) -> _Block:
        generator = torch.Generator().manual_seed(0)
        tensors = {}
        for name, tensor in named_tensors(module):
            tensors[name] = wide = to_double(name, tensor)
            if has_gradients(tensor) and name in dict(axes):
                spread = float(wide.abs().mean()) or 1.0
                wide += NOISE * spread * torch.randn(wide.shape, dtype=wide.dtype, generator=generator)
        return cls(module, axes, tensors, call)

    @property
    def size(self) -> int:
        name, axis = self.axes[0]
        return self.tensors[name].shape[axis]

    def freedom(self) -> Interchangeable | None:
        """Return how positions may be removed, with paths inside of the module; None if they may not."""
        parts = self._parts()
        attributes = self._attributes(parts) if parts else None
        if attributes is None:
            return None
        counts = range(1, self.size // parts)
        least = next(count for count in counts if self._narrow(parts, count, attributes) is not None)
        return Interchangeable("", self.axes, parts, least, attributes)

    def _parts(self) -> int:
        """Return in how many equal parts positions may change places, the same in each; 0 if they may not."""
        names = [name for name, _ in self.axes]
        if len(self.axes) < 2 or len({*names}) < len(names) or not {*names} <= self.tensors.keys():
            return 0
        whole = self._run(self.tensors)
        for parts in range(1, self.size // 2 + 1) if whole is not None else ():
            order = np.roll(np.arange(self.size).reshape(parts, -1), 1, 1) if self.size % parts == 0 else None
            if order is not None and _same(whole, self._run(self._picked(order, self.axes))):
                alone = [self._run(self._picked(order, [one])) for one in self.axes]
                return 0 if any(_same(whole, each) for each in alone) else parts
        return 0

    def _attributes(self, parts: int) -> Attributes | None:
        """Return the attributes to set: all that equal the size, else those of one name, else none."""
        each = self.size // parts
        every = tuple(
            (path, name, value != self.size)
            for path, module in self.module.named_modules()
            for name, value in vars(module).items()
            if type(value) is int and value in (self.size, each) and value > 1
        )
        named = [tuple(one for one in every if one[1] == name) for name in dict.fromkeys(name for _, name, _ in every)]
        without = self._narrow(parts, each - 1, ())
        for choice in (every, *named, ()):
            out = self._narrow(parts, each - 1, choice)
            plausible = out is not None and (without is None or _same(without, out))
            if plausible and _same(out, self._narrow(parts, each - 1, choice, turned=True)):
                return choice
        return None  # it does not run with fewer positions, whatever is set

    def _narrow(self, parts: int, count: int, attributes: Attributes, *, turned: bool = False) -> Results | None:
        """Return the results with the first positions of each part alone, in another order if `turned`."""
        kept = np.arange(self.size).reshape(parts, -1)[:, :count]
        values = {(path, name): count if of_part else parts * count for path, name, of_part in attributes}
        return self._run(self._picked(np.roll(kept, 1, 1) if turned else kept, self.axes), values)

    def _picked(self, order: Labels, axes: Iterable[TensorAxis]) -> Tensors:
        index = torch.from_numpy(order.reshape(-1).copy())
        return {**self.tensors, **{name: take(self.tensors[name], axis, index) for name, axis in axes}}

    def _run(self, tensors: Tensors, attributes: Mapping[tuple[str, str], int] | None = None) -> Results | None:
        """Return the tensors of the module's result; None if it does not run."""
        copy = with_tensors(self.module, tensors)
        resize(copy)
        for (path, name), value in (attributes or {}).items():
            vars(copy.get_submodule(path))[name] = value
        args, named = map_tensors((self.call.args, self.call.named), torch.clone)
        with suppress(Exception), evaluating(copy):
            return gather(copy(*args, **named))
        return None


def _same(want: Results | None, got: Results | None) -> bool:
    return want is not None and got is not None and same_tensors(want, got)
