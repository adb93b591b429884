"""Code of a module as steps, from what one of its calls ran."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torch import nn

from prunekit.channels.depth.run_search import SCALED, SUMS, RunSearch, StaysError, is_function
from prunekit.channels.labels.branch import Step, is_inside
from prunekit.channels.tracing.traced_run import TracedCall, TracedOperator

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
    if not call.plain or not call.inputs or call.inputs[0] is None or len(call.outputs) != 1 or call.place is not None:
        raise StaysError("the module around it takes or returns something else than one tensor")
    if call.path in search.run.asks_mode:
        raise StaysError("the code around it is another one in train mode")
    inner = [one for one in search.run.module_calls if one.first >= call.first and one.end <= call.end
             and one is not call and is_inside(one.path, [call.path])]  # fmt: skip
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
    starts = {one.first: one for one in children if one.first < one.end}
    model = search.chart.traced.trace.model()
    while number <= call.end:
        for one in children:
            if one.first == one.end == number and not isinstance(model.get_submodule(one.path), nn.Identity):
                _require_one_reader(search, call, one)
                if (value := made.get(one.inputs[0])) is not None:  # type: ignore[arg-type]
                    add(("call", one.path.removeprefix(f"{call.path}."), value), set(), one.outputs)
        if number == call.end:
            break
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
