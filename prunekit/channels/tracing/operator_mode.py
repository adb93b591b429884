"""A dispatch mode that sees every operator of a run, those inside of higher-order operators included."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, Self

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from prunekit.utils.private_torch import HigherOrderOperator, explicit_kernel, is_composite
from prunekit.utils.tensors import gather


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


NOISE = frozenset({f"aten.{name}" for name in ("normal", "normal_", "randn", "randn_like")})
"""Operators that draw numbers around 0: those of a removed channel are removed with it."""
_BELOW_ONE = frozenset({f"aten.{name}" for name in ("uniform", "uniform_", "rand", "rand_like")})
RANDOM = NOISE | _BELOW_ONE | {f"aten.{name}{suffix}" for suffix in ("", "_") for name in ("bernoulli", "exponential")}


def without_randomness(name: str, out: Any) -> Any:
    """Set the random numbers or unwritten memory that an operator returned to fixed values, in place, and return it.

    Two models of different widths cannot draw the same numbers.
    """
    if isinstance(out, torch.Tensor):
        if name in RANDOM:
            out.fill_(0.999 if name in _BELOW_ONE else 1.0)  # code takes the logarithm of -log(x), not 0 below 1
        elif name == "aten.randperm":
            torch.arange(out.numel(), out=out)
        elif "empty" in name:
            out.zero_()
    return out
