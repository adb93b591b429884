"""Folded norms: placeholders for BatchNorms whose scale and shift are in the layer before them."""

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from prunekit.hooks.model_copy import named_tensors, with_tensors

Folds = Mapping[str, str]
"""Path of a BatchNorm -> path of the convolution or linear layer that it was folded into."""


class FoldedNorm(nn.Sequential):
    """A placeholder for a folded BatchNorm: the modules that it ran after its own work, usually none."""

    def __init__(self, norm: nn.Module, layer: str) -> None:
        super().__init__(OrderedDict(norm.named_children()))
        self.layer = layer  # path of the module that holds its scale and shift
        self.training = norm.training


def folds_of(model: nn.Module) -> dict[str, str]:
    """Return the folded norms of a model by their path, with the paths of the layers that hold them."""
    return {path: module.layer for path, module in model.named_modules() if isinstance(module, FoldedNorm)}


def set_folds(model: nn.Module, folds: Folds) -> None:
    """Replace norms by `FoldedNorm`, in place, and give the layers before them a bias of zeros."""
    for path, layer in folds.items():
        norm, before = model.get_submodule(path), model.get_submodule(layer)
        weight = before._parameters.get("weight")
        if not isinstance(norm, _BatchNorm) or norm.running_mean is None:
            raise ValueError(f"{path}: expected a BatchNorm with running statistics, got {type(norm).__name__}")
        if weight is None or "bias" not in before._parameters:
            raise ValueError(f"{layer}: expected a layer with a weight and a bias, got {type(before).__name__}")
        if before.bias is None:
            zeros = torch.zeros(norm.num_features, dtype=weight.dtype, device=weight.device)
            before.bias = nn.Parameter(zeros, requires_grad=weight.requires_grad)
        rest = FoldedNorm(norm, layer)
        for parent in list(model.modules()):
            for name, child in parent._modules.items():
                if child is norm:
                    parent._modules[name] = rest


def with_folds(model: nn.Module, folds: Any) -> nn.Module:
    """Return a model with folded norms, which shares its tensors with the given one; that one is not changed."""
    if not folds:
        return model
    if not isinstance(folds, dict) or not all(isinstance(text, str) for pair in folds.items() for text in pair):
        raise TypeError("expected a mapping of module paths to module paths")
    twin = with_tensors(model, {name: tensor.detach() for name, tensor in named_tensors(model)})
    set_folds(twin, folds)
    return twin


def with_folded_biases(kept: Mapping[str, Any], folds: Folds) -> dict[str, Any]:
    """Return kept indices (or shapes) by tensor, where the bias that a folded norm left has the norm's."""
    result = dict(kept)
    for path, layer in folds.items():
        biased = result.get(f"{path}.running_mean")
        for name in ("weight", "bias", "running_mean", "running_var"):
            result.pop(f"{path}.{name}", None)
        if biased is not None:
            result[f"{layer}.bias"] = biased
    return result
