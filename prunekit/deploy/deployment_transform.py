"""Transforms for a deployment: channels-last weights, and all changes as one function for timing."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from prunekit.deploy.batchnorm_folding import FoldablePair, fold_copy, foldable_norms
from prunekit.errors import UsageError
from prunekit.hooks.model_copy import named_tensors, with_tensors
from prunekit.hooks.wrappers import unwrapped
from prunekit.measure.memory_format import difference_in_format
from prunekit.measure.verification import compare_outputs
from prunekit.modes.public_call import public_call
from prunekit.settings.deployment import DeploySettings
from prunekit.utils.inputs import as_example
from prunekit.utils.tensors import with_channels_last


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

    Attributes:
        settings: which changes to make.
        pairs: norms to fold and the layers before them.
    """

    settings: DeploySettings = field(default_factory=DeploySettings)
    pairs: tuple[FoldablePair, ...] = ()

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
