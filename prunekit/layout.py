"""Tensors with their channels last in memory; model folders say whether their model's lie so."""

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
