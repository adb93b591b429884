"""Shorter models: a constant, or nothing, in place of modules that go, and what is left of the code around them."""

from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from prunekit.channels.labels.branch import ModuleBody, Replacement, Shortening, Step
from prunekit.utils.tensors import gather

FUNCTIONS = frozenset(
    f"aten.{name}"
    for name in (
        "relu", "silu", "gelu", "hardtanh", "hardswish", "hardsigmoid", "leaky_relu", "elu", "sigmoid", "tanh", "mish",
        "softplus", "clamp", "clamp_min", "clamp_max", "neg", "abs", "square", "sqrt", "add", "sub", "mul", "div",
        "transpose", "permute", "slice", "constant_pad_nd",
    )
)  # fmt: skip
"""Functions of one tensor, and of numbers, that may be a step."""


class AbsentModule(nn.Module):
    """Stands in place of a module that is gone: returns its first argument, which nothing reads.

    `place` is where a tensor is in the tuple that the module returned, and its size; None if it returned a tensor.
    """

    def __init__(self, place: tuple[int, int] | None = None) -> None:
        super().__init__()
        self.place = place

    def forward(self, *args: Any, **named: Any) -> Any:
        """Return the first argument, among Nones where a tuple is expected."""
        first = args[0] if args else next(iter(named.values()), None)
        return in_place(first, self.place)


class ConstantModule(nn.Module):
    """Stands in place of a branch that is gone: returns a constant, one number for each channel.

    The constant has a `shape` that broadcasts to the result of the branch; `source` is the path of the parameter that
    holds it, None for zeros, and `place` is as for `AbsentModule`. In train mode it is as large as what it stands for
    where that has the shape of the first argument (`as_input`): what comes behind it may draw a random number for every
    entry.
    """

    def __init__(
        self,
        shape: Sequence[int],
        source: str | None = None,
        place: tuple[int, int] | None = None,
        *,
        as_input: bool = False,
    ) -> None:
        super().__init__()
        self.shape, self.source, self.place, self.as_input = tuple(shape), source, place, as_input

    def forward(self, *args: Any, **named: Any) -> Any:
        """Return the constant; arguments tell the type and the device of zeros."""
        first = next((one for one in (*args, *named.values()) if isinstance(one, Tensor)), None)
        constant = self._constant(first)
        if self.training and self.as_input and first is not None:
            constant = constant.expand(first.shape).clone()
        return in_place(constant, self.place)

    def _constant(self, first: Tensor | None) -> Tensor:
        """Return the constant in its own shape; zeros of the type and on the device of the first argument."""
        if self.source is None:
            assert first is not None
            return first.new_zeros(self.shape)
        found: Any = self
        for name in self.source.split("."):
            found = getattr(found, name)
        constant: Tensor = found.view(self.shape)
        return constant

    def extra_repr(self) -> str:
        """Return the shape and the parameter."""
        return f"shape={self.shape}, source={self.source!r}"


class EmptyModule(nn.Module):
    """Stands in place of a part of a concatenation that is gone: returns a tensor without channels.

    They lie on `axis`; along the others it is as large as the first tensor that the module is given.
    """

    def __init__(self, axis: int) -> None:
        super().__init__()
        self.axis = axis

    def forward(self, *args: Any, **named: Any) -> Tensor:
        """Return a tensor without entries."""
        return gather((args, named))[0].narrow(self.axis, 0, 0)

    def extra_repr(self) -> str:
        """Return the axis."""
        return f"axis={self.axis}"


class ShorterModule(nn.Module):
    """Stands in place of a module that lost branches of its own: runs what is left of its code, step by step.

    Its children, and the parameters that it reads itself, keep their names. It returns the value with the number
    `result` of those that its steps make (see `Step`); `original` is the name of the class that it replaces.
    """

    def __init__(self, steps: Sequence[Step], result: int, original: str) -> None:
        super().__init__()
        self.steps, self.result, self.original = tuple(steps), result, original
        self.gone: tuple[str, ...] = ()  # names of the children that went

    def forward(self, x: Tensor, *_: Any) -> Tensor:
        """Run the steps; arguments after the first were None in the original."""
        values: list[Any] = [x]
        for kind, *rest in self.steps:
            if kind == "call":
                child = self.get_submodule(rest[0])
                values.append(child(values[rest[1] or 0]))
            elif kind == "add":
                values.append(values[rest[0]] + values[rest[1]])
            elif kind == "mul":
                values.append(values[rest[0]] * values[rest[1]])
            elif kind == "parameter":
                values.append(getattr(self, rest[0]))
            else:
                values.append(_function(rest[0])(values[rest[2]], *rest[1]))
        found: Tensor = values[self.result]
        return found

    def extra_repr(self) -> str:
        """Return the class that it replaces, and the steps."""
        return f"in place of {self.original}, steps={self.steps}, result={self.result}"


def in_place(value: Any, place: tuple[int, int] | None) -> Any:
    """Return a value at its place in a tuple of Nones; the value itself if no tuple is expected."""
    if place is None:
        return value
    return tuple(value if index == place[0] else None for index in range(place[1]))


def _function(name: str) -> Any:
    if name not in FUNCTIONS:
        raise ValueError(f"{name!r} is no function of a step")
    return getattr(torch.ops.aten, name.removeprefix("aten."))


def shorten_(model: nn.Module, wanted: Shortening) -> None:
    """Replace the modules that go, and the code around them, in place; a model that is shorter already stays as it is.

    The constants are tensors that the model has.
    """
    ours = {cls.__name__ for cls in (*REPLACED, ShorterModule)}  # or of their names, in a file that has their source
    if any(type(module).__name__ in ours for module in model.modules()):
        return
    for one in wanted.replacements:
        set_submodule(model, one.module, _replacement(model.get_submodule(one.module), one))
    for body in wanted.bodies:
        set_submodule(model, body.module, _shorter(model.get_submodule(body.module), body))


REPLACED = (AbsentModule, ConstantModule, EmptyModule)
"""Classes that stand in place of a module with all that is in it."""


def shortening_of(model: nn.Module) -> Shortening:
    """Return what a model has in place of modules that went."""
    found, bodies = list[Replacement](), list[ModuleBody]()
    for path, module in model.named_modules():
        if isinstance(module, AbsentModule):
            found.append(Replacement(path, place=module.place))
        elif isinstance(module, EmptyModule):
            found.append(Replacement(path, empty=module.axis))
        elif isinstance(module, ConstantModule):
            found.append(Replacement(path, True, module.source, module.shape, module.place, as_input=module.as_input))
        elif isinstance(module, ShorterModule):
            found += [Replacement(f"{path}.{name}") for name in module.gone]
            bodies.append(ModuleBody(path, module.steps, module.result))
    return Shortening(tuple(found), tuple(bodies))


def set_submodule(model: nn.Module, path: str, module: nn.Module) -> None:
    """Put a module in place of another."""
    parent, _, name = path.rpartition(".")
    model.get_submodule(parent)._modules[name] = module


def _replacement(module: nn.Module, one: Replacement) -> nn.Module:
    if one.empty is not None:
        made: nn.Module = EmptyModule(one.empty)
    elif not one.constant:
        made = AbsentModule(one.place)
    else:
        made = ConstantModule(one.shape, one.bias, one.place, as_input=one.as_input)
        if one.bias is not None:
            _adopt(made, one.bias, module.get_parameter(one.bias))
    own = vars(made)
    for name, value in vars(module).items():
        if name not in own and isinstance(value, _ATOMS):
            own[name] = value  # code around it may ask, as `nn.TransformerEncoder` does for `batch_first`
    for name in module._parameters:
        if name not in made._parameters:
            made.register_parameter(name, None)
    return made.train(module.training)


_ATOMS = (bool, int, float, str, type(None))


def _adopt(holder: nn.Module, path: str, parameter: nn.Parameter) -> None:
    """Give a module a parameter at a path, with empty modules on the way."""
    *around, name = path.split(".")
    for part in around:
        holder._modules[part] = inner = nn.Module()
        holder = inner
    holder.register_parameter(name, parameter)


def _shorter(module: nn.Module, body: ModuleBody) -> nn.Module:
    """Return what is left of a module: the children that it still calls, and all that have tensors."""
    made = ShorterModule(body.steps, body.result, type(module).__name__)
    called = set()
    for kind, *rest in body.steps:
        if kind == "call":
            module.get_submodule(rest[0])
            called.add(rest[0].partition(".")[0])
        elif kind == "parameter":
            module.get_parameter(rest[0])
        elif kind == "function":
            _function(rest[0])
        elif kind not in ("add", "mul"):
            raise ValueError(f"{kind!r} is no step")
    for name, child in module._modules.items():
        if name in called or (child is not None and any(True for _ in chain(child.parameters(), child.buffers()))):
            made._modules[name] = child
        else:
            made.gone = (*made.gone, name)
    made._parameters.update(module._parameters)
    made._buffers.update(module._buffers)
    made._non_persistent_buffers_set |= module._non_persistent_buffers_set
    made.training = module.training
    return made
