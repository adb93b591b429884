"""Products of a loss's Hessian with vectors of weights."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from prunekit.errors import UsageError

Factors = Sequence[tuple[Tensor, Tensor | None]]
"""For each parameter two tensors of its shape whose products are summed; None stands for zeros."""


def curvature_factors(
    weights: Sequence[Tensor], gradients: Sequence[Tensor | None], draw: torch.Generator
) -> list[Factors]:
    """Vectors and the Hessian times them: the weights, and the weights with random signs.

    Args:
        gradients: of the loss for each weight, with a graph; None where the loss does not depend on it.
        draw: of the signs, on the CPU.

    Raises:
        UsageError: an operator has no second derivative.
    """
    plain = [weight.detach() for weight in weights]
    signed = [weight * (2 * torch.randint(0, 2, weight.shape, generator=draw) - 1).to(weight) for weight in plain]
    return [list(zip(each, _hessian_times(each, weights, gradients), strict=True)) for each in (plain, signed)]


def _hessian_times(
    vectors: Sequence[Tensor], weights: Sequence[Tensor], gradients: Sequence[Tensor | None]
) -> Sequence[Tensor | None]:
    curved = [(g, v) for g, v in zip(gradients, vectors, strict=True) if g is not None and g.requires_grad]
    if not curved:  # the loss is linear in every weight
        return [None] * len(weights)
    outputs, directions = zip(*curved, strict=True)
    try:
        return torch.autograd.grad(outputs, weights, directions, retain_graph=True, allow_unused=True)
    except RuntimeError as error:
        raise UsageError(
            f"second_order: an operator of the model has no second derivative ({str(error).splitlines()[0]}); score by "
            "'taylor', which needs none"
        ) from error
