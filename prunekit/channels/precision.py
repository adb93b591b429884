"""Comparing in float64 whatever precision a model's code names: narrower floating-point types act as float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from prunekit.channels.modes import OperatorMode, run_operator

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
    """An operator's arguments or results with other types in place of some."""
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
