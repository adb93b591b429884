"""What a model is called with: one tensor, several, or tensors by the names of the arguments of `forward`."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from prunekit.errors import ModelError
from prunekit.nested import gather, map_tensors


def inputs_in(batch: Any) -> Any:
    """The inputs of a batch: the first entry of a tuple or list, such as (inputs, targets), else the batch itself."""
    return batch[0] if isinstance(batch, (tuple, list)) and batch else batch


def arguments(model: nn.Module, inputs: Any) -> tuple[Any, ...]:
    """The positional arguments of a model's `forward`, which everything that runs models works with.

    Args:
        model: what is to be called.
        inputs: a tuple or list of all of them; or a mapping by their names, where those left out in between get their
            defaults; anything else is the only one.

    Raises:
        ModelError: `forward` has no arguments of these names, wants others too, or takes them by name alone.
    """
    if isinstance(inputs, (tuple, list)):
        return tuple(inputs)
    if not isinstance(inputs, Mapping):
        return (inputs,)
    signature = inspect.signature(model.forward)
    names, reason = list(signature.parameters), "some are taken by name alone"
    try:
        bound = signature.bind(**inputs)
        bound.apply_defaults()
        last = max((names.index(name) for name in inputs), default=-1)
        if last < len(bound.args):
            return tuple(bound.args[: last + 1])
    except (TypeError, ValueError) as error:  # of no such name, or one that only `**` takes
        reason = str(error)
    raise ModelError(
        f"{type(model).__name__}: expected a forward that takes {', '.join(map(str, inputs))} as positional arguments, "
        f"got {signature}: {reason}; wrap the model, or let the task's `unpack` return a tuple"
    )


def moved(values: Any, device: torch.device) -> Any:
    """The same nesting with every tensor on a device."""
    return map_tensors(values, lambda tensor: tensor.to(device, non_blocking=True))


def count_of(inputs: Any) -> int:
    """How many samples inputs have: the size of the first axis of the first tensor; 0 without one."""
    return next((len(tensor) for tensor in gather(inputs) if tensor.dim()), 0)


def taken(inputs: Any, index: slice | Tensor) -> Any:
    """The same nesting with some of the samples, which lie on the first axis of every tensor."""
    return map_tensors(inputs, lambda tensor: tensor[index])


def joined(parts: Sequence[Any]) -> Any:
    """Inputs of the same nesting one after the other."""
    tensors = iter(zip(*map(gather, parts), strict=True))
    return map_tensors(parts[0], lambda _: torch.cat(next(tensors)))


def described(value: Any) -> str:
    """What came, for messages: `(float32 (8, 3, 32, 32), int64 (8,))`, `{input_ids: int64 (8, 16)}`."""
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{name}: {described(item)}" for name, item in value.items()) + "}"
    if isinstance(value, (tuple, list)):
        items = [described(item) for item in value[:4]] + ["..."] * (len(value) > 4)
        return f"({', '.join(items)})" if isinstance(value, tuple) else f"[{', '.join(items)}]"
    return type(value).__name__
