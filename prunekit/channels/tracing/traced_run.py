"""A traced run: the operators of one forward pass, as a trace records them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from types import CodeType
from typing import Any

import torch

from prunekit.channels.labels.code_places import Expression, ModuleCall
from prunekit.channels.labels.constraints import Constraint
from prunekit.channels.labels.label_flow import Field
from prunekit.channels.rules.rule import Trait
from prunekit.channels.tracing.cached_state import ModelCalls
from prunekit.channels.tracing.call_sites import Site, is_ordering
from prunekit.channels.tracing.execution import Alternatives
from prunekit.channels.tracing.storages import shape_of
from prunekit.utils.inputs import concatenate

Examples = list[tuple[Any, ...]]
"""Inputs of a model, each as positional arguments (see `prunekit.utils.inputs.as_example`)."""


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

    def axis(self, argument: int) -> int:
        """Return the axis that it works along, given as an argument of a position or by the name `dim`; 0 without."""
        args, named, outs = self.call
        return int(args[argument] if len(args) > argument else named.get("dim", 0)) % len(outs[0])


@dataclass(frozen=True, slots=True)
class TracedCall:
    """One call of a module in a run."""

    path: str  # of the module
    # by argument, the number of the operator that made a tensor, -1 for one of the model's inputs; None for an argument
    # that is no single tensor
    inputs: tuple[int | None, ...]
    outputs: tuple[int, ...]  # the numbers of the operators that made the tensors that it returned
    # where the first of them is in a tuple that it returned, and how many entries that has; None if it returned a
    # tensor
    place: tuple[int, int] | None
    first: int  # number of the first operator in it
    end: int  # number behind the last operator in it
    plain: bool  # whether all arguments but the first are None, and none is given by name

    @property
    def source(self) -> int | None:
        """The operator that made its input, if it takes one tensor and returns one; else None."""
        alone = self.plain and self.inputs and len(self.outputs) == 1 and self.place is None
        return self.inputs[0] if alone else None


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
    """The operators of one forward pass, in order."""

    example: int  # number of the example
    training: bool  # whether it ran in train mode
    repeats: bool = False  # whether it did exactly what the run before it did, label for label
    gradients: bool = False  # whether gradients were recorded, because forward itself takes some
    # how the model is called on the example, and which of its outputs are read
    calls: ModelCalls = field(default_factory=ModelCalls)
    uses_own: bool = False  # whether an operator read a parameter or buffer of the model
    operators: list[TracedOperator] = field(default_factory=list)  # every operator call
    # paths of modules that read a tensor of another module, each with the path of that owner
    borrowed: set[tuple[str, str]] = field(default_factory=set)
    alternatives: Alternatives = field(default_factory=dict)  # modules that ran besides, because others like them did
    # expressions whose tensors, at least once, are not to be taken at stated positions
    whole: set[Expression] = field(default_factory=set)
    # every call of a module, in the order in which they ended
    module_calls: list[TracedCall] = field(default_factory=list)
    returned: set[int] = field(default_factory=set)  # numbers of the operators that made the model's outputs
    # paths of modules, except for torch's own layers, whose code reads whether they are in train mode
    asks_mode: set[str] = field(default_factory=set)
    # numbers of operators that lead only to numbers that the model keeps aside; found when it ended, or given
    aside: frozenset[int] = frozenset()
    doubled: bool = False  # whether it ran on every sample of the example twice, as another number of samples

    def again(self, **changes: Any) -> TracedRun:
        """Return another run of the same example, of which nothing is recorded yet."""
        return replace(self, operators=[], borrowed=set(), module_calls=[], returned=set(), **changes)

    def inputs(self, examples: Sequence[tuple[Any, ...]]) -> tuple[Any, ...]:
        """Return what the model runs on, given all examples."""
        own = examples[self.example]
        return concatenate([own, own]) if self.doubled else own
