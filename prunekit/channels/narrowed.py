"""Norms of a masked model: each runs its own narrow copy on the channels that a plan keeps."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call

from prunekit.channels.copying import named_tensors, with_tensors
from prunekit.channels.labels import Labels
from prunekit.channels.map import ChannelMap, Keep
from prunekit.channels.norms import Axes, Norm
from prunekit.channels.slicing import KeptIndices, bare_widths, kept_indices, resize, set_bare_widths
from prunekit.hooks import HOOK_TABLES, HookOwner
from prunekit.nested import gather, map_tensors


class NarrowNorms(HookOwner):
    """While active, norms over several channels see only those that a plan keeps, as in the compact model.

    A removed channel is zero, but a mean over zeros too is another mean. So the kept channels are gathered, the
    module's own narrow copy normalises them with slices of the module's parameters, and what comes out is scattered
    into zeros. Gradients reach input and parameters through the slices. The dense norm runs as well, its result unused:
    whoever else has hooks on it sees tensors of the dense width.

    Args:
        model: a model with zeros where the plan prunes; its tensors are looked up at each call.
        channel_map: its map; a norm of which nothing is pruned gets no hook.
        keep: bool (n_labels,).
    """

    def __init__(self, model: nn.Module, channel_map: ChannelMap, keep: Keep) -> None:
        super().__init__()
        self._model, self._map, self._keep = model, channel_map, keep

    def register(self) -> None:
        """Adds a forward hook to every norm that loses channels, before all others."""
        norms = {p: n for p, n in self._map.norms.items() if not all(self._keep[a].all() for _, a in n.axes)}
        if not norms:
            return
        for module in self._model.modules():
            if isinstance(module, nn.TransformerEncoder):
                self.own(_Unnested(module))
        kept = kept_indices(self._map, self._keep)
        widths = bare_widths(self._model, self._map, self._keep)
        names = {id(tensor): name for name, tensor in named_tensors(self._model)}
        for path, norm in norms.items():
            module = self._model.get_submodule(path)
            own = {name: names[id(tensor)] for name, tensor in named_tensors(module)}
            cuts = {name: kept[full] for name, full in own.items() if full in kept}
            copy = _empty_copy(module, cuts)
            if path in widths:
                set_bare_widths(copy, {"": widths[path]})
            self.own_forward(module, _KeptOnly(copy, cuts, norm, self._keep).run, again=True, first=True)


class _Unnested:
    """Keeps torch's encoder from making nested tensors of padded batches: they have no axis to gather along."""

    def __init__(self, encoder: nn.TransformerEncoder) -> None:
        self._encoder, self._before = encoder, encoder.use_nested_tensor
        encoder.use_nested_tensor = False

    def remove(self) -> None:
        self._encoder.use_nested_tensor = self._before


def _empty_copy(module: nn.Module, cuts: KeptIndices) -> nn.Module:
    """The module with the sizes it has when compact, without values and hooks."""

    def empty(name: str, tensor: Tensor) -> Tensor:
        axes = cuts.get(name, (None,) * tensor.dim())
        shape = [size if index is None else index.size for size, index in zip(tensor.shape, axes, strict=True)]
        return torch.empty(shape, dtype=tensor.dtype, device="meta")

    copy = with_tensors(module, {name: empty(name, tensor) for name, tensor in named_tensors(module)})
    for part in copy.modules():
        for table in HOOK_TABLES:
            getattr(part, table).clear()
    resize(copy)
    return copy


class _Kept:
    """The kept indices of one axis."""

    def __init__(self, axis: int, index: Labels) -> None:
        self.axis = axis
        self._index = torch.from_numpy(index)

    def on(self, device: torch.device) -> Tensor:
        if self._index.device != device:
            self._index = self._index.to(device)  # stays there: a model seldom moves
        return self._index


class _KeptOnly:
    """Runs a narrow copy on what is kept of an input, with slices of the dense module's parameters."""

    def __init__(self, copy: nn.Module, cuts: KeptIndices, norm: Norm, keep: Keep) -> None:
        self._copy = copy
        self._parameters = {name: _kept_of_tensor(cuts.get(name, ())) for name, _ in named_tensors(copy)}
        self._inputs, self._outputs = _kept_of(norm.inputs, keep), _kept_of(norm.outputs, keep)

    def run(self, module: nn.Module, args: Any, named: Any, result: Any) -> Any:
        """A forward hook: the result that the compact model has, in the dense width."""
        narrow_args, narrow_named = map_tensors((args, named), lambda tensor: _gathered(tensor, self._inputs))
        tensors = dict(named_tensors(module))
        narrow = {name: _gathered(tensors[name], kept) for name, kept in self._parameters.items()}
        if self._copy.training != module.training:
            self._copy.train(module.training)
        out = functional_call(self._copy, narrow, narrow_args, narrow_named)
        dense = gather(result)[0]
        return map_tensors(out, lambda tensor: _scattered(tensor, self._outputs, dense))


def _kept_of(axes: Axes, keep: Keep) -> list[_Kept]:
    return [_Kept(axis, np.flatnonzero(keep[labels])) for axis, labels in axes if not keep[labels].all()]


def _kept_of_tensor(cuts: tuple[Labels | None, ...]) -> list[_Kept]:
    return [_Kept(axis, index) for axis, index in enumerate(cuts) if index is not None]


def _gathered(tensor: Tensor, kept: list[_Kept]) -> Tensor:
    for axis in kept:
        tensor = tensor.index_select(axis.axis, axis.on(tensor.device))
    return tensor


def _scattered(tensor: Tensor, kept: list[_Kept], dense: Tensor) -> Tensor:
    """Puts a tensor among zeros, in shape and memory layout of the dense one."""
    for axis in kept:
        shape = list(tensor.shape)
        shape[axis.axis] = dense.shape[axis.axis]
        zeros = torch.zeros_like(dense) if shape == list(dense.shape) else tensor.new_zeros(shape)
        tensor = zeros.index_copy(axis.axis, axis.on(tensor.device), tensor)
    return tensor
