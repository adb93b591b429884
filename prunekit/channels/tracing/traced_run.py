"""A traced run: the operators of one forward pass, as a trace records them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from types import CodeType
from typing import Any

import torch

from prunekit.channels.labels.code_places import Expression, ModuleCall
from prunekit.channels.labels.constraints import Constraint
from prunekit.channels.labels.fields import Field
from prunekit.channels.rules.rule import Trait
from prunekit.channels.tracing.cached_state import ModelCalls
from prunekit.channels.tracing.call_sites import Site, is_ordering
from prunekit.channels.tracing.execution import Alternatives
from prunekit.channels.tracing.storages import shape_of
from prunekit.utils.inputs import concatenate


@dataclass(eq=False, slots=True)
class TracedOperator:
    """One operator call of a run: where it ran, its arguments, and the fields of its inputs and outputs."""

    name: str
    module: str
    outputs: tuple[tuple[Field, ...], ...]
    inputs: tuple[Field, ...]
    counted: bool  # not a view or plain copy, which may depend on the widths; not in a substitute
    call: tuple[Any, ...]  # shapes of its tensors, and all other arguments
    site: Site | None = None  # where the model's Python gave it sizes
    owner: str = ""  # the module whose method that was
    caller: Site | None = None  # where a method called the plain function in which it ran
    function: CodeType | None = None  # that function, if its first argument is the module
    constraints: tuple[Constraint, ...] = ()  # those that its rule left
    module_call: ModuleCall | None = None  # the call of its module in which it ran
    reads: tuple[int, ...] = ()  # the numbers of the operators whose results it read; -1: the model's inputs
    tensors: tuple[str, ...] = ()  # names of the parameters and buffers that it read
    aside: bool = False  # leads only to numbers that the model keeps aside


@dataclass(frozen=True, slots=True)
class TracedCall:
    """One call of a module in a run.

    Attributes:
        path: of the module.
        inputs: by argument, the number of the operator that made a tensor, -1 for one of the model's inputs; None for
            an argument that is no single tensor.
        outputs: the numbers of the operators that made the tensors that it returned.
        place: where the first of them is in a tuple that it returned, and how many entries that has; None if it
            returned a tensor.
        first: number of the first operator in it.
        end: number behind the last operator in it.
        plain: whether all arguments but the first are None, and none is given by name.
    """

    path: str
    inputs: tuple[int | None, ...]
    outputs: tuple[int, ...]
    place: tuple[int, int] | None
    first: int
    end: int
    plain: bool


def is_counted(func: Any, name: str) -> bool:
    """Return whether the trial numbers an operator: not views and plain copies, and not what a plan had put in."""
    return not (func.is_view or name in Trait.COPIES or (name == "aten.index_select" and is_ordering()))


def signature(args: tuple[Any, ...], kwargs: dict[str, Any], outs: tuple[torch.Tensor, ...]) -> tuple[Any, ...]:
    """Return everything but the labels that decides how labels flow through a call."""

    def plain(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return shape_of(value)
        return [plain(item) for item in value] if isinstance(value, (list, tuple)) else value

    return [plain(arg) for arg in args], {k: plain(v) for k, v in kwargs.items()}, [shape_of(out) for out in outs]


@dataclass(eq=False)
class TracedRun:
    """The operators of one forward pass, in order.

    Attributes:
        example: number of the example.
        doubled: whether it ran on every sample of the example twice, as another number of samples.
        training: whether it ran in train mode.
        repeats: whether it did exactly what the run before it did, label for label.
        gradients: whether gradients were recorded, because forward itself takes some.
        calls: how the model is called on the example, and which of its outputs are read.
        uses_own: whether an operator read a parameter or buffer of the model.
        operators: every operator call.
        borrowed: paths of modules that read a tensor of another module, each with the path of that owner.
        alternatives: modules that ran besides, because others like them did.
        whole: expressions whose tensors, at least once, are not to be taken at stated positions.
        module_calls: every call of a module, in the order in which they ended.
        returned: numbers of the operators that made the model's outputs.
        asks_mode: paths of modules, except for torch's own layers, whose code reads whether they are in train mode.
        aside: numbers of operators that lead only to numbers that the model keeps aside; found when it ended, or given.
    """

    example: int
    training: bool
    repeats: bool = False
    gradients: bool = False
    calls: ModelCalls = field(default_factory=ModelCalls)
    uses_own: bool = False
    operators: list[TracedOperator] = field(default_factory=list)
    borrowed: set[tuple[str, str]] = field(default_factory=set)
    alternatives: Alternatives = field(default_factory=dict)
    whole: set[Expression] = field(default_factory=set)
    module_calls: list[TracedCall] = field(default_factory=list)
    returned: set[int] = field(default_factory=set)
    asks_mode: set[str] = field(default_factory=set)
    aside: frozenset[int] = frozenset()
    doubled: bool = False

    def again(self, **changes: Any) -> TracedRun:
        """Return another run of the same example, of which nothing is recorded yet."""
        return replace(self, operators=[], borrowed=set(), module_calls=[], returned=set(), **changes)

    def inputs(self, examples: Sequence[tuple[Any, ...]]) -> tuple[Any, ...]:
        """Return what the model runs on, given all examples."""
        own = examples[self.example]
        return concatenate([own, own]) if self.doubled else own
