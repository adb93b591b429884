"""The dispatch mode in which labels flow through every operator of a run.

Every index of every axis of a parameter has a label. A *field* on a tensor says which label each index of an axis has:
the output of a convolution has, on axis 1, the labels of axis 0 of its weight. `LabelMode` sees each operator
y = f(a, b) as torch runs it; no graph is built. `LabelMode._note` takes three steps for each:

    a: fields --+
                +--> rule of f --> y: fields          fields(y) = rule_f(fields(a), fields(b))
    b: fields --+       |
                        +--> merged and locked labels, constraints, multiply-accumulates

    1. read:    a and b are used now, which sets the locks that waited for a reader
    2. flow:    the rule gives y its fields, and says which labels belong together or must stay
    3. record:  a `TracedOperator` with the fields, what made a and b, and where in the model's Python f stands

What holds after each operator, and what the trial relies on:

1. Never guessed: an operator without a rule locks every label that it reads.
2. Operators have numbers in the order in which they run; `made_by` has the number of the one that made a tensor, by the
   tensor's `id`. No `id` is used twice in a run, because `Storages` keeps all tensors of it alive.
3. A run that repeats the one before, as train mode repeats eval mode, gives its tensors the very same `Field` objects,
   and leaves no second constraint. Where the two part ways, the rules run again.
4. Results that lead to nothing but numbers that the model keeps aside, such as auxiliary losses, have no fields, and
   lock nothing.
"""

from collections.abc import Container, Iterable, Sequence
from dataclasses import replace
from types import CodeType
from typing import Any

import torch

from prunekit.channels.labels.constraints import FixedPositions
from prunekit.channels.labels.label_flow import BUFFER_INSTEAD, MEETS_FIXED, Field, LabelFlow, MadeAxes
from prunekit.channels.rules.convolution import FIXED_PARTNER
from prunekit.channels.rules.rule import OperatorCall, Trait, rule_of
from prunekit.channels.tracing.call_sites import RunningExpression, Site, caller_here, site_here
from prunekit.channels.tracing.execution import PRUNE_FIRST, ModuleStack, is_quantizing, quantized_parts
from prunekit.channels.tracing.operator_mode import OperatorMode, run_on_meta, without_randomness
from prunekit.channels.tracing.storages import Storages, inner_of
from prunekit.channels.tracing.traced_run import TracedCall, TracedOperator, TracedRun, is_counted, signature
from prunekit.hooks.model_copy import named_tensors, owners
from prunekit.utils.tensors import gather

INSTEAD_OF_NESTED = "none follows nested tensors: give an example with as many tokens in each sample, without nesting"
GIVEN = "input {}: if that is a state, let forward make it where none is given, and give none in the example"


class LabelMode(OperatorMode):
    """A dispatch mode that applies the rules to every operator that runs inside it."""

    def __init__(
        self, flow: LabelFlow, run: TracedRun, stack: ModuleStack, earlier: TracedRun | None, inputs: Any
    ) -> None:
        super().__init__()
        self.made_by = {id(tensor): -1 for tensor in gather(inputs)}  # no id is reused: the storages hold them
        self.given = {id(tensor) for tensor in gather(inputs)}
        self.made_axes = MadeAxes()
        flow.of_input = lambda tensor, axis: id(tensor) in self.given and not self.made_axes.made(tensor, axis)
        self.beside = {id(tensor): tuple(tensor.shape) for tensor in gather(inputs)[1:]}
        self.flow, self.run, self.stack = flow, run, stack
        self.earlier = earlier.operators if earlier is not None else []
        self.storages = Storages()
        self.owners = owners(stack.model)
        self.names = {id(tensor): name for name, tensor in named_tensors(stack.model)}
        self.quantized = quantized_parts(stack.model)
        self._begun: list[tuple[int, tuple[int | None, ...], bool]] = []

    def operator(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run an operator, and let labels flow through it."""
        name = str(func._schema.name).replace("::", ".")
        out = without_randomness(name, run_on_meta(func, name, args, kwargs))  # as in the trial
        self._note(name, args, kwargs, out, counted=is_counted(func, name))
        return out

    def begin(self, inputs: Any) -> None:
        """Note the arguments with which a call of a module begins."""
        args, named = inputs
        made = tuple([self.made_by.get(id(arg)) for arg in args])
        plain = not named and all(arg is None for arg in args[1:])
        self._begun.append((len(self.run.operators), made, plain))

    def end(self, path: str, output: Any) -> None:
        """Record the call of a module that ends."""
        first, made, plain = self._begun.pop()
        outputs, place = self.makers(output), None
        if isinstance(output, tuple):
            tensors = [index for index, value in enumerate(output) if isinstance(value, torch.Tensor)]
            place = (tensors[0] if tensors else 0, len(output))
        self.run.module_calls.append(TracedCall(path, made, outputs, place, first, len(self.run.operators), plain))

    def makers(self, value: Any) -> tuple[int, ...]:
        """Return the numbers of the operators that made the tensors in a value."""
        return tuple([self.made_by[id(tensor)] for tensor in gather(value) if id(tensor) in self.made_by])

    def opaque(self, name: str, tensors: tuple[torch.Tensor, ...], out: Any) -> None:
        """Let labels flow through a higher-order operator as a whole."""
        self._note(name, tensors, {}, out, counted=False)

    def _note(self, name: str, args: Any, kwargs: dict[str, Any], out: Any, *, counted: bool) -> None:
        """Let labels flow through an operator that ran, and record it, in the three steps at the head of this file."""
        flow, number = self.flow, len(self.run.operators)
        flow.module, flow.call, flow.operator = self.stack.current, self.stack.call, name
        call, outs = OperatorCall(name, args, kwargs, out), tuple(gather(out))
        inputs = gather((args, kwargs))
        inputs += [inner for tensor in inputs for inner in inner_of(tensor)]
        aside = number in self.run.aside

        # 1. read
        self._read(inputs, outs)
        for tensor in () if aside else inputs:
            flow.read(tensor, drops_axes=name in Trait.DROPS_AXES)
        before = () if aside else tuple([field for tensor in inputs for field in flow.fields(tensor)])

        # 2. flow
        flow.expression = self._expression(name, inputs) if before else None
        target = args[0] if name.endswith("_") and args and isinstance(args[0], torch.Tensor) else None
        arguments, earlier = signature(args, kwargs, outs), len(flow.constraints)
        if aside:
            for tensor in outs:
                flow.set(tensor, ())
        else:
            if not (self.earlier and self._repeats(name, before, arguments, outs)):
                self.run.repeats = False
                self._flow(call, target, inputs, before)
            self._make_axes(call, inputs, before)

        # 3. record; what is multiplied by a float may be the scores of attention, whose scale is made of a size
        sized = name in Trait.SIZED or (name == "aten.mul" and isinstance(args[1], float))
        operator = TracedOperator(
            name,
            flow.module,
            tuple([flow.fields(tensor) for tensor in outs]),
            before,
            counted and flow.module not in flow.substituted,
            arguments,
            *(self._place() if (before and sized) or name in Trait.MAKES else (None, "", None, None)),
            tuple(flow.constraints[earlier:]),
            self.stack.call,
            tuple(dict.fromkeys([self.made_by[id(tensor)] for tensor in inputs if id(tensor) in self.made_by])),
            tuple([self.names[id(tensor)] for tensor in inputs if id(tensor) in self.names]),
            aside,
        )
        # last: an operator that writes in place returns its own input, which another one had made until now
        self.made_by.update(dict.fromkeys(map(id, outs), number))
        self.run.operators.append(operator)
        self.storages.note(operator, target, inputs, outs)

    def _read(self, inputs: Sequence[torch.Tensor], outs: Iterable[torch.Tensor]) -> None:
        """Note what an operator reads: parameters, those of other modules too, and what comes from the inputs."""
        for tensor in inputs:
            owners = self.owners.get(id(tensor), ())
            self.run.uses_own = self.run.uses_own or bool(owners)
            if self.flow.module not in owners:
                self.run.borrowed.update([(self.flow.module, owner) for owner in owners])
        if any(id(tensor) in self.given for tensor in inputs):
            self.given.update(map(id, outs))

    def _flow(self, call: OperatorCall, target: Any, inputs: list[torch.Tensor], before: tuple[Field, ...]) -> None:
        """Apply the rule of an operator, or lock all that it reads; say more in its locks than the rule knows."""
        flow, outs = self.flow, tuple(gather(call.out))
        known, locks, earlier = flow.fields(target), len(flow.locks), len(flow.constraints)
        if before or call.name in Trait.COUNTED or call.name in Trait.MAKES:
            rule = rule_of(call.name)
            tensors = gather((call.args, call.kwargs, call.out))
            if rule is None or any(tensor.is_nested or inner_of(tensor) for tensor in tensors):
                flow.lock(before, _without_rule(call.name, tensors))
                for tensor in outs:  # in place: what is known of its shape may be wrong now
                    flow.set(tensor, ())
            else:
                rule(flow, call)
        if flow.expression and not any(isinstance(one, FixedPositions) for one in flow.constraints[earlier:]):
            self.run.whole.add(flow.expression)
        self._name_given(inputs, outs, locks)
        if flow.module in self.quantized:
            self._advise(locks, {record.reason for record in flow.locks[locks:]}, f"; {PRUNE_FIRST}")
        if target is not None and call.name not in Trait.RESHAPES_IN_PLACE:
            self._written(target, known)

    def _expression(self, name: str, inputs: Sequence[torch.Tensor]) -> RunningExpression | None:
        """Return the running expression, if one of its tensors may be taken at stated positions."""
        takes = name in Trait.PICKS or (name in Trait.MEETS and len(inputs) == 2)
        if not takes or self.flow.module in self.flow.substituted:
            return None
        here = site_here(4)
        return None if here is None else RunningExpression(here[0], self.stack.path_of(here[1]))

    def _make_axes(self, call: OperatorCall, inputs: Sequence[torch.Tensor], before: tuple[Field, ...]) -> None:
        """Follow the axes that the model's code makes on tensors computed from inputs; parameters have their own."""
        given = [tensor for tensor in inputs if id(tensor) in self.given]
        if len(given) == len(inputs) and not any(self.made_axes.fields(tensor) for tensor in given):
            return
        rule = rule_of(call.name) if given and all(self.flow.is_made(field) for field in before) else None
        if rule is not None and not any(tensor.is_nested or inner_of(tensor) for tensor in inputs):
            for tensor in inputs:
                if id(tensor) not in self.given and not self.made_axes.fields(tensor):
                    self.made_axes.add(tensor)
            self.made_axes.module, self.made_axes.operator = self.flow.module, call.name
            rule(self.made_axes, call)

    def _place(self) -> tuple[Site | None, str, Site | None, CodeType | None]:
        """Return where a method stands, and the path of its module; or where it called the function that runs."""
        here = site_here(4)
        call = caller_here(4) if here is None else None
        site, owner = here or (None, None)
        caller, owner, function = call or (None, owner, None)
        return site, self.stack.path_of(owner), caller, function

    def _name_given(self, inputs: list[torch.Tensor], outs: tuple[torch.Tensor, ...], earlier: int) -> None:
        """Say in new locks that further inputs of the model fixed a size, and what to do if they are its states."""
        shape = next((self.beside[id(tensor)] for tensor in inputs if id(tensor) in self.beside), None)
        if shape is None:
            if self.flow.operator in Trait.MEETS and not all(
                id(tensor) in self.given or self.flow.fields(tensor) for tensor in inputs
            ):
                self._advise(earlier, (MEETS_FIXED,), BUFFER_INSTEAD)
        else:
            self.beside.update({id(tensor): shape for tensor in outs if not self.flow.fields(tensor)})
            self._advise(earlier, (MEETS_FIXED, FIXED_PARTNER), f"; {GIVEN.format(shape)}")

    def _advise(self, earlier: int, reasons: Container[str], advice: str) -> None:
        """Add advice to new locks of some reasons."""
        for index, record in enumerate(self.flow.locks[earlier:], earlier):
            if record.reason in reasons and not record.reason.endswith(advice):
                self.flow.locks[index] = replace(record, reason=record.reason + advice)

    def _repeats(self, name: str, before: tuple[Field, ...], call: Any, outs: tuple[torch.Tensor, ...]) -> bool:
        """Return whether the earlier run did exactly this, and if so take over the labels of its results."""
        index = len(self.run.operators)
        if index >= len(self.earlier):
            return False
        twin = self.earlier[index]
        same = twin.name == name and twin.module == self.flow.module and len(twin.inputs) == len(before)
        if not same or any(a is not b for a, b in zip(twin.inputs, before, strict=True)) or twin.call != call:
            return False
        for tensor, fields in zip(outs, twin.outputs, strict=True):
            self.flow.set(tensor, fields)
        return True

    def _written(self, target: Any, known: tuple[Field, ...]) -> None:
        """Record labels that an in-place write brings into a tensor, whose size depended on them from the start."""
        spans, axes = {field.span for field in known}, {axis for field in known for axis in field.span}
        unknown = [field for field in self.flow.fields(target) if field.span not in spans]
        # joint labels on axes that all had labels before are merged with those
        fresh = [field for field in unknown if len(field.span) == 1 or not set(field.span) <= axes]
        now_zero = {field.span for field in self.flow.fields(target) if field.zero}
        if lost := [field.labels for field in known if field.zero and field.span not in now_zero]:
            self.flow.forget_zeros(self.storages.sharing(target), lost)
        if fresh and self.storages.shared(target):  # other views of the storage do not have these labels
            self.flow.lock(fresh, "written in place into a view of another tensor")
        elif fresh and (maker := self.storages.maker(target)) is not None:
            maker.outputs = (self.flow.fields(target),)


def _without_rule(name: str, tensors: Iterable[torch.Tensor]) -> str:
    """Return the reason of locks at an operator without a rule, with what an expert would do."""
    every = list(tensors)
    nested, quantizes = any(tensor.is_nested for tensor in every), is_quantizing(name, every)
    advice = INSTEAD_OF_NESTED if nested else PRUNE_FIRST if quantizes else ""
    return f"operator {name} has no rule" + (advice and f"; {advice}")
