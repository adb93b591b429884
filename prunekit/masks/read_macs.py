"""MACs of the layers that read masked activations: what a zero behind each mask may save."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import flop_registry

from prunekit.channels.tracing.execution import plain_operators
from prunekit.channels.tracing.operator_mode import OperatorMode, run_operator
from prunekit.channels.tracing.storages import memory_of
from prunekit.hooks.owner import HookOwner
from prunekit.masks.activation_masks import Side, change_activations
from prunekit.utils.context import same_attributes, training_mode
from prunekit.utils.inputs import call
from prunekit.utils.tensors import gather, map_tensors

_KEEPING_ZEROS = frozenset(
    getattr(torch.ops.aten, f"{name}{place}")
    for name in ("relu", "leaky_relu", "elu", "gelu", "silu", "hardswish", "hardtanh", "tanh", "neg", "mul", "div")
    for place in ("", "_")
) | {
    getattr(torch.ops.aten, name)
    for name in ("clone", "copy_", "_to_copy", "cat", "stack", "constant_pad_nd", "index_select", "repeat")
}  # fmt: skip
"""Operators whose result is zero where what they read is; views need none, as they share memory."""


def macs_of_readers(model: nn.Module, inputs: tuple[Any, ...], paths: Iterable[str], side: Side) -> dict[str, float]:
    """Return the multiply-accumulates of the operators that read each module's masked activations, by module path.

    They are those of convolutions, linear layers and products of matrices that read these values, also through views,
    copies, padding and operators that keep zeros, such as ReLU and products. A product of a masked value with another
    counts for both. 0: nothing that computes by MACs reads the zeros, as behind a convolution and before its BatchNorm.
    """
    readers = _Readers(model, paths, side)
    copied = map_tensors(inputs, torch.clone)
    with (
        training_mode(model, False),
        same_attributes(model),
        torch.no_grad(),
        plain_operators(model),
        readers.hooks,
        readers,
    ):
        call(model, copied)
    return readers.macs


class _Readers(OperatorMode):
    """Follows masked values through a forward pass, and counts the operators that multiply them."""

    def __init__(self, model: nn.Module, paths: Iterable[str], side: Side) -> None:
        super().__init__()
        self.macs = dict.fromkeys(paths, 0.0)
        self.hooks = _MaskedValues(model, side, {path: self._marking(path) for path in self.macs})
        self._masked: dict[int, frozenset[str]] = {}
        self._alive: list[Tensor] = []

    def operator(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run an operator; add its MACs to the masks that it reads, or pass these on to its result."""
        given = gather((args, kwargs))
        read: frozenset[str] = frozenset().union(
            *(self._masked.get(memory_of(tensor), frozenset()) for tensor in given)
        )
        out, packet = run_operator(func, args, kwargs), func.overloadpacket
        if read and packet in flop_registry:
            macs = int(flop_registry[packet](*args, **kwargs, out_val=out)) // 2
            for path in read:
                self.macs[path] += macs
        known, results = {memory_of(tensor) for tensor in given}, gather(out)
        written = func._schema.is_mutable
        for tensor in results:
            if written or memory_of(tensor) not in known:
                self._note(tensor, read if packet in _KEEPING_ZEROS else frozenset())
        return out

    def _note(self, tensor: Tensor, paths: frozenset[str]) -> None:
        self._alive.append(tensor)  # freed memory would be another tensor's
        self._masked[memory_of(tensor)] = paths

    def _marking(self, path: str) -> Callable[[Tensor], Tensor]:
        def mark(tensor: Tensor) -> Tensor:
            own = tensor.clone()  # as a mask makes a tensor of its own, that only this module's readers read
            self._note(own, frozenset({path}))
            return own

        return mark


class _MaskedValues(HookOwner):
    """Hooks that mark the values that masks would change."""

    def __init__(self, model: nn.Module, side: Side, marks: Mapping[str, Callable[[Tensor], Tensor]]) -> None:
        super().__init__()
        self._model, self._side, self._marks = model, side, marks

    def register(self) -> None:
        for path, mark in self._marks.items():
            change_activations(self, self._model, path, self._side, mark)
