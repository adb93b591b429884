"""The operators of a forward pass, as a trace records them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from prunekit.channels.constraints import Constraint
from prunekit.channels.labels import Field
from prunekit.channels.running import ModuleCall
from prunekit.channels.sites import Site
from prunekit.channels.storages import shape_of


@dataclass(eq=False, slots=True)
class Operator:
    """One operator call of a run: where it ran, what went in, and the fields of its inputs and outputs."""

    name: str
    module: str
    outputs: tuple[tuple[Field, ...], ...]
    inputs: tuple[Field, ...]
    counted: bool  # no view or plain copy, which a model needs or not depending on its widths; not of a substitute
    call: tuple[Any, ...]  # shapes of its tensors, and all other arguments
    site: Site | None = None  # where the model's Python gave it sizes
    owner: str = ""  # the module whose method that was
    caller: Site | None = None  # where a method called the function, outside of any method, in which it ran
    constraints: tuple[Constraint, ...] = ()  # that it left
    module_call: ModuleCall | None = None  # which of the calls of its module it ran in
    reads: tuple[int, ...] = ()  # operators, by their number in the run, whose results it took; -1: the model's inputs


_SAME_VALUES = frozenset(f"aten.{name}" for name in ("clone", "_to_copy", "contiguous", "_unsafe_view", "as_strided_"))


def is_counted(func: Any, name: str) -> bool:
    """Whether an operator has a number of its own in the trial: views and plain copies do not."""
    return not func.is_view and name not in _SAME_VALUES


def signature(args: tuple[Any, ...], kwargs: dict[str, Any], outs: tuple[torch.Tensor, ...]) -> tuple[Any, ...]:
    """What decides how labels flow through a call, apart from the labels themselves."""

    def plain(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return shape_of(value)
        return [plain(item) for item in value] if isinstance(value, (list, tuple)) else value

    return [plain(arg) for arg in args], {k: plain(v) for k, v in kwargs.items()}, [shape_of(out) for out in outs]


@dataclass(eq=False)
class Run:
    """The operators of one forward pass, in order, and which of the examples it was for.

    `repeats` says that it did exactly what the run before it did, label for label. `borrowed` are paths of modules that
    used a tensor of another module's while they ran, each with the path of that owner. `gradients` were recorded, as
    forward itself takes some. `uses_own` says that an operator read a parameter or buffer of the model.
    """

    example: int
    training: bool
    repeats: bool = False
    gradients: bool = False
    uses_own: bool = False
    operators: list[Operator] = field(default_factory=list)
    borrowed: set[tuple[str, str]] = field(default_factory=set)
