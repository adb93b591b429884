"""Weights laid out with their channels last, as most convolution kernels read them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from prunekit.channels.copying import named_tensors, with_tensors
from prunekit.measure.verify import compare_outputs

FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}


def channels_last(model: nn.Module, example_inputs: tuple[Any, ...]) -> nn.Module:
    """A copy whose convolutions hold their weights channels-last, and so compute their outputs.

    Memory alone lies in another order: names and shapes stay. A model folder does not record it.

    Args:
        model: not changed.
        example_inputs: positional arguments of `forward`.

    Raises:
        VerificationError: the copy computes something else, as code may that looks at strides.
    """
    moved = {
        name: tensor.detach().clone(memory_format=FORMATS.get(tensor.dim(), torch.preserve_format))
        for name, tensor in named_tensors(model)
    }
    result = with_tensors(model, moved)
    compare_outputs(model, result, example_inputs)
    return result
