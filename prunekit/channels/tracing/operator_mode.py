"""A dispatch mode that sees every operator of a run, those inside of higher-order operators included."""

import inspect
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, Self

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from prunekit.channels.rules.indexing import numbers_in, remember
from prunekit.channels.rules.rule import Trait
from prunekit.utils.private_torch import HigherOrderOperator, explicit_kernel, is_composite
from prunekit.utils.tensors import gather, map_tensors


class OperatorMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode whose `operator` is called for every ATen operator that runs inside it.

    A higher-order operator, such as `torch.cond` or flex attention, runs functions that it is given, and ATen operators
    around them. It runs as in torch's eager mode with this mode still on, so that each of these is seen like any other.
    Where torch allows no mode around it, only those in its functions are seen, and `opaque` is called for the rest.
    Compiled functions run uncompiled.
    """

    supports_higher_order_operators = True

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)  # type: ignore[no-untyped-call]

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._stances: list[Any] = []

    def __enter__(self) -> Self:
        stance = torch.compiler.set_stance("force_eager")  # it is set by making this
        try:
            self._stances.append(stance)
            super().__enter__()  # type: ignore[no-untyped-call]
        except BaseException:
            stance.__exit__(None, None, None)
            raise
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._stances.pop().__exit__(*error)

    def operator(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run an ATen operator and return its result."""
        raise NotImplementedError

    def opaque(self, name: str, tensors: tuple[torch.Tensor, ...], out: Any) -> None:
        """Handle a higher-order operator that computed `out` from some tensors by operators that were not seen."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if isinstance(func, HigherOrderOperator):
            return self._higher_order(func, args, kwargs or {})
        if not types and _is_composite(func) and not any(tensor.is_nested for tensor in gather(args)):
            with self:
                return func.decompose(*args, **(kwargs or {}))
        return self.operator(func, args, kwargs or {})

    def _higher_order(self, func: HigherOrderOperator, args: Any, kwargs: dict[str, Any]) -> Any:
        kernel = explicit_kernel(func)
        if kernel is not None and not _wants_no_mode(kernel):
            with self:
                return kernel(*args, **kwargs)
        known = gather((args, kwargs))
        given = len(known)

        def observed(function: Callable[..., Any]) -> Callable[..., Any]:
            def run(*args: Any, **kwargs: Any) -> Any:
                with self:
                    result = function(*args, **kwargs)
                known.extend(gather(result))
                return result

            return run

        out = func(*tree_map_only(_FUNCTIONS, observed, args), **tree_map_only(_FUNCTIONS, observed, kwargs))
        here = {id(tensor) for tensor in known[given:]}
        if not all(id(tensor) in here for tensor in gather(out)):
            self.opaque(f"higher_order.{func.__name__}", tuple(known), out)
        return out


def run_operator(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Run an ATen operator that a dispatch mode was given.

    Traced code keeps Python's numbers as tensors, but torch passes `_local_scalar_dense` the number itself.
    """
    if func is torch.ops.aten._local_scalar_dense.default and not isinstance(args[0], torch.Tensor):
        return args[0]
    return func(*args, **kwargs)


@cache
def _is_composite(func: Any) -> bool:
    """Return whether an operator is made of others, which a mode below autograd would not see."""
    return is_composite(func.name())


_FUNCTIONS = (type(lambda: None), torch.nn.Module)


def _wants_no_mode(kernel: Callable[..., Any]) -> bool:
    """Return whether torch's eager code for a higher-order operator asserts that no dispatch mode is on."""
    code = getattr(inspect.unwrap(kernel), "__code__", None)
    return code is None or "_get_current_dispatch_mode" in code.co_names


def without_randomness(name: str, out: Any) -> Any:
    """Set the random numbers or unwritten memory that an operator returned to fixed values, in place, and return it.

    Two models of different widths cannot draw the same numbers.
    """
    if isinstance(out, torch.Tensor):
        if name in Trait.RANDOM:
            out.fill_(0.999 if name in Trait.BELOW_ONE else 1.0)  # code takes the logarithm of -log(x), not 0 below 1
        elif name == "aten.randperm":
            torch.arange(out.numel(), out=out)
        elif "empty" in name:
            out.zero_()
    return out


Shortcut = Callable[[tuple[Any, ...], dict[str, Any]], Any]
_UNARY = (
    "relu", "relu6", "hardtanh", "hardswish", "silu", "gelu", "elu", "selu", "leaky_relu", "tanh", "sigmoid",
    "hardsigmoid", "softplus", "mish", "neg", "exp",
)  # fmt: skip


def _like(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def _same(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return NotImplemented if kwargs else _like(args[0])


def _batch_norm(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return _like(args[0]), args[0].new_empty(0), args[0].new_empty(0)


SHORTCUTS: dict[str, Shortcut] = {
    **{f"aten.{name}": _same for name in (*_UNARY, "clone")},
    **{f"aten.{name}_": lambda args, kwargs: args[0] for name in _UNARY},
    "aten._native_batch_norm_legit_no_training": _batch_norm,
    "aten.native_batch_norm": lambda args, kwargs: NotImplemented if args[5] else _batch_norm(args, kwargs),
}
"""Operator -> a function that returns its output, or NotImplemented if torch must compute it."""


class OnMeta(OperatorMode):
    """Runs all operators as a trace does, on meta tensors and on others."""

    def operator(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run an operator."""
        return run_on_meta(func, str(func._schema.name).replace("::", "."), args, kwargs)


def run_on_meta(func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operator on meta tensors, by a shortcut if there is one for this case.

    Integers and booleans that depend on no floating-point number, such as positions and attention masks, are computed
    as well, so that code may look at them; see `numbers_in`.
    """
    shortcut = SHORTCUTS.get(name)
    if shortcut is not None and isinstance(args[0], torch.Tensor) and args[0].is_meta and args[0].is_floating_point():
        out = shortcut(args, kwargs)
        if out is not NotImplemented:
            return out
    by_numbers = torch.Tag.data_dependent_output in func.tags or torch.Tag.dynamic_output_shape in func.tags
    if by_numbers and any(tensor.is_meta for tensor in gather((args, kwargs))):
        found = _with_numbers(func, args, kwargs)
        if found is not None:
            return map_tensors(found, _on_meta)
    out = run_operator(func, args, kwargs)
    whole = [tensor for tensor in gather(out) if tensor.is_meta and not tensor.is_floating_point()]
    if whole:
        found = _with_numbers(func, args, kwargs)
        numbers = iter([one for one in gather(found) if not one.is_floating_point()])
        for tensor in whole:
            remember(tensor, next(numbers, None))
    elif func._schema.is_mutable and not func._schema.returns:  # written to without being returned
        for tensor in gather((args, kwargs)):
            remember(tensor, None)
    return out


def _on_meta(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor on the meta device, which remembers its numbers."""
    found = tensor.to("meta")
    remember(found, None if tensor.is_floating_point() else tensor)
    return found


def _with_numbers(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the result of an operator on the numbers that tensors hold; None if some are unknown, or are floats."""
    given = gather((args, kwargs))
    if torch.Tag.nondeterministic_seeded in func.tags or any(numbers_in(tensor) is None for tensor in given):
        return None
    args, kwargs = map_tensors((args, kwargs), lambda tensor: numbers_in(tensor).cpu())  # type: ignore[union-attr]
    kwargs = {key: "cpu" if key == "device" and value is not None else value for key, value in kwargs.items()}
    return run_operator(func, args, kwargs)
