"""Norms of a masked model: each runs its own narrow copy on the channels that a plan keeps."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call

from prunekit.channels.cut.slicing import bare_widths, resize, set_bare_widths, take
from prunekit.channels.labels.label_union import Labels
from prunekit.channels.rewrite.source_rewriter import attribute_values, set_attributes
from prunekit.channels.tracing.channel_map import ChannelMap, Keep
from prunekit.hooks.hook import HOOK_TABLES
from prunekit.hooks.model_copy import named_tensors, with_tensors
from prunekit.hooks.owner import HookOwner
from prunekit.utils.tensors import gather, map_tensors

T = TypeVar("T")


class NarrowNorms(HookOwner):
    """While active, norms over several channels see only those that a plan keeps, as in the compact model.

    A removed channel is zero, but a mean that includes zeros is a different mean. So the kept channels are gathered,
    the module's own narrow copy normalizes them with slices of the module's parameters, and the result is scattered
    into zeros. Gradients reach input and parameters through the slices. The dense norm runs as well, its result unused,
    so that other hooks on it see tensors of the dense width. The model's tensors, with zeros where the plan prunes, are
    looked up at each call.
    """

    def __init__(self, model: nn.Module, channel_map: ChannelMap, keep: Keep, compact: nn.Module | None = None) -> None:
        super().__init__()
        self._model, self._map, self._keep = model, channel_map, keep
        self._compact = compact  # whose norms state sizes that are on trial; None if the map knows all

    def register(self) -> None:
        """Add a forward hook to every norm that loses channels, before all others."""
        for module in self._model.modules():
            for hook in module._forward_hooks.values():
                if isinstance(hook, KeptNorm):  # of an earlier plan
                    self.own_context(hook.resting())
        runs = _narrow_runs(self._model, self._map, self._keep, self._compact)
        for encoder in _making_nested_tensors(self._model) if runs else ():
            self.own_undo(partial(setattr, encoder, "use_nested_tensor", encoder.use_nested_tensor))
            encoder.use_nested_tensor = False
        for module, run in runs:
            self.own_forward(module, run.run, first=True)
        if runs:
            self.own_compile_check(self._model)


class KeptNorm:
    """A forward hook as of `NarrowNorms` that stays with a model, also in its copies and pickles.

    Narrow copies and traces are without it, as without any hook of ours, and it rests while masks are active, which
    bring their own.
    """

    stays_in_copies = True

    def __init__(self, run: _NarrowRun) -> None:
        self._run, self._owners = run, 0

    def __call__(self, module: nn.Module, args: Any, named: Any, result: Any) -> Any:
        """Return the result of the compact model in the dense width."""
        return None if self._owners else self._run.run(module, args, named, result)

    @contextmanager
    def resting(self) -> Iterator[None]:
        """Let the dense result be for a while, in which another owner's hook makes the norm narrow."""
        self._owners += 1
        try:
            yield
        finally:
            self._owners -= 1

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_owners": 0}


def keep_narrow_norms(model: nn.Module, channel_map: ChannelMap, keep: Keep) -> None:
    """Let the norms of a masked model see kept channels only from now on, wherever it is called; in place.

    The model's parameters, buffers and their names stay.
    """
    runs = _narrow_runs(model, channel_map, keep)
    for encoder in _making_nested_tensors(model) if runs else ():
        encoder.use_nested_tensor = False
    for module, run in runs:
        module.register_forward_hook(KeptNorm(run), prepend=True, with_kwargs=True)


def _making_nested_tensors(model: nn.Module) -> list[nn.TransformerEncoder]:
    """Return encoders that make nested tensors of padded batches, which have no axis to gather along."""
    return [module for module in model.modules() if isinstance(module, nn.TransformerEncoder)]


def _narrow_runs(
    model: nn.Module, channel_map: ChannelMap, keep: Keep, compact: nn.Module | None = None
) -> list[tuple[nn.Module, _NarrowRun]]:
    """Return the modules that run narrow under a plan, each with what runs in its place."""
    narrow = channel_map.narrow(keep)
    blocks = narrow.keys() - channel_map.norms.keys()
    norms = {p: n for p, n in narrow.items() if p in blocks or not all(keep[a].all() for _, a in n.axes)}
    if not norms:
        return []

    widths, attributes = bare_widths(model, channel_map, keep), attribute_values(model, channel_map, keep)
    names = {id(tensor): name for name, tensor in named_tensors(model)}
    runs = []
    for path, norm in norms.items():
        module = model.get_submodule(path)
        axes = {name: enumerate(channel_map.labels[names[id(tensor)]]) for name, tensor in named_tensors(module)}
        own = {name: _kept_axes(labels, keep) for name, labels in axes.items()}
        copy = _empty_copy(module if compact is None else compact.get_submodule(path), module, own)
        set_bare_widths(copy, _inside(path, widths))
        set_attributes(copy, _inside(path, attributes))
        runs.append((module, _NarrowRun(copy, own, _kept_axes(norm.inputs, keep), _kept_axes(norm.outputs, keep))))
    return runs


def _inside(path: str, values: Mapping[str, T]) -> dict[str, T]:
    """Return what is known of a module and of its parts, by their paths from it."""
    own = {"": values[path]} if path in values else {}
    return own | {key.removeprefix(f"{path}."): one for key, one in values.items() if key.startswith(f"{path}.")}


def _empty_copy(stating: nn.Module, module: nn.Module, own: Mapping[str, list[_KeptAxis]]) -> nn.Module:
    """Return the module in its compact size, without values and hooks, and with the numbers that `stating` has."""

    def empty(name: str, tensor: Tensor) -> Tensor:
        shape = list(tensor.shape)
        for kept in own[name]:
            shape[kept.axis] = kept.size
        return torch.empty(shape, dtype=tensor.dtype, device="meta")

    copy = with_tensors(stating, {name: empty(name, tensor) for name, tensor in named_tensors(module)})
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


@dataclass(frozen=True, eq=False)
class _NarrowRun:
    """Runs a narrow copy on the kept part of an input, with slices of the dense module's parameters."""

    copy: nn.Module  # the narrow module; its own tensors have no values
    own: Mapping[str, list[_KeptAxis]]  # kept axes of each tensor of the module
    inputs: list[_KeptAxis]  # of the input
    outputs: list[_KeptAxis]  # of the output

    def run(self, module: nn.Module, args: Any, named: Any, result: Any) -> Any:
        """Return the result of the compact model in the dense width; a forward hook."""
        narrow_args, narrow_named = map_tensors((args, named), lambda tensor: _gathered(tensor, self.inputs))
        tensors = dict(named_tensors(module))
        narrow = {name: _gathered(tensors[name], kept) for name, kept in self.own.items()}
        for part, own in zip(self.copy.modules(), module.modules(), strict=True):
            part.training = own.training
        out = functional_call(self.copy, narrow, narrow_args, narrow_named)
        first, dense = gather(out)[0], gather(result)[0]
        return map_tensors(out, lambda tensor: _scattered(tensor, self.outputs, dense) if tensor is first else tensor)


def _kept_axes(axes: Iterable[tuple[int, Labels | None]], keep: Keep) -> list[_KeptAxis]:
    """Return the axes of a tensor that lose anything."""
    return [_KeptAxis(axis, keep[labels]) for axis, labels in axes if labels is not None and not keep[labels].all()]


def _gathered(tensor: Tensor, kept: list[_KeptAxis]) -> Tensor:
    for axis in kept:
        tensor = axis.gather(tensor)
    return tensor


def _scattered(tensor: Tensor, kept: list[_KeptAxis], dense: Tensor) -> Tensor:
    """Put a tensor among zeros, in the memory layout of the dense one."""
    for axis in kept:
        tensor = axis.scatter(tensor)
    return tensor if tensor.stride() == dense.stride() else torch.empty_like(dense).copy_(tensor)
