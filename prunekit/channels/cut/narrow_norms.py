"""Norms of a masked model: each runs its own narrow copy on the channels that a plan keeps."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call

from prunekit.channels.channel_map import ChannelMap, Keep
from prunekit.channels.cut.model_copy import named_tensors, with_tensors
from prunekit.channels.cut.slicing import bare_widths, resize, set_bare_widths, take
from prunekit.channels.labels import Labels
from prunekit.channels.rewrite.source_rewriter import attribute_values, set_attributes
from prunekit.hooks.hook import HOOK_TABLES
from prunekit.hooks.owner import HookOwner
from prunekit.utils.tensors import gather, map_tensors

T = TypeVar("T")


class NarrowNorms(HookOwner):
    """While active, norms over several channels see only those that a plan keeps, as in the compact model.

    A removed channel is zero, but a mean that includes zeros is a different mean. So the kept channels are gathered,
    the module's own narrow copy normalizes them with slices of the module's parameters, and the result is scattered
    into zeros. Gradients reach input and parameters through the slices. The dense norm runs as well, its result unused,
    so that other hooks on it see tensors of the dense width.

    Args:
        model: a model with zeros where the plan prunes; its tensors are looked up at each call.
        channel_map: its map; a norm that loses no channel gets no hook.
        keep: bool (n_labels,).
    """

    def __init__(self, model: nn.Module, channel_map: ChannelMap, keep: Keep) -> None:
        super().__init__()
        self._model, self._map, self._keep = model, channel_map, keep

    def register(self) -> None:
        """Add a forward hook to every norm that loses channels, before all others."""
        narrow = self._map.narrow(self._keep)
        blocks = narrow.keys() - self._map.norms.keys()
        norms = {p: n for p, n in narrow.items() if p in blocks or not all(self._keep[a].all() for _, a in n.axes)}
        if not norms:
            return
        for module in self._model.modules():
            if isinstance(module, nn.TransformerEncoder):
                # Nested tensors, which it makes of padded batches, have no axis to gather along.
                self.own_undo(partial(setattr, module, "use_nested_tensor", module.use_nested_tensor))
                module.use_nested_tensor = False
        widths = bare_widths(self._model, self._map, self._keep)
        attributes = attribute_values(self._model, self._map, self._keep)
        names = {id(tensor): name for name, tensor in named_tensors(self._model)}
        for path, norm in norms.items():
            module = self._model.get_submodule(path)
            own = {name: self._kept_axes(names[id(tensor)]) for name, tensor in named_tensors(module)}
            copy = _empty_copy(module, own)
            set_bare_widths(copy, _inside(path, widths))
            set_attributes(copy, _inside(path, attributes))
            run = _NarrowRun(copy, own, _kept_axes(norm.inputs, self._keep), _kept_axes(norm.outputs, self._keep))
            self.own_forward(module, run.run, again=True, first=True)
        self.own_compile_check(self._model)

    def _kept_axes(self, name: str) -> list[_KeptAxis]:
        axes = enumerate(self._map.labels[name])
        return _kept_axes([(axis, labels) for axis, labels in axes if labels is not None], self._keep)


def _inside(path: str, values: Mapping[str, T]) -> dict[str, T]:
    """Return what is known of a module and of its parts, by their paths from it."""
    own = {"": values[path]} if path in values else {}
    return own | {key.removeprefix(f"{path}."): one for key, one in values.items() if key.startswith(f"{path}.")}


def _empty_copy(module: nn.Module, own: Mapping[str, list[_KeptAxis]]) -> nn.Module:
    """Return the module in its compact size, without values and hooks."""

    def empty(name: str, tensor: Tensor) -> Tensor:
        shape = list(tensor.shape)
        for kept in own[name]:
            shape[kept.axis] = kept.size
        return torch.empty(shape, dtype=tensor.dtype, device="meta")

    copy = with_tensors(module, {name: empty(name, tensor) for name, tensor in named_tensors(module)})
    for part in copy.modules():
        for table in HOOK_TABLES:
            getattr(part, table).clear()
    resize(copy)
    return copy


class _KeptAxis:
    """The kept indices of one axis of tensors; `keep` is bool (size,)."""

    def __init__(self, axis: int, keep: Keep) -> None:
        index = np.flatnonzero(keep)
        self.axis, self.size = axis, index.size
        back = np.where(keep, np.cumsum(keep) - 1, index.size)  # of a removed one: the zero behind the kept ones
        self._index, self._back = torch.from_numpy(index), torch.from_numpy(back)

    def gather(self, tensor: Tensor) -> Tensor:
        """Return the kept entries."""
        self._index = self._index.to(tensor.device)  # stays there: a model seldom moves
        return take(tensor, self.axis, self._index)

    def scatter(self, tensor: Tensor) -> Tensor:
        """Return a tensor with the kept entries among zeros."""
        self._back = self._back.to(tensor.device)
        zero = torch.zeros_like(tensor.narrow(self.axis, 0, 1))
        return take(torch.cat([tensor, zero], self.axis), self.axis, self._back)


class _NarrowRun:
    """Runs a narrow copy on the kept part of an input, with slices of the dense module's parameters.

    Args:
        copy: the narrow module; its own tensors have no values.
        own: for each tensor of the module, its kept axes.
        inputs: kept axes of the input.
        outputs: kept axes of the output.
    """

    def __init__(
        self, copy: nn.Module, own: Mapping[str, list[_KeptAxis]], inputs: list[_KeptAxis], outputs: list[_KeptAxis]
    ) -> None:
        self._copy, self._own, self._inputs, self._outputs = copy, own, inputs, outputs

    def run(self, module: nn.Module, args: Any, named: Any, result: Any) -> Any:
        """Return the result of the compact model in the dense width; a forward hook."""
        narrow_args, narrow_named = map_tensors((args, named), lambda tensor: _gathered(tensor, self._inputs))
        tensors = dict(named_tensors(module))
        narrow = {name: _gathered(tensors[name], kept) for name, kept in self._own.items()}
        for part, own in zip(self._copy.modules(), module.modules(), strict=True):
            part.training = own.training
        out = functional_call(self._copy, narrow, narrow_args, narrow_named)
        first, dense = gather(out)[0], gather(result)[0]
        return map_tensors(out, lambda tensor: _scattered(tensor, self._outputs, dense) if tensor is first else tensor)


def _kept_axes(axes: Iterable[tuple[int, Labels]], keep: Keep) -> list[_KeptAxis]:
    return [_KeptAxis(axis, keep[labels]) for axis, labels in axes if not keep[labels].all()]


def _gathered(tensor: Tensor, kept: list[_KeptAxis]) -> Tensor:
    for axis in kept:
        tensor = axis.gather(tensor)
    return tensor


def _scattered(tensor: Tensor, kept: list[_KeptAxis], dense: Tensor) -> Tensor:
    """Put a tensor among zeros, in the memory layout of the dense one."""
    for axis in kept:
        tensor = axis.scatter(tensor)
    return tensor if tensor.stride() == dense.stride() else torch.empty_like(dense).copy_(tensor)
