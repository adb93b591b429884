"""BatchNorm folded into the convolution or linear layer before it (Jacob et al., 2018)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from prunekit.channels.copying import copied, named_tensors, with_tensors
from prunekit.channels.differences import TOLERANCE
from prunekit.channels.doubled import doubled, to_double
from prunekit.compaction.folded import FoldedNorm, set_folds
from prunekit.context import seeded, set_mode
from prunekit.deploy.foldable import Foldable, Pair, foldable
from prunekit.inputs import example as normalized
from prunekit.measure.operator_costs import is_subnormal
from prunekit.measure.verify import compare_outputs
from prunekit.wrappers import unwrapped


@dataclass(frozen=True, eq=False)
class Folded:
    """What `fold_batchnorm` returns.

    Attributes:
        model: a new one, in eval mode.
        norms: path of each folded norm -> path of the layer that does its work.
        kept: path of each other norm that ran -> why it stays.
        max_relative_difference: of the outputs on the example, in float64.
    """

    model: nn.Module
    norms: dict[str, str]
    kept: dict[str, str]
    max_relative_difference: float


def fold_batchnorm(model: nn.Module, example: Any, *, tolerance: float = TOLERANCE) -> Folded:
    """Folds every BatchNorm that alone reads a convolution's or a linear layer's output into that layer.

    What is left computes the same in eval mode with one operator and one pass over the activations less for each norm.
    Folded weights that processors would compute with slowly, as subnormal in their dtype, are 0.
    It is for inference: no statistics are left that training could update. Folders of folded models are written and
    read as others are; `prunekit.verify` compares with the masked model before folding, not after.

    Args:
        model: not changed.
        example: what the model is called with: a tensor, a tuple of positional arguments or a mapping of arguments by
            name; layers are found by running the model on it.
        tolerance: largest relative difference of the outputs, in float64, that counts as equal.

    Raises:
        UsageError: the example is none of these.
        VerificationError: the folded model computes something else.

    Example:
        >>> import prunekit as pk, torch
        >>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.ReLU())
        >>> folded = pk.fold_batchnorm(model, torch.randn(1, 3, 8, 8))
        >>> folded.norms, folded.max_relative_difference < 1e-12
        ({'1': '0'}, True)
        >>> folded.model(torch.randn(1, 3, 8, 8)).shape
        torch.Size([1, 8, 6, 6])
    """
    model = unwrapped(model)
    given = normalized(model, example)
    found = to_fold(model, given)
    double = _folded(doubled(model, to_double), found.pairs)
    narrow = folded(model, found.pairs)
    difference = compare_outputs(model, double, given, tolerance=tolerance, narrow=narrow)
    return Folded(narrow, {pair.norm: pair.layer for pair in found.pairs}, found.kept, difference)


def to_fold(model: nn.Module, example: tuple[Any, ...]) -> Foldable:
    """What `fold_batchnorm` folds: norms that alone read a layer's output and do no more than a norm."""
    found = foldable(model, example)
    reasons = {pair.norm: _more_than_a_norm(model.get_submodule(pair.norm), pair) for pair in found.pairs}
    more = {norm: reason for norm, reason in reasons.items() if reason}
    return Foldable(tuple(pair for pair in found.pairs if pair.norm not in more), found.kept | more)


def folded(model: nn.Module, pairs: Sequence[Pair]) -> nn.Module:
    """A copy in eval mode with norms folded, as `to_fold` found them in a model of these modules; nothing is checked.

    Args:
        model: of any widths; may be without values, on the meta device.
    """
    own = {name: tensor.detach().clone() for name, tensor in named_tensors(model)}
    return set_mode(_folded(with_tensors(model, own), pairs), False)


def _more_than_a_norm(module: nn.Module, pair: Pair) -> str:
    """Why a module is not a norm with, at most, its parts in a row behind it; empty where it is one."""
    if not isinstance(module, _BatchNorm):
        return f"{type(module).__name__} is no BatchNorm of torch"
    norm = copied(module, "cpu", torch.float64).eval()
    assert isinstance(norm, _BatchNorm)
    with seeded(0), torch.no_grad():
        values = torch.randn(pair.shape, dtype=torch.float64)
        want = norm(values.clone())
        scale, shift = _scale_and_shift(norm)
        by_channel = [-1, *(1,) * (values.dim() - 2)]
        got = FoldedNorm(norm, pair.layer)(values * scale.view(by_channel) + shift.view(by_channel))
    same = isinstance(want, Tensor) and want.shape == got.shape and torch.allclose(want, got, rtol=1e-9, atol=1e-9)
    return "" if same else f"{type(module).__name__} does more than a norm and its parts behind it"


def _scale_and_shift(norm: _BatchNorm) -> tuple[Tensor, Tensor]:
    """(channels,) each, in float64."""
    assert norm.running_mean is not None
    assert norm.running_var is not None
    scale = (norm.running_var.double() + norm.eps).rsqrt()
    if norm.weight is not None:
        scale = scale * norm.weight.double()
    shift = -norm.running_mean.double() * scale
    return scale, shift if norm.bias is None else shift + norm.bias.double()


@torch.no_grad()
def _folded(model: nn.Module, pairs: Sequence[Pair]) -> nn.Module:
    """Folds norms in place, computing in float64."""
    norms = [model.get_submodule(pair.norm) for pair in pairs]
    set_folds(model, {pair.norm: pair.layer for pair in pairs})
    for pair, norm in zip(pairs, norms, strict=True):
        assert isinstance(norm, _BatchNorm)
        layer, (scale, shift) = model.get_submodule(pair.layer), _scale_and_shift(norm)
        weight, bias = layer.get_parameter("weight"), layer.get_parameter("bias")
        weight.copy_(_scaled(weight.double(), scale, transposed=pair.transposed))
        bias.copy_(bias.double() * scale + shift)
        for tensor in (weight, bias):  # small scales make subnormal numbers, which are slow
            tensor.masked_fill_(is_subnormal(tensor), 0)
    return model


def _scaled(weight: Tensor, scale: Tensor, *, transposed: bool) -> Tensor:
    """A weight with each output multiplied by its scale, (outputs, ...) or (inputs, outputs of a group, ...)."""
    if not transposed:
        return weight * scale.view(-1, *(1,) * (weight.dim() - 1))
    groups = scale.numel() // weight.shape[1]
    by_group = weight.reshape(groups, -1, *weight.shape[1:])  # (groups, inputs of one, outputs of one, ...)
    return (by_group * scale.view(groups, 1, -1, *(1,) * (weight.dim() - 2))).flatten(0, 1)
