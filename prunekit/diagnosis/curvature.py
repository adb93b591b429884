"""How sharply the loss is curved, and up to which learning rate a step along its sharpest direction is stable."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from prunekit.calibration.curvature import hessian_times
from prunekit.channels.running import plain_attention
from prunekit.diagnosis.observation import StepSize

TRIAL = 16
"""Steps on one batch that are tried where the learning rate is beyond what the curvature allows: networks of ReLUs may
be thrown to where the loss is flatter (Lewkowycz et al. 2020, "The large learning rate phase of deep learning: the
catapult mechanism"), and normalised weights grow until a step is short beside them (Arora et al. 2019, "Theoretical
analysis of auto rate-tuning by batch normalization"). Such models train, others diverge, and only trying tells."""
ITERATIONS = 10
SETTLED = 0.1
"""Change from one iteration to the next, as a share, below which the eigenvalue is taken as found."""


def stable_rate(step: StepSize, sharpness: float) -> float:
    """The largest learning rate at which gradient descent does not grow along the sharpest direction of a quadratic.

    2 / sharpness, and with momentum b 2 (1 + b) / sharpness; full batches train just at it (Cohen et al. 2021,
    "Gradient descent on neural networks typically occurs at the edge of stability").
    """
    return 2 * (1 + step.momentum) / sharpness


def trial(loss: Callable[[], Tensor], weights: Sequence[Tensor], step: StepSize) -> tuple[float, ...]:
    """The loss of one batch before each of `TRIAL` steps of SGD on it; the weights are changed."""
    velocity = [torch.zeros_like(weight) for weight in weights]
    losses = []
    for _ in range(TRIAL):
        with torch.enable_grad():
            value = loss()
            gradients = torch.autograd.grad(value, weights, allow_unused=True)
        losses.append(float(value.detach()))
        with torch.no_grad():
            for weight, gradient, moving in zip(weights, gradients, velocity, strict=True):
                if gradient is not None:
                    weight.sub_(moving.mul_(step.momentum).add_(gradient), alpha=step.lr)
    return tuple(losses)


def too_sharp(step: StepSize) -> float:
    """The sharpness beyond which the learning rate is not stable."""
    return 2 * (1 + step.momentum) / step.lr


def largest_eigenvalue(loss: Callable[[], Tensor], weights: Sequence[Tensor], enough: float) -> float | None:
    """The largest eigenvalue of a loss's Hessian, by power iteration on Hessian-vector products (Pearlmutter 1994).

    The Rayleigh quotient of every iterate is a bound below it, so that stopping early never says too much. Iterates
    that lead to a negative eigenvalue of larger size are turned away from it by a shift.

    Args:
        loss: computes it, with a graph.
        weights: what it is a function of.
        enough: iteration ends above this.

    Returns:
        None where the loss has no curvature that is a finite number.

    Raises:
        UsageError: an operator has no second derivative.
    """
    found, shift = None, 0.0
    with torch.enable_grad(), plain_attention():  # fused kernels have no second derivative
        gradients = torch.autograd.grad(loss(), weights, create_graph=True, allow_unused=True)
        # Along the gradient first: that is where a step goes, and it mostly lies in the sharpest directions.
        pairs = zip(weights, gradients, strict=True)
        vectors = [torch.zeros_like(weight) if gradient is None else gradient.detach() for weight, gradient in pairs]
        for _ in range(ITERATIONS):
            norm = torch.nn.utils.get_total_norm(vectors)
            if not bool(torch.isfinite(norm)) or float(norm) == 0:
                break
            vectors = [vector / norm for vector in vectors]
            products = _products(vectors, weights, gradients)
            quotient = float(sum((v * p).sum().double() for v, p in zip(vectors, products, strict=True)))
            settled = found is not None and abs(quotient - found) <= SETTLED * abs(quotient)
            found = quotient if found is None else max(found, quotient)
            if (settled and quotient > 0) or found > enough:
                break
            shift = max(shift, -quotient)
            vectors = [product + shift * vector for product, vector in zip(products, vectors, strict=True)]
    return found


def _products(
    vectors: Sequence[Tensor], weights: Sequence[Tensor], gradients: Sequence[Tensor | None]
) -> Sequence[Tensor]:
    products = zip(vectors, hessian_times(vectors, weights, gradients), strict=True)
    return [torch.zeros_like(vector) if product is None else product.detach() for vector, product in products]
