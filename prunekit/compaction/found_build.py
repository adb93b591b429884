"""The build of a dense model whose owner does not say it: by a zoo's name, found and proven."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import nn

from prunekit.channels.rewrite.source_rewriter import original_of
from prunekit.models.zoo import Shapes, as_build, zoo_origins
from prunekit.utils.context import device_of, seeded, training_mode
from prunekit.utils.inputs import InputSpec, call, to_device, zeros_of
from prunekit.utils.tensors import gather


def found_build(
    model: nn.Module, shapes: Shapes, specs: Sequence[InputSpec], load: Callable[[dict[str, Any]], nn.Module]
) -> dict[str, Any] | None:
    """Return how a zoo builds the dense model, if what is loaded by that equals the compact one; None if no zoo does.

    Equal are the settings of all modules, which show what acts in train mode alone, and the output, to the bit.

    Args:
        shapes: of the dense model's parameters and buffers, by name.
    """
    own: list[Any] = []
    for settings in zoo_origins(model, shapes):
        build = as_build(settings)
        with suppress(Exception):  # of a model's own code: without a build, a folder is loaded by its owner's
            loaded = load(build)
            own = own or _described(model, specs)
            if own == _described(loaded, specs):
                return build
    return None


def _described(model: nn.Module, specs: Sequence[InputSpec]) -> list[Any]:
    """Return the settings of all modules, and dtypes and bytes of the output for random input, in eval mode."""
    modules = [(path, original_of(type(part)).__name__, part.extra_repr()) for path, part in model.named_modules()]
    example, generator = zeros_of(specs), torch.Generator().manual_seed(0)
    for tensor in gather(example):
        if tensor.is_floating_point():
            tensor.copy_(torch.randn(tensor.shape, generator=generator))
    with training_mode(model, False), torch.no_grad(), seeded(0):
        output = gather(call(model, to_device(example, device_of(model))))
    return [modules, [(one.dtype, one.cpu().contiguous().view(torch.uint8).numpy().tobytes()) for one in output]]
