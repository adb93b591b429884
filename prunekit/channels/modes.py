"""Dispatch modes that are shown every operator, those inside of higher-order operators included."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, Self

import torch
from torch._C import DispatchKey
from torch._ops import HigherOrderOperator
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from prunekit.nested import gather


class OperatorMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Is shown every ATen operator that runs inside it.

    A higher-order operator, such as `torch.cond` or flex attention, runs functions that it is given, and ATen operators
    around them. It is done as torch does it in eager with the mode still on, so each of these is shown like any other.
    Where torch wants no mode around it, those in its functions are shown, and `opaque` is told of the rest. Compiled
    code runs as it is written.
    """

    supports_higher_order_operators = True

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)  # type: ignore[no-untyped-call]

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._stances: list[Any] = []

    def __enter__(self) -> Self:
        stance = torch.compiler.set_stance("force_eager")
        stance.__enter__()
        self._stances.append(stance)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._stances.pop().__exit__(*error)

    def operator(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Runs an ATen operator, and returns its result."""
        raise NotImplementedError

    def opaque(self, name: str, tensors: tuple[torch.Tensor, ...], out: Any) -> None:
        """Is told of a higher-order operator that computed `out` of some tensors by operators that were not shown."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if isinstance(func, HigherOrderOperator):
            return self._higher_order(func, args, kwargs or {})
        if not types and _is_composite(func) and not any(tensor.is_nested for tensor in gather(args)):
            with self:
                return func.decompose(*args, **(kwargs or {}))
        return self.operator(func, args, kwargs or {})

    def _higher_order(self, func: HigherOrderOperator, args: Any, kwargs: dict[str, Any]) -> Any:
        kernel = func.py_kernels.get(DispatchKey.CompositeExplicitAutograd)
        if kernel is not None and not _wants_no_mode(kernel):
            with self:
                return kernel(*args, **kwargs)
        known = gather((args, kwargs))
        given = len(known)

        def shown(function: Callable[..., Any]) -> Callable[..., Any]:
            def inside(*args: Any, **kwargs: Any) -> Any:
                with self:
                    result = function(*args, **kwargs)
                known.extend(gather(result))
                return result

            return inside

        out = func(*tree_map_only(_FUNCTIONS, shown, args), **tree_map_only(_FUNCTIONS, shown, kwargs))
        here = {id(tensor) for tensor in known[given:]}
        if not all(id(tensor) in here for tensor in gather(out)):
            self.opaque(f"higher_order.{func.__name__}", tuple(known), out)
        return out


def run_operator(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Runs an ATen operator that a dispatch mode was handed.

    Traced code keeps the numbers of its Python as tensors, and torch hands their reader the number itself: it is read.
    """
    if func is torch.ops.aten._local_scalar_dense.default and not isinstance(args[0], torch.Tensor):
        return args[0]
    return func(*args, **kwargs)


@cache
def _is_composite(func: Any) -> bool:
    """Whether an operator is made of others, which autograd shows in its place; below it, torch doesn't."""
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), DispatchKey.CompositeImplicitAutograd))


_FUNCTIONS = (type(lambda: None), torch.nn.Module)


def _wants_no_mode(kernel: Callable[..., Any]) -> bool:
    """Whether torch's eager code for a higher-order operator asserts that no dispatch mode is on."""
    code = getattr(inspect.unwrap(kernel), "__code__", None)
    return code is None or "_get_current_dispatch_mode" in code.co_names
