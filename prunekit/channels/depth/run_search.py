"""Search of a traced run for results that layers compute for one sum alone."""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from prunekit.channels.cut.shorter_model import FUNCTIONS
from prunekit.channels.rules.compute import COUNTED
from prunekit.channels.tracing.channel_map import ChannelMap
from prunekit.channels.tracing.traced_run import TracedOperator, TracedRun

SUMS = frozenset({"aten.add", "aten.add_"})
VIEWS = frozenset(
    {
        f"aten.{name}"
        for name in (
            *("view", "_unsafe_view", "reshape", "permute", "transpose", "t", "expand"),
            *("clone", "contiguous", "alias", "detach", "_to_copy", "roll", "slice"),
        )
    }
)
"""Operators that change no value of what is the same everywhere: the axis of the channels is followed through them."""
AFFINE = frozenset({
    "aten.convolution", "aten._convolution", "aten.addmm", "aten.native_batch_norm", "aten.cudnn_batch_norm",
    "aten._native_batch_norm_legit", "aten._native_batch_norm_legit_no_training", "aten.native_layer_norm",
    "aten.native_group_norm",
})  # fmt: skip
"""Operators that return their bias where the other weights of their module are zero."""
LAST_AXIS = frozenset({"aten.addmm", "aten.native_layer_norm"})
SCALED = frozenset({"aten.mul", "aten.mul_", "aten.div", "aten.div_"})
BIAS = "bias"


class StaysError(Exception):
    """A branch cannot go, for the reason in the message."""


@dataclass(frozen=True, eq=False)
class Candidate:
    """A summand that only one sum reads, and all that is computed for it alone, in all passes of a run.

    Attributes:
        join: number of the sum in the first pass.
        end: number of the operator that made the summand there.
        inside: numbers of the operators whose results nothing else reads.
    """

    join: int
    end: int
    inside: frozenset[int]


class RunSearch:
    """A traced run with what reads each result, and which operators use each tensor."""

    def __init__(self, channel_map: ChannelMap, run: TracedRun) -> None:
        self.chart, self.run, self.operators = channel_map, run, run.operators
        self.consumers = defaultdict[int, list[int]](list)
        for number, operator in enumerate(run.operators):
            for read in operator.reads:
                self.consumers[read].append(number)
        self.uses = defaultdict[str, set[int]](set)
        for number, operator in enumerate(run.operators):
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
        """Yield the summands that layers compute for one sum alone; of two in one sum, that with more layers."""
        for sums in self._sums():
            found = [Candidate(sums[0], ends[0], self.cone(ends)) for side in range(2)
                     if (ends := [self.operators[one].reads[side] for one in sums])
                     and all(self._only_for(end, one) for end, one in zip(ends, sums, strict=True))]  # fmt: skip
            found = [one for one in found if self._weight(one.inside)]
            if found:
                yield max(found, key=lambda one: self._weight(one.inside))

    def _sums(self) -> Iterator[list[int]]:
        """Yield the sums of two results of one shape: the same sum in every pass of the run."""
        found = defaultdict[tuple[str, int], list[int]](list)
        for one in self.passes:
            counts = Counter[str]()
            for number in range(one.first, one.end):
                operator = self.operators[number]
                shapes = [value for value in operator.call[0] if is_shape(value)]
                if operator.name in SUMS and len(operator.reads) == 2 and shapes[0] == shapes[-1]:
                    counts[operator.module] += 1
                    found[operator.module, counts[operator.module]].append(number)
        return (same for same in found.values() if len(same) == len(self.passes))

    def _only_for(self, end: int, number: int) -> bool:
        """Return whether nothing but one operator reads the result of another."""
        return end >= 0 and end not in self.run.returned and self.consumers[end] == [number]

    def _weight(self, inside: Iterable[int]) -> int:
        return sum(self.operators[one].name in COUNTED for one in inside)

    def cone(self, ends: Sequence[int]) -> frozenset[int]:
        """Return the operators whose results are read for some results alone, with those that made these."""
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
        """Return the path of the innermost module around others, or of the one that they are all in."""
        parts = [path.split(".") if path else [] for path in paths]
        common = []
        for level in zip(*parts, strict=False):
            if len(set(level)) > 1:
                break
            common.append(level[0])
        return ".".join(common)

    def idle(self, numbers: set[int], allowed: set[int]) -> set[int]:
        """Return which operators compute nothing that is read, except by those of a branch."""
        found = set[int]()
        for number in sorted(numbers, reverse=True):
            read = all(one in allowed or one in found for one in self.consumers[number])
            if read and number not in self.run.returned:
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
    """Return where an axis lies in the result of an operator that changes no value, or of one value at a time."""
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
