"""The same model without in-place operations: what hooks must not be able to tell apart."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

CNN_FAMILIES = [
    "alexnet",
    "vgg11_bn",
    "resnet18",
    "resnext50_32x4d",
    "densenet121",
    "googlenet",
    "squeezenet1_1",
    "mobilenet_v2",
    "mobilenet_v3_small",
    "mnasnet0_5",
    "shufflenet_v2_x0_5",
    "efficientnet_b0",
    "regnet_y_400mf",
]
"""One classifier of each of torchvision's convolutional families; most of them work in place somewhere."""

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
