"""The same model without in-place operations: what hooks must not be able to tell apart."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

CNN_FAMILIES = [
    "vgg11_bn",
    "resnet18",
    "densenet121",
    "squeezenet1_1",
    "mobilenet_v2",
    "mobilenet_v3_small",
    "shufflenet_v2_x0_5",
    "efficientnet_b0",
]
"""Classifiers of torchvision for each way of working in place: activations, sums, and maps joined or split."""

INSTEAD: dict[str, Callable[..., Any]] = {
    "__iadd__": torch.add,
    "add_": torch.add,
    "__imul__": torch.mul,
    "mul_": torch.mul,
    "relu_": torch.relu,
}
"""Where the result of an in-place operation is used, and not the tensor it wrote to."""


class OutOfPlace(TorchFunctionMode):
    """Runs functional in-place operations out of place."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named = {key: False if key == "inplace" else value for key, value in (kwargs or {}).items()}
        return INSTEAD.get(getattr(func, "__name__", ""), func)(*args, **named)


@contextmanager
def out_of_place(model: nn.Module) -> Iterator[None]:
    """Modules that work in place work out of place, and functional operations too."""
    changed = [module for module in model.modules() if getattr(module, "inplace", False)]
    for module in changed:
        module.inplace = False
    try:
        with OutOfPlace():
            yield
    finally:
        for module in changed:
            module.inplace = True
