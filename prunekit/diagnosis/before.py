"""A model as it was before it is looked at, and put back to that."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from prunekit.context import set_mode, training_mode
from prunekit.diagnosis.observation import Modes


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """Parameters and buffers are afterwards what they were: running statistics move in train mode, and a model's own
    forward may put other tensors in the place of its buffers."""
    owners = [(module, dict(module._buffers.items())) for module in model.modules()]
    tensors = [*model.parameters(), *model.buffers()]
    before = [tensor.detach().clone() for tensor in tensors]
    try:
        yield
    finally:
        for module, buffers in owners:
            for name, buffer in buffers.items():
                module._buffers[name] = buffer
        with torch.no_grad():
            for tensor, value in zip(tensors, before, strict=True):
                if not torch.equal(tensor, value):
                    tensor.copy_(value)


def batchnorm_modes(model: nn.Module) -> dict[str, Modes]:
    """How every BatchNorm with running statistics follows the mode of the model; modes are afterwards what they were.

    `model.train()` and `model.eval()` are called, because a model's own may do something else.
    """
    norms = {
        path: module
        for path, module in model.named_modules()
        if isinstance(module, _BatchNorm) and module.running_var is not None
    }
    found = [module.training for module in norms.values()]
    with training_mode(model, True):
        training = [module.training for module in norms.values()]
        set_mode(model, False)
        evaluating = [module.training for module in norms.values()]
    return dict(zip(norms, map(Modes, found, training, evaluating), strict=True))
