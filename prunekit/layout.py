"""How tensors lie in memory, channels last above all; model folders say whether their model's lie so."""

from __future__ import annotations

import torch
from torch import Tensor, nn

FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}


def with_channels_last(tensor: Tensor) -> Tensor:
    """A copy of images, volumes or their kernels with channels last; of other tensors, one as they are."""
    return tensor.clone(memory_format=FORMATS.get(tensor.dim(), torch.preserve_format))


def lies_channels_last(model: nn.Module) -> bool:
    """Whether a kernel of a model has its channels last and could not be said to have them first."""
    found = ((kernel, FORMATS.get(kernel.dim())) for kernel in model.parameters())
    return any(
        form is not None and kernel.is_contiguous(memory_format=form) and not kernel.is_contiguous()
        for kernel, form in found
    )


def as_it_lies(tensor: Tensor) -> Tensor:
    """A tensor as a vector, in the order in which it lies in memory: no copy of a dense one."""
    if tensor.is_contiguous():
        return tensor.detach().view(-1)
    order = sorted(range(tensor.ndim), key=tensor.stride, reverse=True)
    return tensor.detach().permute(order).reshape(-1)
