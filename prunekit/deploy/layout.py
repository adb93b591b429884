"""Weights laid out with their channels last, as most convolution kernels read them."""

from __future__ import annotations

from typing import Any

from torch import nn

from prunekit.channels.copying import named_tensors, with_tensors
from prunekit.inputs import example as normalized
from prunekit.layout import with_channels_last
from prunekit.measure.verify import compare_outputs
from prunekit.wrappers import unwrapped


def channels_last(model: nn.Module, example: Any) -> nn.Module:
    """A copy whose convolutions hold their weights channels-last, and so compute their outputs.

    Memory alone lies in another order: names and shapes stay. A model folder says so, and models loaded from it lie
    so again.

    Args:
        model: not changed.
        example: what it is called with: a tensor, a tuple of positional arguments or a mapping of arguments by name.

    Raises:
        UsageError: the example is none of these.
        VerificationError: the copy computes something else, as code may that looks at strides.

    Example:
        >>> import prunekit as pk, torch
        >>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU())
        >>> faster = pk.channels_last(model, torch.randn(2, 3, 8, 8))
        >>> model[0].weight.stride(), faster[0].weight.stride()
        ((27, 9, 3, 1), (27, 1, 9, 3))
    """
    model = unwrapped(model)
    result = laid_out(model)
    compare_outputs(model, result, normalized(model, example))
    return result


def laid_out(model: nn.Module) -> nn.Module:
    """As `channels_last`; nothing is checked. The model may be without values, on the meta device."""
    moved = {name: with_channels_last(tensor.detach()) for name, tensor in named_tensors(model)}
    return with_tensors(model, moved)
