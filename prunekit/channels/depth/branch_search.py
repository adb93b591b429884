"""The search for branches in a traced run: what is added to a stream, and is a constant without its own channels."""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Any

import numpy as np
import torch

from prunekit.channels.channel_map import ChannelMap, Keep
from prunekit.channels.depth.branch import Branch, Branches, BranchLock, ModuleBody, Replacement, Step, read_by
from prunekit.channels.depth.concatenated_parts import concatenated_parts
from prunekit.channels.depth.shorter_model import FUNCTIONS
from prunekit.channels.labels import Labels
from prunekit.channels.rules.compute import COUNTED
from prunekit.channels.tracing.fused_modules import is_inside
from prunekit.channels.tracing.traced_run import TracedCall, TracedOperator, TracedRun

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


class _Stays(Exception):
    """A branch cannot go, for the reason in the message."""


@dataclass(frozen=True, eq=False)
class _Candidate:
    """A summand that only one sum reads, and all that is computed for it alone, in all passes of a run.

    Attributes:
        join: number of the sum in the first pass.
        end: number of the operator that made the summand there.
        inside: numbers of the operators whose results nothing else reads.
    """

    join: int
    end: int
    inside: frozenset[int]


def find_branches(channel_map: ChannelMap) -> Branches:
    """Return the branches of a traced model.

    A branch is a summand of a sum with everything that is computed for it alone. It may go if it has channels of its
    own, and is a constant without them; and if that constant, and the code without it, can be written down.
    """
    source = channel_map.traced
    run, staying = source.trace.runs[0], {lock.name: lock for lock in source.branches_stay}
    if run.gradients or not run.module_calls:
        return Branches()
    search = RunSearch(channel_map, run)
    found, bodies, locks = list[Branch](), dict[str, ModuleBody](), dict[int, BranchLock]()
    taken = dict[int, frozenset[int]]()
    for candidate in sorted(search.candidates(), key=lambda one: one.join):
        if any(join in candidate.inside for join in taken):
            continue  # branches inside of branches go by themselves
        try:
            branch, body = search.branch(candidate)
        except _Stays as reason:
            locks[candidate.join] = BranchLock(search.name(candidate), str(reason))
            continue
        taken[candidate.join] = candidate.inside
        if branch.name in staying:
            locks[candidate.join] = staying[branch.name]
            continue
        found.append(branch)
        if body is not None:
            bodies[body.module] = body
    for part, branch in concatenated_parts(search):
        if any(other <= part for other in taken.values()):
            continue
        if branch.name in staying:
            locks[-len(locks) - 1] = staying[branch.name]
        else:
            taken[-len(taken) - 1] = part
            found.append(branch)
    inside = frozenset().union(*taken.values())
    left = tuple(lock for join, lock in locks.items() if join not in inside)
    return Branches(tuple(_unique(found)), bodies, left)


def _unique(branches: Iterable[Branch]) -> Iterator[Branch]:
    """Yield the branches with a number behind names that several have."""
    taken = Counter[str]()
    for branch in branches:
        taken[branch.name] += 1
        yield branch if taken[branch.name] == 1 else replace(branch, name=f"{branch.name}#{taken[branch.name]}")


class RunSearch:
    """What is known of a run, and of which of its values vanish."""

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

    def candidates(self) -> Iterator[_Candidate]:
        """Yield the summands that layers compute for one sum alone; of two in one sum, that with more layers."""
        for sums in self._sums():
            found = [_Candidate(sums[0], ends[0], self.cone(ends)) for side in range(2)
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
                shapes = [value for value in operator.call[0] if _is_shape(value)]
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

    def name(self, candidate: _Candidate) -> str:
        """Return the path of the module around the layers of a candidate."""
        return self._around([self.operators[one].module for one in candidate.inside])

    def _around(self, paths: Iterable[str]) -> str:
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

    def branch(self, candidate: _Candidate) -> tuple[Branch, ModuleBody | None]:
        """Return a branch, and the whole code of the module around it where that has to be replaced.

        Raises:
            _Stays: it may not go.
        """
        return _BranchBuilder(self, candidate).built()


class _BranchBuilder:
    """Makes a branch of a candidate, or finds out why it stays."""

    def __init__(self, search: RunSearch, candidate: _Candidate) -> None:
        self.search, self.chart, self.operators = search, search.chart, search.operators
        self.inside, self.end, self.join = candidate.inside, candidate.end, candidate.join
        self.names = {name for one in self.inside for name in self.operators[one].tensors}

    @cached_property
    def groups(self) -> list[Labels]:
        """Labels of the channel groups that only tensors of this branch have."""
        own = {name for name in self.names if self.search.uses[name] <= self.inside}
        return [group.labels for group in self.chart.groups if all(name in own for name, _ in group.slots)]

    @cached_property
    def keep(self) -> Keep:
        """What is kept without those groups."""
        keep = np.ones(self.chart.n_labels, dtype=bool)
        for labels in self.groups:
            keep[labels] = False
        return self.chart.completed(keep)

    @cached_property
    def vanished(self) -> set[int]:
        """Operators in the branch whose results have no entry left."""
        return {one for one in self.inside if self._is_empty(self.operators[one])}

    def _is_empty(self, operator: TracedOperator) -> bool:
        return any(
            not self.keep[labels].any()
            for fields in operator.outputs
            for labels in (self.chart.resolve(each) for each in fields)
        )

    @cached_property
    def constant(self) -> set[int]:
        """Operators in the branch that read nothing but what vanished, parameters, and other constants."""
        found = set[int]()
        for number in sorted(self.inside - self.vanished):
            if all(read in self.vanished or read in found for read in self.operators[number].reads):
                found.add(number)
        return found

    def built(self) -> tuple[Branch, ModuleBody | None]:
        """Return the branch, and the whole code of the module around it where that has to be replaced."""
        operators = self.operators
        if not self.groups:
            raise _Stays("it has no channels of its own that may be removed")
        if self.end not in self.constant:
            raise _Stays("what it computes does not depend on its own channels alone")
        chain = self._chain()
        bias, tail = self._constant_of(chain)
        first = self.search.passes[0]
        body = {one for one in self.inside if first.first <= one < first.end} - set(tail)
        plain_tail = {one for one in tail if operators[one].name in VIEWS}
        gone = self._modules(body, plain_tail)
        last = next(one for one in reversed(chain) if one in body)  # the first behind what vanished
        holder = next((path for path in gone if is_inside(self._owner(bias, last), [path])), None)
        if holder is None:
            raise _Stays("its last layer is also used elsewhere")
        left = [one for one in body if not is_inside(operators[one].module, gone)]
        replacements = tuple(self._replaced(path, path == holder, bias, chain) for path in gone)
        name = self._name(gone)
        weights = tuple(
            own for one in sorted(body) if operators[one].name in COUNTED for own in operators[one].tensors
            if len(self.chart.shapes.get(own, ())) > 1
        )  # fmt: skip
        branch = Branch(
            name=name,
            labels=np.concatenate(self.groups),
            presence=min(self.groups, key=len),
            parts=tuple(self.groups),
            last=self._read_last(chain),
            replacements=replacements,
            layers=tuple(dict.fromkeys(weights)),
            small=tuple(self._users(tail, gone)),
        )
        in_place = self._in_place(tail)
        if not left and not in_place:
            return branch, None
        try:
            return self._with_body(branch, body, gone)
        except _Stays:
            if in_place or not all(_is_function(operators[one]) for one in left):
                raise
        # the functions between its modules run on nothing
        hollow = tuple(one if one.constant else replace(one, empty=-1) for one in replacements)
        return replace(branch, replacements=hollow, small=(*branch.small, *self._users(left, gone))), None

    def _users(self, numbers: Sequence[int], gone: list[str]) -> list[str]:
        """Return the paths of the modules that run some operators, without those that go."""
        paths = dict.fromkeys(self.operators[one].module for one in numbers)
        return [path for path in paths if not is_inside(path, gone)]

    def _in_place(self, tail: Sequence[int]) -> bool:
        """Return whether the constant would be written to: it is smaller than what it stands for."""
        join = self.operators[self.join]
        return (join.name.endswith("_") and join.reads[0] == self.end) or any(
            self.operators[one].name.endswith("_") for one in tail
        )

    def _chain(self) -> list[int]:
        """Return the operators from the summand back to the one that reads what vanished."""
        chain = [self.end]
        while True:
            reads = self.operators[chain[-1]].reads
            computed = [read for read in reads if read in self.constant and self._depends(read)]
            if any(read in self.vanished for read in reads):
                if computed:
                    raise _Stays("its constant is a sum of several")
                return chain
            chain = [*chain, computed[0]] if len(computed) == 1 else self._over_a_module(chain)

    def _over_a_module(self, chain: list[int]) -> list[int]:
        """Return a chain that passes over the module in which it forks, as over a norm made of several operators."""
        for call in self.search.run.module_calls:
            if call.first <= chain[-1] < call.end and call.outputs[:1] and call.outputs[0] in chain:
                made = call.inputs[0] if call.inputs else None
                if made is not None and made in self.constant and self._depends(made):
                    return [*chain[: chain.index(call.outputs[0]) + 1], made]
        raise _Stays("its constant is computed in several ways")

    @cached_property
    def _dependent(self) -> set[int]:
        found = set[int]()
        for number in sorted(self.constant):
            reads = self.operators[number].reads
            if any(read in self.vanished or read in found for read in reads):
                found.add(number)
        return found

    def _depends(self, number: int) -> bool:
        """Return whether a constant is computed from what vanished, not from parameters alone."""
        return number in self._dependent

    def _constant_of(self, chain: list[int]) -> tuple[str | None, list[int]]:
        """Return the name of the bias that is the constant, and the operators behind it, from the last back."""
        tail = list[int]()
        others = {name for one in self._dependent for name in self.operators[one].tensors if _is_bias(name)}
        for number in chain:
            operator = self.operators[number]
            bias = next((name for name in operator.tensors if _is_bias(name)), None)
            if bias is not None and operator.name in AFFINE:
                if self._reads_in_a_pass(bias) != {number}:
                    raise _Stays("its bias is also used elsewhere")
                return bias, tail
            if bias is None and self._may_follow(operator):
                tail.append(number)
                continue
            if others:
                raise _Stays(f"its constant is changed by {operator.name}")
            return None, [one for one in tail if self.operators[one].name in VIEWS]
        return None, [one for one in tail if self.operators[one].name in VIEWS]

    def _reads_in_a_pass(self, name: str) -> set[int]:
        """Return the operators of the first pass that read a tensor, and those of others that are not this branch's."""
        first = self.search.passes[0]
        return {one for one in self.search.uses[name] if one < first.end or one not in self.inside}

    def _may_follow(self, operator: TracedOperator) -> bool:
        """Return whether an operator may run on a constant that is as small as its channels."""
        scaled = operator.name in SCALED and len(operator.tensors) == 1
        return operator.name in VIEWS or scaled or _is_function(operator)

    def _owner(self, bias: str | None, last: int) -> str:
        return self.operators[last].module if bias is None else bias.rpartition(".")[0]

    def _modules(self, body: set[int], also: set[int]) -> list[str]:
        """Return the outermost modules all of whose operators, and tensors, belong to the branch alone."""
        allowed, chart = body | also, self.chart
        found = list[str]()
        for call in sorted(self.search.run.module_calls, key=lambda one: one.path.count(".")):
            path = call.path
            passes = len(self.search.passes)
            if not path or is_inside(path, found) or self.search.calls[path] != passes or call.first == call.end:
                continue
            if call is not self.search.call_of[path]:
                continue
            own = set(range(call.first, call.end))
            if not body & own or not own - allowed <= self.search.idle(own - allowed, allowed):
                continue
            names = [name for name in chart.shapes if is_inside(name.rpartition(".")[0], [path])]
            read = (self._reads_in_a_pass(name) <= allowed | own for name in names)
            users = (user for name in names for user in self.search.others[name])
            if names and all(read) and all(is_inside(user, [path]) for user in users):
                found.append(path)
        return sorted(found, key=lambda path: self.search.call_of[path].first)

    def _replaced(self, path: str, constant: bool, bias: str | None, chain: list[int]) -> Replacement:
        call = self.search.call_of[path]
        if not constant:
            return Replacement(path, place=call.place)
        made = call.outputs[0] if call.outputs else -1
        if made not in chain:
            raise _Stays("its last layer returns something else besides")
        ndim = len(_out_shape(self.operators[made]))
        if bias is None:
            return Replacement(path, True, None, (1,) * ndim, call.place)
        axis = self._axis(bias, made, chain)
        shape = tuple(-1 if index == axis else 1 for index in range(ndim))
        return Replacement(path, True, bias.removeprefix(f"{path}."), shape, call.place)

    def _axis(self, bias: str, made: int, chain: list[int]) -> int:
        """Return the axis along which the bias lies in the result of an operator of the chain, behind its own."""
        own = next(one for one in chain if bias in self.operators[one].tensors)
        operator = self.operators[own]
        shape = _out_shape(operator)
        axis = len(shape) - 1 if operator.name in LAST_AXIS else 1
        for number in reversed(chain[chain.index(made) : chain.index(own)]):
            axis = _moved_axis(self.operators[number], axis)
        return axis

    def _read_last(self, chain: list[int]) -> Labels:
        """Return the labels of this branch that its last layer reads."""
        operator = self.operators[chain[-1]]
        read = [self.chart.resolve(each).reshape(-1) for each in operator.inputs]
        deciding = [choice for labels in read for choice in self.chart.deciding(labels)]
        mine = np.concatenate(self.groups)
        found: Labels = np.unique(np.concatenate(deciding)) if deciding else mine
        return found[np.isin(found, mine)]

    def _name(self, gone: list[str]) -> str:
        """Return the module with all the layers, if one of those that go has them, else the one around them."""
        counted = [
            path for path in gone
            if any(self.operators[one].name in COUNTED and is_inside(self.operators[one].module, [path])
                   for one in self.inside)
        ]  # fmt: skip
        return counted[0] if len(counted) == 1 else self.search._around(gone) or counted[0]

    def _with_body(self, branch: Branch, body: set[int], gone: list[str]) -> tuple[Branch, ModuleBody]:
        """Return the branch with the steps that go from the code of the module around it, and all of that code."""
        path = self.search._around([*gone, self.operators[self.join].module])
        call = self.search.call_of.get(path)
        passes = len(self.search.passes)
        if not path or call is None or self.search.calls[path] != passes or not call.first <= self.join < call.end:
            raise _Stays("the code around it cannot be written as steps")
        code = _body_of(self.search, call)
        holder = next(one.module for one in branch.replacements if one.constant)
        steps, number, dead = list(code.steps), code.made, list[int]()
        for index, covered in enumerate(code.covers):
            step = steps[index]
            if step[0] == "call" and f"{path}.{step[1]}" == holder:
                continue
            if covered & body and covered - body <= self.search.idle(covered - body, body):
                dead.append(index)
        lost = {index + 1 for index in dead}
        for index, step in enumerate(steps):
            if index in dead:
                continue
            if step[0] == "other":
                raise _Stays(f"the code around it runs {step[1]}, which is no step")
            if step[0] == "call" and f"{path}.{step[1]}" == holder:
                continue
            if any(value in lost for value in read_by(step)):
                raise _Stays("the code around it reads what goes")
        if number.get(code.result) is None or number[code.result] in lost:
            raise _Stays("the module around it returns something else")
        whole = ModuleBody(path, tuple(steps), number[code.result])
        shared = (f"{path}.{steps[index][1]}" for index in dead if steps[index][0] in ("call", "other"))
        small = dict.fromkeys([*branch.small, path, *(one for one in shared if not is_inside(one, gone))])
        return replace(branch, name=path, body=path, steps=tuple(dead), small=tuple(small)), whole


@dataclass(frozen=True, eq=False)
class _Code:
    """The code of a module: its steps, the operators that each covers, and the value that each operator made."""

    steps: list[Step]
    covers: list[set[int]]
    made: Mapping[int, int]
    result: int


def _body_of(search: RunSearch, call: TracedCall) -> _Code:
    """Return the code of a module that one call ran, as steps.

    Raises:
        _Stays: it takes or returns something else than one tensor.
    """
    if not call.plain or not call.inputs or call.inputs[0] is None or len(call.outputs) != 1 or call.place is not None:
        raise _Stays("the module around it takes or returns something else than one tensor")
    inner = [one for one in search.run.module_calls if one.first >= call.first and one.end <= call.end
             and one is not call and one.first < one.end and is_inside(one.path, [call.path])]  # fmt: skip
    children = [one for one in inner if not any(o is not one and o.first <= one.first and one.end <= o.end
                                                and is_inside(one.path, [o.path]) for o in inner)]  # fmt: skip
    made: dict[int, int] = {call.inputs[0]: 0}
    steps: list[Step] = []
    covers: list[set[int]] = []

    def add(step: Step, covered: set[int], outputs: Iterable[int]) -> None:
        steps.append(step)
        covers.append(covered)
        made.update(dict.fromkeys(outputs, len(steps)))

    number = call.first
    starts = {one.first: one for one in children}
    while number < call.end:
        child = starts.get(number)
        if child is not None:
            path = child.path.removeprefix(f"{call.path}.")
            plain = child.plain and child.inputs and len(child.outputs) == 1 and child.place is None
            value = made.get(child.inputs[0]) if plain and child.inputs[0] is not None else None
            step: Step = ("call", path, value) if plain and value is not None else ("other", child.path)
            add(step, set(range(child.first, child.end)), child.outputs)
            number = child.end
            continue
        operator = search.operators[number]
        for name in operator.tensors if operator.name in SUMS | SCALED else ():
            own = name.rpartition(".")
            if own[0] == call.path:
                add(("parameter", own[2]), set(), ())
        add(_own_step(operator, made, steps, call.path), {number}, [number])
        number += 1
    return _Code(steps, covers, made, call.outputs[0])


def _own_step(operator: TracedOperator, made: Mapping[int, int], steps: list[Step], path: str) -> Step:
    """Return an operator of a module's own code as a step."""
    name, values = operator.name.removesuffix("_"), [made.get(read) for read in operator.reads]
    other: Step = ("other", operator.name)
    if any(value is None for value in values):
        return other
    args, named, _ = operator.call
    if _is_function(operator):
        return ("function", name, tuple(args[1:]), values[0])
    if name in ("aten.add", "aten.mul") and not named and len(args) == 2:
        if len(values) == 2 and not operator.tensors:
            return (name.removeprefix("aten."), *values)
        if len(values) == 1 and len(operator.tensors) == 1 and operator.tensors[0].rpartition(".")[0] == path:
            return (name.removeprefix("aten."), len(steps), values[0])  # the parameter is the step before
    return other


def _is_bias(name: str) -> bool:
    return name.rpartition(".")[2].endswith(BIAS)


def _out_shape(operator: TracedOperator) -> tuple[int, ...]:
    return tuple(operator.call[2][0])


def _is_shape(value: Any) -> bool:
    """Return whether a recorded argument was a tensor; lists of numbers are lists."""
    return isinstance(value, torch.Size)


def _is_function(operator: TracedOperator) -> bool:
    """Return whether an operator is a function of one tensor, and of numbers, that may be a step."""
    args, named, _ = operator.call
    known = operator.name.removesuffix("_") in FUNCTIONS and len(operator.reads) == 1 and not operator.tensors
    return known and not named and _is_shape(args[0]) and not any(map(_is_shape, args[1:]))


def _moved_axis(operator: TracedOperator, axis: int) -> int:
    """Return where an axis lies in the result of an operator that changes no value, or of one value at a time."""
    args, before, after = operator.call[0], tuple(operator.call[0][0]), _out_shape(operator)
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
    raise _Stays(f"its channels change places in {operator.name}")
