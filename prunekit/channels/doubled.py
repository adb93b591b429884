"""A model that computes in float64 without a float64 copy of its weights: each module's are made while it runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from prunekit.channels.copying import named_tensors, with_tensors
from prunekit.channels.slicing import KeptIndices, blank
from prunekit.hooks import HookOwner, never_called
from prunekit.nested import map_tensors

Convert = Callable[[str, torch.Tensor], torch.Tensor]


def to_double(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """A copy of a tensor on the CPU, in float64 if it is a floating-point one."""
    return tensor.detach().to("cpu", torch.float64 if tensor.is_floating_point() else None, copy=True)


def as_it_is(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """A copy of a tensor on the CPU, in its own precision."""
    return tensor.detach().to("cpu", copy=True)


def with_zeros(convert: Convert, kept: KeptIndices) -> Convert:
    """Like `convert`, with zeros in place of removed entries."""

    def masked(name: str, tensor: torch.Tensor) -> torch.Tensor:
        converted = convert(name, tensor)
        return blank(converted, kept[name]) if name in kept else converted

    return masked


def doubled(model: nn.Module, convert: Convert) -> nn.Module:
    """A float64 copy of a model, with all its tensors converted at once."""
    return with_tensors(model, {name: convert(name, tensor) for name, tensor in named_tensors(model)})


def as_double(
    example: tuple[Any, ...], dtype: torch.dtype | None = torch.float64, *, noise: bool = True
) -> tuple[Any, ...]:
    """The example in float64, or in its own precision with None; constant tensors, which hide much, become noise."""

    def convert(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_floating_point():
            return tensor.cpu()
        constant = tensor.numel() > 1 and not tensor.is_meta and bool((tensor == tensor.reshape(-1)[0]).all())
        if tensor.is_meta or (constant and noise):
            return torch.randn(tensor.shape, dtype=dtype or tensor.dtype, generator=torch.Generator().manual_seed(0))
        return tensor.detach().to("cpu", dtype)

    return tuple(map_tensors(value, convert) for value in example)


class DoubledWhileRunning(HookOwner):
    """Converts a module's own tensors when its forward begins and drops them when it ends.

    Memory stays that of the largest module, and stays warm. Tensors that another module than their owner uses are not
    converted: such a model fails or differs, and is then run from `doubled`.

    Args:
        model: not changed: its structure is copied, without its weights.
        convert: name and tensor -> what the module sees while it runs.
        whole: paths of modules with which all their parts are converted: a hook on them may run these.
    """

    def __init__(self, model: nn.Module, convert: Convert, whole: Iterable[str] = ()) -> None:
        super().__init__()
        self._whole = tuple(f"{path}." for path in whole)
        self.model = with_tensors(model, {name: tensor.detach() for name, tensor in named_tensors(model)})
        self.convert = convert
        self._names = {id(tensor): name for name, tensor in named_tensors(self.model)}

    def register(self) -> None:
        """Adds a forward-pre and a forward hook to every module that owns tensors, or has a part that never runs."""
        for path, module in self.model.named_modules():
            if path.startswith(self._whole):
                continue
            whole = f"{path}." in self._whole
            parts = module.modules() if whole else (part for part in module.children() if never_called(part))
            owners = [module, *(part for part in parts if part is not module)]
            tables = [table for owner in owners for table in (owner._parameters, owner._buffers)]
            own = [(table, dict(table)) for table in tables if any(tensor is not None for tensor in table.values())]
            if own and not never_called(module):
                self.own(module.register_forward_pre_hook(self._begin(own)))
                self.own(module.register_forward_hook(self._end(own), always_call=True))

    def _begin(self, own: list[tuple[Any, dict[str, Any]]]) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any) -> None:
            with torch._C._DisableTorchDispatch():
                for table, tensors in own:
                    table.update(self._converted(tensors))

        return hook

    def _converted(self, table: dict[str, Any]) -> dict[str, Any]:
        return {key: t if t is None else self.convert(self._names[id(t)], t) for key, t in table.items()}

    def _end(self, own: list[tuple[Any, dict[str, Any]]]) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            for table, tensors in own:
                table.update(tensors)

        return hook
