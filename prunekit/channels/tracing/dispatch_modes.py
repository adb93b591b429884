"""Dispatch modes that are shown every operator, those inside of higher-order operators included.

Comparing in float64 whatever precision a model's code names: narrower floating-point types act as float64.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any, Self

import torch
from torch._C import DispatchKey
from torch._ops import HigherOrderOperator
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from prunekit.utils.tensors import gather


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
        """Run an ATen operator, and return its result."""
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
    """Run an ATen operator that a dispatch mode was handed.

    Traced code keeps the numbers of its Python as tensors, and torch hands their reader the number itself: it is read.
    """
    if func is torch.ops.aten._local_scalar_dense.default and not isinstance(args[0], torch.Tensor):
        return args[0]
    return func(*args, **kwargs)


@cache
def _is_composite(func: Any) -> bool:
    """Return whether an operator is made of others, which autograd shows in its place; below it, torch doesn't."""
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), DispatchKey.CompositeImplicitAutograd))


_FUNCTIONS = (type(lambda: None), torch.nn.Module)


def _wants_no_mode(kernel: Callable[..., Any]) -> bool:
    """Return whether torch's eager code for a higher-order operator asserts that no dispatch mode is on."""
    code = getattr(inspect.unwrap(kernel), "__code__", None)
    return code is None or "_get_current_dispatch_mode" in code.co_names


WIDE = {
    torch.float32: torch.float64,
    torch.float16: torch.float64,
    torch.bfloat16: torch.float64,
    torch.complex64: torch.complex128,
}
HALF = frozenset({torch.float16, torch.bfloat16})
NARROW = {torch.float64: torch.float32, torch.complex128: torch.complex64}


class _Widened(OperatorMode):
    """Every operator that takes or makes narrower floats does it in float64.

    So `x.float()` of a norm that computes in float32 does not round what is compared, and masks and grids made in
    float32 do not meet float64 where torch wants one type.
    """

    def operator(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        name = func._schema.name
        if func.is_view and name != "aten::lift_fresh":  # the same memory: whoever computes with it widens it
            return func(*args, **kwargs)
        if name.endswith("_") and isinstance(args[0], torch.Tensor) and args[0].dtype in WIDE:
            own = {WIDE[args[0].dtype]: args[0].dtype}
            return func(args[0], *_changed(args[1:], own), **kwargs)
        out = run_operator(func, _changed(args, WIDE), _changed(kwargs, WIDE))
        return out if func._schema.is_mutable else _changed(out, WIDE)


def _changed(value: Any, dtypes: dict[torch.dtype, torch.dtype]) -> Any:
    """Return an operator's arguments or results with other types in place of some."""
    if isinstance(value, torch.Tensor):
        return value.to(dtypes[value.dtype]) if value.dtype in dtypes else value
    if isinstance(value, torch.dtype):
        return dtypes.get(value, value)
    if isinstance(value, (tuple, list)):
        return type(value)([_changed(item, dtypes) for item in value])
    if isinstance(value, dict):
        return {key: _changed(item, dtypes) for key, item in value.items()}
    return value


class _ReportedNarrow(TorchFunctionMode):
    """Tensors in float64 say that they are float32, to code that asks for just that."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return NARROW.get(result, result) if isinstance(result, torch.dtype) else result


@contextmanager
def _reported_narrow() -> Iterator[None]:
    with _Widened(), _ReportedNarrow():
        yield


Precision = Callable[[], AbstractContextManager[Any]]
AS_DOUBLE: tuple[Precision, ...] = (_Widened, _reported_narrow)
"""Ways to run a model in float64 that has its tensors and inputs in it, to be tried in this order."""

OWN: Precision = nullcontext
"""A model's own precision, whatever that is: operators that take float32 or bfloat16 alone run in no other."""
