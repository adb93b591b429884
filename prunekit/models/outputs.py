"""Outputs of classifiers, with auxiliary logits in training, and checks that there are parameters to train."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torchvision.models.googlenet import GoogLeNetOutputs
from torchvision.models.inception import InceptionOutputs

from prunekit.errors import ModelError


def logits(output: Any) -> Tensor:
    """Return the class logits, (N, classes), of a model's output: a tensor, or an object with `.logits`."""
    found = getattr(output, "logits", output)
    if not isinstance(found, Tensor):
        raise ModelError(
            f"expected a model that returns class logits as a tensor, or an output with .logits; got "
            f"{type(output).__name__}; wrap the model so that it returns its logits"
        )
    return found


def auxiliary(output: Any) -> tuple[tuple[float, Tensor], ...]:
    """Return the auxiliary logits that a training output carries, each with the weight of its loss.

    The weights are 0.3 for GoogLeNet (Szegedy et al. 2015, section 5) and 0.4 for Inception v3, as in torchvision's
    training reference.
    """
    heads: tuple[tuple[float, Tensor | None], ...] = ()
    if isinstance(output, GoogLeNetOutputs):
        heads = ((0.3, output.aux_logits1), (0.3, output.aux_logits2))
    elif isinstance(output, InceptionOutputs):
        heads = ((0.4, output.aux_logits),)
    return tuple((weight, head) for weight, head in heads if head is not None)


def is_frozen(model: nn.Module) -> bool:
    """Return whether a model has no parameter that training could change (none at all counts as frozen)."""
    return not any(parameter.requires_grad for parameter in model.parameters())


def require_trainable(model: nn.Module) -> None:
    """Raise `ModelError` if every parameter of a model is frozen, or if there is none."""
    if is_frozen(model):
        count = sum(1 for _ in model.parameters())
        raise ModelError(
            f"{type(model).__name__}: expected parameters to train, but all {count} have requires_grad=False; "
            "unfreeze some with parameter.requires_grad_(True)"
        )
