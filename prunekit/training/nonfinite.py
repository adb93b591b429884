"""Where a number stopped being finite: the batch is run again, and the first module to blame is named."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from prunekit.hooks import HookOwner
from prunekit.nested import first_not_finite


class _FirstNonFinite(HookOwner):
    """Watches every leaf module, and modules with parameters of their own; remembers the first that is not finite."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.found: str | None = None

    def register(self) -> None:
        for name, module in self.model.named_modules():
            if not any(True for _ in module.children()) or any(True for _ in module.parameters(recurse=False)):
                self.own(module.register_forward_hook(self._hook(name or type(module).__name__)))

    def _hook(self, name: str) -> Any:
        def look(module: nn.Module, inputs: Any, output: Any) -> None:
            if self.found is None:
                self.found = _blame(name, module, output)

        return look


def _blame(name: str, module: nn.Module, output: Any) -> str | None:
    for key, parameter in module.named_parameters(recurse=False):
        if not torch.isfinite(parameter).all():
            return f"parameter {key!r} of module {name!r} ({type(module).__name__})"
    tensors = output if isinstance(output, (tuple, list)) else [output]
    if any(isinstance(t, Tensor) and t.is_floating_point() and not torch.isfinite(t).all() for t in tensors):
        return f"the output of module {name!r} ({type(module).__name__})"
    return None


def first_non_finite(model: nn.Module, images: Tensor) -> str:
    """Runs the model on a batch again and says what is first not finite: the input, a parameter or an output.

    The run is in the model's present mode, without gradients.
    """
    if not torch.isfinite(images).all():
        return "the input images"
    with _FirstNonFinite(model) as watch, torch.no_grad():
        model(images)
    return watch.found or "the loss alone; every module's output is finite"


def non_finite_tensor(model: nn.Module) -> str | None:
    """The first parameter or buffer with a NaN or an Inf in it; None where all are finite."""
    for kind, tensors in (("parameter", model.named_parameters()), ("buffer", model.named_buffers())):
        if (name := first_not_finite(tensors)) is not None:
            return f"{kind} {name!r}"
    return None
