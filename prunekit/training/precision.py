"""Mixed precision: autocast, float16's loss scale, and convolutions that bfloat16 must not compute on the CPU."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from prunekit.hooks.hook import not_traced
from prunekit.hooks.owner import HookOwner
from prunekit.known_names import FloatName
from prunekit.utils.tensors import map_tensors

HALF: dict[FloatName, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16}


def autocast(precision: FloatName, device: torch.device) -> AbstractContextManager[None]:
    """Run what PyTorch deems safe in half precision; nothing for `fp32`."""
    return torch.autocast(device.type, dtype=HALF.get(precision), enabled=precision in HALF)


def loss_scaler(precision: FloatName, device: torch.device) -> torch.amp.GradScaler | None:
    """Return what keeps small gradients from vanishing in float16, and skips steps whose gradients overflow."""
    return torch.amp.GradScaler(device.type) if precision == "fp16" else None


class LongStrides(HookOwner):
    """A context manager that runs convolutions whose stride is longer than their input without autocast.

    The last 3x3 convolution of stride 2 in a network on small images may read a single pixel. Under bfloat16 on the CPU
    its weight gradient holds what was in memory at the taps that only see padding, in most calls (torch 2.14.1 with
    AVX-512 BF16: `aten.convolution_backward` on inputs 1x1 with stride 2, 2x2 with stride 4; all others tried, and
    float16, are right). Such layers are small, so that float32 costs nothing.

    Args:
        model: its convolutions are hooked.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._model = model
        self._open: list[AbstractContextManager[Any]] = []

    def register(self) -> None:
        """Register hooks on every convolution that has a stride."""
        for module in self._model.modules():
            if isinstance(module, _ConvNd) and max(module.stride) > 1:
                self.own_forward_pre(module, self._before, again=True)
                self.own_forward(module, self._after, again=True, always=True)

    def remove(self) -> None:
        """Remove the hooks, and leave what a pass that was interrupted has entered."""
        super().remove()
        while self._open:
            self._open.pop().__exit__(None, None, None)

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
