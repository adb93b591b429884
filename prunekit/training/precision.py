"""Convolutions whose bfloat16 gradient cannot be trusted on the CPU, run in float32."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from prunekit.hooks.hook import not_traced
from prunekit.hooks.owner import HookOwner
from prunekit.utils.tensors import map_tensors


class LongStrides(HookOwner):
    """Runs convolutions whose stride is longer than their input without autocast, as a context manager.

    The last 3x3 convolution of stride 2 in a network on small images may read a single pixel. Under bfloat16 on the CPU
    its weight gradient holds what was in memory at the taps that only see padding, in most calls (torch 2.14.1 with
    AVX-512 BF16: `aten.convolution_backward` on inputs 1x1 with stride 2, 2x2 with stride 4; all others tried, and
    float16, are right). Such layers are small: nothing is lost by their float32.

    Args:
        model: its convolutions are hooked.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._model = model
        self._open: list[AbstractContextManager[Any]] = []

    def register(self) -> None:
        """Hooks every convolution that has a stride."""
        for module in self._model.modules():
            if isinstance(module, _ConvNd) and max(module.stride) > 1:
                self.own_forward_pre(module, self._before, again=True)
                self.own_forward(module, self._after, again=True, always=True)

    def _before(self, module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, Any] | None:
        assert isinstance(module, _ConvNd)
        values: Tensor = arguments[0] if arguments else named["input"]
        sizes = values.shape[-len(module.stride) :]
        long = any(size < stride for size, stride in zip(sizes, module.stride, strict=True))
        if long:
            not_traced(f"LongStrides: a convolution of stride {module.stride} on input {tuple(sizes)} runs in float32")
        context = torch.autocast(values.device.type, enabled=False) if long else nullcontext()
        context.__enter__()
        self._open.append(context)
        return map_tensors((arguments, named), lambda tensor: tensor.to(module.weight.dtype)) if long else None

    def _after(self, *_: Any) -> None:
        if self._open:  # the owner may have been entered while the module ran
            self._open.pop().__exit__(None, None, None)
