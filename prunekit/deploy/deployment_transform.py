"""Transforms for a deployment: channels-last weights, no subnormals, and all changes as one function for timing.

Subnormal numbers are too small for full precision, and very slow on many processors. Only those of float32, bfloat16
and float64 count: float16 is computed in wider formats, in which they are normal.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from prunekit.deploy.batchnorm_folding import FoldablePair, fold_copy, foldable_norms
from prunekit.errors import UsageError, VerificationError, reraise_shortage
from prunekit.hooks.model_copy import named_tensors, with_tensors
from prunekit.hooks.wrappers import unwrapped
from prunekit.measure.memory_format import difference_in_format
from prunekit.measure.verification import compare_outputs
from prunekit.modes.public_call import public_call
from prunekit.settings.deployment import DeploySettings
from prunekit.utils.inputs import as_example
from prunekit.utils.tensors import FORMATS, is_subnormal, with_channels_last


@public_call
def channels_last(model: nn.Module, example: Any) -> nn.Module:
    """Return a copy whose convolutions have channels-last weights, and so compute channels-last outputs.

    Only the order in memory changes, not names or shapes. Model folders record it, and loaded models have it again.

    Args:
        model: not changed.
        example: what it is called with: a tensor, a tuple of positional arguments or a mapping of arguments by name.

    Raises:
        UsageError: the example is none of these.
        VerificationError: the copy does not run, or computes something else, as code that reads strides may.

    Example:
        >>> import prunekit as pk, torch
        >>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU())
        >>> faster = pk.channels_last(model, torch.randn(2, 3, 8, 8))
        >>> model[0].weight.stride(), faster[0].weight.stride()
        ((27, 9, 3, 1), (27, 1, 9, 3))
    """
    model = unwrapped(model)
    result = laid_out(model)
    compare_outputs(model, result, as_example(model, example))
    return result


def laid_out(model: nn.Module) -> nn.Module:
    """Return what `channels_last` returns, without verifying it; the model may be on the meta device."""
    moved = {name: with_channels_last(tensor.detach()) for name, tensor in named_tensors(model)}
    return with_tensors(model, moved)


@dataclass(frozen=True, eq=False)
class Transform:
    """`fold_batchnorm` and `channels_last` as one function, for a model and all compact models made of it.

    Results are not verified. Models may be on the meta device.
    """

    settings: DeploySettings = field(default_factory=DeploySettings)  # which changes to make
    pairs: tuple[FoldablePair, ...] = ()  # norms to fold and the layers before them

    def __call__(self, model: nn.Module) -> nn.Module:
        """Return a copy in eval mode; the model itself where there is nothing to do."""
        found = fold_copy(model, self.pairs) if self.settings.fold_batchnorm else model
        return laid_out(found) if self.settings.channels_last else found

    def __str__(self) -> str:
        """Return what it does in words; empty if it does nothing."""
        norms = ["BatchNorm folded"] if self.settings.fold_batchnorm else []
        return " and ".join([*norms, *(["channels last"] if self.settings.channels_last else [])])


AS_IT_IS = Transform()


def channels_last_problem(model: nn.Module, example: tuple[Any, ...]) -> str:
    """Return a message that a model does not run, or computes something else, with channels last; empty if it does."""
    reason = difference_in_format(model, example, laid_out(model), example)
    return reason and (
        f"deploy.channels_last: expected a model that computes the same with channels last, and {type(model).__name__} "
        f"does not: {reason}; use flatten or reshape where its code uses view, or set it to false"
    )


def transform_of(model: nn.Module, example: tuple[Any, ...], settings: DeploySettings) -> Transform:
    """Return the transform of a dense model, and of its compact models, for a deployment."""
    if settings.channels_last and (problem := channels_last_problem(model, example)):
        raise UsageError(problem)
    pairs = foldable_norms(model, example).pairs if settings.fold_batchnorm else ()
    return Transform(settings, tuple(replace(pair, output=None) for pair in pairs))


def for_inference(model: nn.Module, example: tuple[Any, ...]) -> nn.Module:
    """Return a copy with norms folded and channels last; the model itself if that does not compute the same."""
    if not any(kernel.dim() in FORMATS for kernel in model.parameters()):
        return model
    try:
        changed = transform_of(model, example, DeploySettings(fold_batchnorm=True))
        copy = replace(changed, settings=replace(changed.settings, channels_last=True))(model)
    except Exception as error:  # whatever code of the model's own makes of being watched or copied
        reraise_shortage(error)
        return model
    return model if difference_in_format(model, example, copy, example) else copy


@dataclass(frozen=True, eq=False)
class FlushedModel:
    """Result of `flush_subnormals`."""

    model: nn.Module  # a new one; the given one if it has none
    counts: dict[str, int]  # name of each tensor that held subnormal numbers -> how many
    max_relative_difference: float  # of the outputs on the example, in float64
    stay: str = ""  # why subnormal numbers were left; empty if none were

    @property
    def notes(self) -> tuple[str, ...]:
        """Messages about the result."""
        return (str(self),) if self.counts or self.stay else ()

    def __str__(self) -> str:
        return self.stay or (
            f"{sum(self.counts.values())} subnormal numbers in {len(self.counts)} tensors set to 0; outputs change by "
            f"{self.max_relative_difference:.1e}"
        )


@public_call
def flush_subnormals(model: nn.Module, example: Any) -> FlushedModel:
    """Return a copy with zeros in place of subnormal weights and buffers, if there are any.

    Args:
        model: not changed.
        example: what it is called with: a tensor, a tuple of positional arguments or a mapping of arguments by name.

    Raises:
        UsageError: the example is none of these.
        VerificationError: the copy computes something else.

    Example:
        >>> import prunekit as pk, torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))
        >>> model[0].weight.data[0] = 1e-40  # where weight decay ends; many processors compute with it slowly
        >>> flushed = pk.flush_subnormals(model, torch.randn(1, 4))
        >>> flushed.counts, flushed.model[0].weight[0].tolist()
        ({'0.weight': 4}, [0.0, 0.0, 0.0, 0.0])
    """
    model = unwrapped(model)
    return without_subnormals(model, as_example(model, example), strict=True)


@public_call
def without_subnormals(model: nn.Module, example: tuple[Any, ...], *, strict: bool = False) -> FlushedModel:
    """Return what `flush_subnormals` does; unless strict, the model itself if its outputs change by that."""
    if next(_holding(model), None) is None:
        return FlushedModel(model, {}, 0.0)
    own = {name: tensor.detach().clone() for name, tensor in named_tensors(model)}
    flushed = with_tensors(model, own)
    counts = flush_subnormals_in_place(flushed)
    try:
        return FlushedModel(flushed, counts, compare_outputs(model, flushed, example))
    except VerificationError as error:  # the model takes their logarithm, or divides by them
        if strict:
            raise
        return FlushedModel(model, {}, 0.0, f"{sum(counts.values())} subnormal numbers stay: {error}")


@torch.no_grad()
def flush_subnormals_in_place(model: nn.Module) -> dict[str, int]:
    """Set subnormal weights and buffers to 0, and return how many each tensor held."""
    counts = {}
    for name, tensor, found in _holding(model):
        tensor.masked_fill_(found, 0)
        counts[name] = int(found.sum())
    return counts


def _holding(model: nn.Module) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield parameters and buffers with subnormal numbers by name, complex ones viewed as real, and masks of them."""
    for name, tensor in named_tensors(model):
        if tensor.layout != torch.strided:
            continue
        real = torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor
        if real.is_floating_point() and bool((found := is_subnormal(real)).any()):
            yield name, real, found
