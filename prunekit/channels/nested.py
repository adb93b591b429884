"""Tensors inside nested inputs and outputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Every tensor in nested tuples, lists, dicts and dataclasses."""
    return iter(gather(value))


def gather(value: Any) -> list[torch.Tensor]:
    """The same as a list."""
    return _gather(value, [])


def _gather(value: Any, found: list[torch.Tensor]) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        found.append(value)
    elif value is None or isinstance(value, (int, float, str)):
        pass
    elif isinstance(value, Mapping):
        for item in value.values():
            _gather(item, found)
    elif isinstance(value, (tuple, list)):
        for item in value:
            _gather(item, found)
    elif hasattr(value, "__dataclass_fields__") and not isinstance(value, type):
        for item in vars(value).values():
            _gather(item, found)
    return found


def map_tensors(value: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """The same nesting of tuples, lists and dicts with every tensor exchanged."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, Mapping):
        return {key: map_tensors(item, function) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return type(value)(map_tensors(item, function) for item in value)
    return value
