"""Memory format of images: channels last where a model computes the same with it, else as it was given."""

from typing import Any

import torch
from torch import Tensor, nn

from prunekit.channels.float64 import rounding
from prunekit.channels.tracing.substitutes import substituted_copy
from prunekit.errors import reason_of
from prunekit.hooks.model_copy import named_tensors
from prunekit.measure.verification import largest_difference
from prunekit.utils.context import same_draws, training_mode, without_gradients
from prunekit.utils.inputs import call, inputs_as_example, select_samples
from prunekit.utils.tensors import gather, map_tensors

TRIED = 2
"""Samples, at most, on which a memory format is tried."""


def images_channels_last(inputs: Any) -> Any:
    """Return inputs whose images (B, C, H, W) have their channels last in memory, the others as they are."""
    last = torch.channels_last
    return map_tensors(inputs, lambda one: one.contiguous(memory_format=last) if one.dim() == 4 else one)


def in_fastest_format(model: nn.Module, samples: Any, *, training: bool = False) -> Any:
    """Return samples with the channels of images last in memory where the model computes the same, else as given.

    That halves the time of patches and of convolutions on the CPU. But code may `view` what only lies one after the
    other in another format, read strides, or take values as they lie: such a model gets what its owner gives it.
    """
    laid = images_channels_last(samples)
    moved = any(one.stride() != was.stride() for one, was in zip(gather(laid), gather(samples), strict=True))
    if not moved or not any(tensor.dim() == 4 for _, tensor in named_tensors(model)):
        return samples
    few, few_laid = (inputs_as_example(model, select_samples(one, slice(TRIED))) for one in (samples, laid))
    modes = (False, True) if training else (False,)  # a model to train has to run in both
    return samples if any(difference_in_format(model, few, model, few_laid, training=m) for m in modes) else laid


def difference_in_format(
    model: nn.Module, example: tuple[Any, ...], other: nn.Module, laid: tuple[Any, ...], *, training: bool = False
) -> str:
    """Return in words how a model in another memory format differs in its own precision; empty if it does not."""
    try:
        want = _output(model, example, training)
        got = _output(other, laid, training)
    except Exception as error:  # whatever the model's own code makes of strides
        return reason_of(error)
    difference, reason = largest_difference(want, got)
    return "" if difference <= rounding(gather(want)) else reason


def _output(model: nn.Module, example: tuple[Any, ...], training: bool) -> Any:
    """Return what a model computes in either mode on a copy of the example; what it writes into buffers is lost."""
    buffers = {name for name, _ in model.named_buffers()}
    copy, inputs = substituted_copy(model, own=lambda name: name in buffers), map_tensors(example, Tensor.clone)
    with same_draws(copy), training_mode(copy, training):
        return without_gradients(lambda: call(copy, inputs))
