"""The search for branches in a traced run: what is added to a stream, and is a constant without its own channels.

    stream ──┬──────────────────────────────── + ── stream    without the channels between conv1 and conv2,
             └── conv1 ── relu ── conv2 ── norm ┘             the branch returns norm's bias for every input

A candidate is a summand that nothing but one sum reads, with all that is computed for it alone (its cone, see
`RunSearch.cone`). With all channels of its own removed, some operators in it have no entries left (vanished). What
reads only vanished entries, parameters and constants is a constant too. The branch may go if it ends in such a one:

    vanished          conv1, relu
    constant          conv2 = its bias,  norm = its bias: the last bias on the way is the constant that stays
    in its place      `ConstantModule` for conv2 and norm together, `AbsentModule` for what nothing reads any more

1. A branch shares no channel and no layer with anything that stays.
2. The constant is one tensor of the model: a bias, whose entries lie along one known axis, or zeros.
3. Modules go as a whole. Where the sum is in a module's own code, with operators of the branch beside those of others,
   that code is written as steps, and the steps of the branch go.
4. What cannot be written down that way stays, with the reason (`StaysError`).

Parts of a concatenation, such as the layers of a DenseNet, may go with nothing in their place; they take the channels
that they add with them.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property

import numpy as np

from prunekit.channels.depth.run_search import (
    Candidate,
    RunSearch,
    StaysError,
    code_of,
    is_bias,
    is_function,
    moved_axis,
    out_shape,
)
from prunekit.channels.labels.branch import Branch, Branches, BranchLock, ModuleBody, Replacement, is_inside, read_by
from prunekit.channels.labels.label_union import Labels
from prunekit.channels.rules.rule import Trait
from prunekit.channels.tracing.channel_map import ChannelMap, Keep


def find_branches(channel_map: ChannelMap) -> Branches:
    """Return the branches of a traced model.

    A branch is a summand of a sum with everything that is computed for it alone. It may go if it has channels of its
    own, and is a constant without them; and if that constant, and the code without it, can be written down.
    """
    source = channel_map.traced
    run, staying = source.trace.runs[0], {lock.name: lock for lock in source.branches_stay}
    meets = any(
        len(operator.reads) > 1 and (operator.name in Trait.ADDS or operator.name in Trait.JOINS)
        for operator in run.operators
    )
    if run.gradients or not run.module_calls or not meets:  # without a sum or a concatenation there is no branch
        return Branches()
    search = RunSearch(channel_map, run)
    found, bodies, locks = list[Branch](), dict[str, ModuleBody](), dict[int, BranchLock]()
    taken = dict[int, frozenset[int]]()
    for candidate in sorted(search.candidates(), key=lambda one: one.join):
        if any(join in candidate.inside for join in taken):
            continue  # branches inside of branches go by themselves
        try:
            branch, body = BranchBuilder(search, candidate).built()
        except StaysError as reason:
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


class BranchBuilder:
    """Makes a branch of a candidate, or finds out why it stays."""

    def __init__(self, search: RunSearch, candidate: Candidate) -> None:
        self.search, self.chart, self.operators = search, search.chart, search.operators
        self.inside, self.end, self.join = candidate.inside, candidate.end, candidate.join
        self.groups = search.groups_of(self.inside)

    @cached_property
    def keep(self) -> Keep:
        """The choice that keeps all but those groups."""
        keep = np.ones(self.chart.n_labels, dtype=bool)
        for labels in self.groups:
            keep[labels] = False
        return self.chart.completed(keep)

    @cached_property
    def vanished(self) -> set[int]:
        """Operators in the branch whose results have no entry left."""
        results = {one: [field for fields in self.operators[one].outputs for field in fields] for one in self.inside}
        return {
            one for one, fields in results.items() if not all(self.keep[self.chart.resolve(f)].any() for f in fields)
        }

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
            raise StaysError("it has no channels of its own that may be removed")
        if self.end not in self.constant:
            raise StaysError("what it computes does not depend on its own channels alone")
        chain = self._chain()
        bias, tail = self._constant_of(chain)
        first = self.search.passes[0]
        body = {one for one in self.inside if first.first <= one < first.end} - set(tail)
        plain_tail = {one for one in tail if operators[one].name in Trait.KEEPS_CONSTANTS}
        gone = self._modules(body, plain_tail)
        last = next(one for one in reversed(chain) if one in body)  # the first behind what vanished
        owner = operators[last].module if bias is None else bias.rpartition(".")[0]
        holder = next((path for path in gone if is_inside(owner, [path])), None)
        if holder is None:
            raise StaysError("its last layer is also used elsewhere")
        left = [one for one in body if not is_inside(operators[one].module, gone)]
        replacements = tuple(self._replaced(path, path == holder, bias, chain) for path in gone)
        branch = Branch(
            name=self._name(gone),
            parts=tuple(self.groups),
            last=self._read_last(chain),
            replacements=replacements,
            layers=self.search.weights_of(body),
            small=tuple(self._users(tail, gone)),
        )
        join = self.operators[self.join]
        # the constant would be written to, and it is smaller than what it stands for
        in_place = join.name.endswith("_") and join.reads[0] == self.end
        in_place = in_place or any(operators[one].name.endswith("_") for one in tail)
        if not left and not in_place:
            return branch, None
        try:
            return self._with_body(branch, body, gone)
        except StaysError:
            if in_place or not all(is_function(operators[one]) for one in left):
                raise
        # the functions between its modules run on nothing
        hollow = tuple(one if one.constant else replace(one, empty=-1) for one in replacements)
        return replace(branch, replacements=hollow, small=(*branch.small, *self._users(left, gone))), None

    def _users(self, numbers: Sequence[int], gone: list[str]) -> list[str]:
        """Return the paths of the modules that run some operators, without those that go."""
        paths = dict.fromkeys(self.operators[one].module for one in numbers)
        return [path for path in paths if not is_inside(path, gone)]

    def _chain(self) -> list[int]:
        """Return the operators from the summand back to the one that reads what vanished."""
        chain = [self.end]
        while True:
            reads = self.operators[chain[-1]].reads
            computed = [read for read in reads if read in self._dependent]
            if any(read in self.vanished for read in reads):
                if computed:
                    raise StaysError("its constant is a sum of several")
                return chain
            chain = [*chain, computed[0]] if len(computed) == 1 else self._over_a_module(chain)

    def _over_a_module(self, chain: list[int]) -> list[int]:
        """Return a chain that passes over the module in which it forks, as over a norm made of several operators."""
        for call in self.search.run.module_calls:
            if call.first <= chain[-1] < call.end and call.outputs[:1] and call.outputs[0] in chain:
                made = call.inputs[0] if call.inputs else None
                if made is not None and made in self._dependent:
                    return [*chain[: chain.index(call.outputs[0]) + 1], made]
        raise StaysError("its constant is computed in several ways")

    @cached_property
    def _dependent(self) -> set[int]:
        """Constants that are computed from what vanished, and not from parameters alone."""
        found = set[int]()
        for number in sorted(self.constant):
            if not found.isdisjoint(reads := self.operators[number].reads) or not self.vanished.isdisjoint(reads):
                found.add(number)
        return found

    def _constant_of(self, chain: list[int]) -> tuple[str | None, list[int]]:
        """Return the name of the bias that is the constant, and the operators behind it, from the last back."""
        tail = list[int]()
        others = {name for one in self._dependent for name in self.operators[one].tensors if is_bias(name)}
        for number in chain:
            operator = self.operators[number]
            bias = next((name for name in operator.tensors if is_bias(name)), None)
            if bias is not None and operator.name in Trait.AFFINE:
                if self._reads_in_a_pass(bias) != {number}:
                    raise StaysError("its bias is also used elsewhere")
                return bias, tail
            scaled = operator.name in Trait.SCALES and len(operator.tensors) == 1
            follows = operator.name in Trait.KEEPS_CONSTANTS or scaled or is_function(operator)
            if bias is None and follows:  # it may run on a constant that is as small as its channels
                tail.append(number)
                continue
            if others:
                raise StaysError(f"its constant is changed by {operator.name}")
            break
        return None, [one for one in tail if self.operators[one].name in Trait.KEEPS_CONSTANTS]

    def _reads_in_a_pass(self, name: str) -> set[int]:
        """Return the operators that read a tensor: all in the first pass, in later ones those outside the branch."""
        first = self.search.passes[0]
        return {one for one in self.search.uses[name] if one < first.end or one not in self.inside}

    def _modules(self, body: set[int], also: set[int]) -> list[str]:
        """Return the outermost modules all of whose operators, and tensors, belong to the branch alone."""
        allowed, chart = body | also, self.chart
        found = list[str]()
        for call in sorted(self.search.run.module_calls, key=lambda one: one.path.count(".")):
            path = call.path
            once = call is self.search.call_of[path] and self.search.calls[path] == len(self.search.passes)
            if not path or is_inside(path, found) or not once or call.first == call.end:
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
            raise StaysError("its last layer returns something else besides")
        own, given = out_shape(self.operators[made]), call.inputs[0] if call.inputs else None
        as_input = given is not None and given >= 0 and out_shape(self.operators[given]) == own
        axis = None if bias is None else self._axis(bias, made, chain)
        shape = tuple(-1 if index == axis else 1 for index in range(len(own)))
        name = None if bias is None else bias.removeprefix(f"{path}.")
        return Replacement(path, True, name, shape, call.place, as_input=as_input)

    def _axis(self, bias: str, made: int, chain: list[int]) -> int:
        """Return the axis along which the bias lies in the result of an operator of the chain, behind its own."""
        own = next(one for one in chain if bias in self.operators[one].tensors)
        operator = self.operators[own]
        shape = out_shape(operator)
        axis = len(shape) - 1 if operator.name in Trait.LAST_AXIS else 1
        for number in reversed(chain[chain.index(made) : chain.index(own)]):
            axis = moved_axis(self.operators[number], axis)
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
        """Return the one module that goes with all the layers, or else the module around those that go."""
        counted = [
            path for path in gone
            if any(self.operators[one].name in Trait.COUNTED and is_inside(self.operators[one].module, [path])
                   for one in self.inside)
        ]  # fmt: skip
        return counted[0] if len(counted) == 1 else self.search.around(gone) or counted[0]

    def _with_body(self, branch: Branch, body: set[int], gone: list[str]) -> tuple[Branch, ModuleBody]:
        """Return the branch with the steps that go from the code of the module around it, and all of that code."""
        path = self.search.around([*gone, self.operators[self.join].module])
        call = self.search.call_of.get(path)
        passes = len(self.search.passes)
        if not path or call is None or self.search.calls[path] != passes or not call.first <= self.join < call.end:
            raise StaysError("the code around it cannot be written as steps")
        code = code_of(self.search, call)
        holder = next(one.module for one in branch.replacements if one.constant)
        steps, number, dead = list(code.steps), code.made, list[int]()
        for index, covered in enumerate(code.covers):
            step = steps[index]
            if step[0] == "call" and f"{path}.{step[1]}" == holder:
                continue
            passes_on = not covered and any(value - 1 in dead for value in read_by(step))
            if passes_on or (covered & body and covered - body <= self.search.idle(covered - body, body)):
                dead.append(index)
        lost = {index + 1 for index in dead}
        for index, step in enumerate(steps):
            if index in dead:
                continue
            if step[0] == "other":
                raise StaysError(f"the code around it runs {step[1]}, which is no step")
            if step[0] == "call" and f"{path}.{step[1]}" == holder:
                continue
            if any(value in lost for value in read_by(step)):
                raise StaysError("the code around it reads what goes")
        if number.get(code.result) is None or number[code.result] in lost:
            raise StaysError("the module around it returns something else")
        whole = ModuleBody(path, tuple(steps), number[code.result])
        shared = (f"{path}.{steps[index][1]}" for index in dead if steps[index][0] in ("call", "other"))
        small = dict.fromkeys([*branch.small, path, *(one for one in shared if not is_inside(one, gone))])
        return replace(branch, name=path, body=path, steps=tuple(dead), small=tuple(small)), whole


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
        if search.call_of[call.path] is not call or not search.weight(inside):
            continue
        found = _part(search, call.path, made, inside)
        if found is not None and not own - inside - search.idle(own - inside, set(inside)):
            yield inside, found


def _is_part(search: RunSearch, number: int) -> bool:
    """Return whether only concatenations read a result, and each has other parts besides."""
    readers = [search.operators[one] for one in search.consumers[number]]
    joined = all(reader.name in Trait.JOINS and len(reader.reads) > 1 for reader in readers)
    return bool(readers) and joined and number not in search.run.returned


def _part(search: RunSearch, path: str, made: int, inside: frozenset[int]) -> Branch | None:
    """Return the part that a module computes; None if its output channels may not all go, or are not its own."""
    chart, operator = search.chart, search.operators[made]
    axis = search.operators[search.consumers[made][0]].axis(1)  # along which its first reader concatenates it
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
    if not sizes or any(size[:axis] + size[axis + 1 :] != shape[:axis] + shape[axis + 1 :] for size in sizes):
        return None  # its module cannot tell the size of what it returns from what it is given
    inner = [labels for labels in search.groups_of(inside) if not np.isin(labels, rows).any()]
    instead = (Replacement(path, empty=axis),)
    return Branch(path, (*ending, *inner), rows, instead, layers=search.weights_of(inside))
