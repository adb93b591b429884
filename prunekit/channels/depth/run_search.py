"""A traced run, searched backward: results that layers compute for one sum alone, and modules' own code as steps."""

import heapq
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from math import prod
from typing import Any

import torch
from torch import nn

from prunekit.channels.cut.shorter_model import FUNCTIONS
from prunekit.channels.labels.branch import Step, is_inside
from prunekit.channels.labels.label_union import Labels
from prunekit.channels.rules.rule import Trait
from prunekit.channels.tracing.channel_map import ChannelMap
from prunekit.channels.tracing.traced_run import TracedCall, TracedOperator, TracedRun

BIAS = "bias"


class StaysError(Exception):
    """A branch cannot go, for the reason in the message."""


@dataclass(frozen=True, eq=False)
class Candidate:
    """A summand that only one sum reads, and all that is computed for it alone, in all passes of a run."""

    join: int  # number of the sum in the first pass
    end: int  # number of the operator that made the summand there
    inside: frozenset[int]  # numbers of the operators whose results nothing else reads


class RunSearch:
    """A traced run with what reads each result, and which operators use each tensor."""

    def __init__(self, channel_map: ChannelMap, run: TracedRun) -> None:
        self.chart, self.run, self.operators = channel_map, run, run.operators
        self.consumers, self.uses = defaultdict[int, list[int]](list), defaultdict[str, set[int]](set)
        for number, operator in enumerate(run.operators):
            for read in operator.reads:
                self.consumers[read].append(number)
            for name in operator.tensors:
                self.uses[name].add(number)
        self.others = defaultdict[str, set[str]](set)
        for other in channel_map.traced.trace.runs[1:]:
            for operator in () if other.repeats else other.operators:
                for name in operator.tensors:
                    self.others[name].add(operator.module)
        self.passes = [call for call in run.module_calls if not call.path]
        self.calls = Counter(call.path for call in run.module_calls)
        self.call_of = {call.path: call for call in reversed(run.module_calls)}  # the first of each

    def candidates(self) -> Iterator[Candidate]:
        """Yield the summands that layers compute for one sum alone; if both of a sum are, the one with more layers."""
        for sums in self._sums():
            sides = [[self.operators[one].reads[side] for one in sums] for side in range(2)]
            alone = [ends for ends in sides if all(map(self._only_for, ends, sums))]
            found = [Candidate(sums[0], ends[0], self.cone(ends)) for ends in alone]
            best = max(found, key=lambda one: self.weight(one.inside), default=None)
            if best is not None and self.weight(best.inside):
                yield best

    def _sums(self) -> Iterator[list[int]]:
        """Yield the sums of two results of one shape: the same sum in every pass of the run."""
        found = defaultdict[tuple[str, int], list[int]](list)
        for one in self.passes:
            counts = Counter[str]()
            for number in range(one.first, one.end):
                operator = self.operators[number]
                shapes = [value for value in operator.call[0] if is_shape(value)]
                if operator.name in Trait.ADDS and len(operator.reads) == 2 and shapes[0] == shapes[-1]:
                    counts[operator.module] += 1
                    found[operator.module, counts[operator.module]].append(number)
        return (same for same in found.values() if len(same) == len(self.passes))

    def _only_for(self, end: int, number: int) -> bool:
        """Return whether a single operator is all that reads a result."""
        return end >= 0 and end not in self.run.returned and self.consumers[end] == [number]

    def weight(self, inside: Iterable[int]) -> int:
        """Return how many of some operators are layers, whose multiply-accumulates count."""
        return sum(self.operators[one].name in Trait.COUNTED for one in inside)

    def weights_of(self, numbers: Iterable[int]) -> tuple[str, ...]:
        """Return the names of the weights of the layers among some operators, in the order in which they run.

        Linear layers read a view of theirs.
        """
        layers = [one for one in sorted(numbers) if self.operators[one].name in Trait.COUNTED]
        names = dict.fromkeys(name for layer in layers for name in self._read_by(self.operators[layer]))
        return tuple(name for name in names if len(self.chart.shapes.get(name, ())) > 1)

    def _read_by(self, operator: TracedOperator) -> Iterator[str]:
        """Yield the names of the tensors of the model that an operator reads, as they are or as views or copies."""
        yield from operator.tensors
        for made in (self.operators[read] for read in operator.reads if read >= 0):
            if not made.counted and len(made.reads) + len(made.tensors) == 1:
                yield from self._read_by(made)

    def groups_of(self, inside: frozenset[int]) -> list[Labels]:
        """Return the labels of the channel groups that only tensors have which nothing but some operators read."""
        names = {name for one in inside for name in self.operators[one].tensors}
        own = {name for name in names if self.uses[name] <= inside}
        return [group.labels for group in self.chart.groups if all(name in own for name, _ in group.slots)]

    def cone(self, ends: Sequence[int]) -> frozenset[int]:
        """Return the operators that some results need and nothing else does, with those that made the results."""
        inside, waiting = set(ends), [-read for end in ends for read in self.operators[end].reads if read >= 0]
        heapq.heapify(waiting)
        while waiting:  # the last first: all that read a result come behind it
            number = -heapq.heappop(waiting)
            if number in inside or number in self.run.returned:
                continue
            if all(consumer in inside for consumer in self.consumers[number]):
                inside.add(number)
                for read in self.operators[number].reads:
                    if read >= 0:
                        heapq.heappush(waiting, -read)
        return frozenset(inside)

    def name(self, candidate: Candidate) -> str:
        """Return the path of the module around the layers of a candidate."""
        return self.around([self.operators[one].module for one in candidate.inside])

    def around(self, paths: Iterable[str]) -> str:
        """Return the path of the innermost module that contains all given ones."""
        levels = zip(*(path.split(".") for path in paths), strict=False)
        return ".".join(level[0] for level in takewhile(lambda level: len(set(level)) == 1, levels))

    def idle(self, numbers: set[int], allowed: set[int]) -> set[int]:
        """Return the operators whose results nothing reads, or only operators of the branch."""
        found = set[int]()
        for number in sorted(numbers - self.run.returned, reverse=True):
            if all(one in allowed or one in found for one in self.consumers[number]):
                found.add(number)
        return found


def is_bias(name: str) -> bool:
    """Return whether a tensor is a bias by its name, also one of several in a module."""
    return name.rpartition(".")[2].endswith(BIAS)


def out_shape(operator: TracedOperator) -> tuple[int, ...]:
    """Return the shape of an operator's first result."""
    return tuple(operator.call[2][0])


def is_shape(value: Any) -> bool:
    """Return whether a recorded argument was a tensor; lists of numbers are lists."""
    return isinstance(value, torch.Size)


def is_function(operator: TracedOperator) -> bool:
    """Return whether an operator is a function of one tensor, and of numbers, that may be a step."""
    args, named, _ = operator.call
    known = operator.name.removesuffix("_") in FUNCTIONS and len(operator.reads) == 1 and not operator.tensors
    return known and not named and is_shape(args[0]) and not any(map(is_shape, args[1:]))


def moved_axis(operator: TracedOperator, axis: int) -> int:
    """Return where an axis lies in the result of an operator that moves values, or changes each by itself."""
    args, before, after = operator.call[0], tuple(operator.call[0][0]), out_shape(operator)
    name = operator.name.removesuffix("_")
    if name == "aten.permute":
        return [index % len(before) for index in args[1]].index(axis)
    if name in ("aten.transpose", "aten.t"):
        one, other = (index % len(before) for index in (args[1:3] if name == "aten.transpose" else (0, 1)))
        return {one: other, other: one}.get(axis, axis)
    if before == after or (name in ("aten.slice", "aten.roll") and before[axis] == after[axis]):
        return axis
    ahead, position = prod(before[:axis]), 1
    for index, size in enumerate(after):
        if position == ahead and size == before[axis]:
            return index
        position *= size
    raise StaysError(f"its channels change places in {operator.name}")


OPEN = 1 << 62
"""From here on an end of a slice is none."""
IMAGES = 4
"""Axes of feature maps, whose second one may be padded whatever their size is."""


@dataclass(frozen=True, eq=False)
class ModuleCode:
    """The code of a module: its steps, the operators that each covers, and the value that each operator made."""

    steps: list[Step]
    covers: list[set[int]]
    made: Mapping[int, int]
    result: int


def code_of(search: RunSearch, call: TracedCall) -> ModuleCode:
    """Return the code of a module that one call ran, as steps."""
    if call.source is None:
        raise StaysError("the module around it takes or returns something else than one tensor")
    if call.path in search.run.asks_mode:
        raise StaysError("the code around it is another one in train mode")
    inner = [one for one in search.run.module_calls if one.first >= call.first and one.end <= call.end
             and one is not call and is_inside(one.path, [call.path])]  # fmt: skip
    children = [one for one in inner if not any(o is not one and o.first <= one.first and one.end <= o.end
                                                and is_inside(one.path, [o.path]) for o in inner)]  # fmt: skip
    made: dict[int, int] = {call.source: 0}
    steps: list[Step] = []
    covers: list[set[int]] = []

    def add(step: Step, covered: set[int], outputs: Iterable[int]) -> None:
        steps.append(step)
        covers.append(covered)
        made.update(dict.fromkeys(outputs, len(steps)))

    number = call.first
    starts = {one.first: one for one in children if one.first < one.end}
    model = search.chart.traced.trace.model()
    while number <= call.end:
        for one in children:  # those that run no operator, such as dropout in eval mode
            if one.first == one.end == number and not isinstance(model.get_submodule(one.path), nn.Identity):
                _require_one_reader(search, call, one)
                if (value := made.get(one.inputs[0])) is not None:  # type: ignore[arg-type]
                    add(("call", one.path.removeprefix(f"{call.path}."), value), set(), one.outputs)
        if number == call.end:
            break
        child = starts.get(number)
        if child is not None:  # its operators are one step
            value = None if child.source is None else made.get(child.source)
            own_name = child.path.removeprefix(f"{call.path}.")
            step: Step = ("other", child.path) if value is None else ("call", own_name, value)
            add(step, set(range(child.first, child.end)), child.outputs)
            number = child.end
            continue
        operator = search.operators[number]
        for name in operator.tensors if operator.name in Trait.ADDS or operator.name in Trait.SCALES else ():
            own = name.rpartition(".")
            if own[0] == call.path:
                add(("parameter", own[2]), set(), ())
        add(_own_step(operator, made, steps, call.path), {number}, [number])
        number += 1
    return ModuleCode(steps, covers, made, call.outputs[0])


def _require_one_reader(search: RunSearch, call: TracedCall, child: TracedCall) -> None:
    """Raise if a child that returns what it is given, as dropout does in eval mode, has no place among the steps."""
    if not child.plain or not child.inputs or child.inputs[:1] != child.outputs:
        raise StaysError(f"{child.path} returns what it is not given")
    made = child.outputs[0]
    readers = {number for number in range(child.first, call.end) if made in search.operators[number].reads}
    if len(readers) + (child.outputs == call.outputs) > 1:
        raise StaysError(f"{child.path} returns what it is given, which is read several times")


def _of_any_size(operator: TracedOperator) -> bool:
    """Return whether the numbers that an operator is given do not depend on the size of the model's input."""
    args = operator.call[0]
    if operator.name == "aten.slice":
        start, end = (*args[2:4], None, None)[:2]
        return not start and (end is None or end >= OPEN)
    if operator.name == "aten.constant_pad_nd":
        return len(args[0]) >= IMAGES and not any(list(args[1])[: 2 * (len(args[0]) - 2)])
    return True


def _own_step(operator: TracedOperator, made: Mapping[int, int], steps: list[Step], path: str) -> Step:
    """Return an operator of a module's own code as a step."""
    name, values = operator.name.removesuffix("_"), [made.get(read) for read in operator.reads]
    other: Step = ("other", operator.name)
    if any(value is None for value in values):
        return other
    args, named, _ = operator.call
    if is_function(operator) and _of_any_size(operator):
        return ("function", name, tuple(args[1:]), values[0])
    if name in ("aten.add", "aten.mul") and not named and len(args) == 2:
        if len(values) == 2 and not operator.tensors:
            return (name.removeprefix("aten."), *values)
        if len(values) == 1 and len(operator.tensors) == 1 and operator.tensors[0].rpartition(".")[0] == path:
            return (name.removeprefix("aten."), len(steps), values[0])  # the parameter is the step before
    return other
