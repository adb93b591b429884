"""Channel labels: how the channels of a model hang together, found by running it once."""

from __future__ import annotations

from typing import Any

from torch import nn

from prunekit.channels.attention import SizedMultiheadAttention
from prunekit.channels.map import ChannelGroup, ChannelMap, Lock
from prunekit.channels.resolve import channel_map
from prunekit.channels.tracing import channel_axis, trace_model
from prunekit.errors import UsageError


def trace(model: nn.Module, example_inputs: tuple[Any, ...], *more_examples: tuple[Any, ...]) -> ChannelMap:
    """Runs a model on example inputs and returns its channel map; the model is not changed.

    Args:
        model: any module; traced in eval mode, and once more in train mode if its code asks which of the two it is in.
        example_inputs: the positional arguments of `forward`, such as `(torch.randn(1, 3, 224, 224),)`.
        more_examples: further inputs, for branches that the first does not take.

    Raises:
        UsageError: an example is not a tuple.
        ModelError: the model does not run on an example, or cannot be copied.
    """
    for example in (example_inputs, *more_examples):
        if not isinstance(example, tuple):
            raise UsageError(
                f"example_inputs: expected a tuple, the positional arguments of forward, got {type(example).__name__}; "
                "a single input is written (x,)"
            )
    return channel_map(model, trace_model(model, [example_inputs, *more_examples]))


__all__ = ["ChannelGroup", "ChannelMap", "Lock", "SizedMultiheadAttention", "channel_axis", "trace"]
