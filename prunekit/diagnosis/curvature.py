"""How sharply the loss is curved, and up to which learning rate a step along its sharpest direction is stable."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from prunekit.context import gradients_of
from prunekit.diagnosis.observation import StepSize

TRIAL = 16
"""Steps on one batch that are tried where the learning rate is beyond what the curvature allows: networks of ReLUs may
be thrown to where the loss is flatter (Lewkowycz et al. 2020, "The large learning rate phase of deep learning: the
catapult mechanism"), and normalized weights grow until a step is short beside them (Arora et al. 2019, "Theoretical
analysis of auto rate-tuning by batch normalization"). Such models train, others diverge, and only trying tells."""
ITERATIONS = 12
NEGLIGIBLE = 0.2
"""Share of the sharpness that matters below which half of the iterations are enough."""
DIFFERENCE = 1e-4
"""How far weights are moved to either side for a difference of gradients, as a share of their norm: in float32 the
difference stays well above rounding, and curvatures of up to 1e4 change the loss by less than a tenth."""
SETTLED = 0.05
"""Change from one iteration to the next, as a share, below which the eigenvalue is taken as found."""


def stable_rate(step: StepSize, sharpness: float) -> float:
    """The largest learning rate at which gradient descent does not grow along the sharpest direction of a quadratic.

    2 / sharpness, and with momentum b 2 (1 + b) / sharpness; full batches train just at it (Cohen et al. 2021,
    "Gradient descent on neural networks typically occurs at the edge of stability").
    """
    return 2 * (1 + step.momentum) / sharpness


def too_sharp(step: StepSize) -> float:
    """The sharpness beyond which the learning rate is not stable."""
    return 2 * (1 + step.momentum) / step.lr


def trial(loss: Callable[[], Tensor], weights: Sequence[Tensor], step: StepSize) -> tuple[float, ...]:
    """The loss of one batch before each of up to `TRIAL` steps of SGD on it; the weights are changed.

    Ends in the second half as soon as it is below where it began: that is what it is to tell.
    """
    velocity = [torch.zeros_like(weight) for weight in weights]
    losses: list[float] = []
    while len(losses) < TRIAL and not recovers(losses):
        with torch.enable_grad():
            value = loss()
            gradients = gradients_of(value, weights)
        losses.append(float(value.detach()))
        with torch.no_grad():
            for weight, gradient, moving in zip(weights, gradients, velocity, strict=True):
                if gradient is not None:
                    weight.sub_(moving.mul_(step.momentum).add_(gradient), alpha=step.lr)
    return tuple(losses)


def recovers(losses: Sequence[float]) -> bool:
    """Whether a trial's loss is below where it began in its second half; NaN and Inf are not."""
    return any(loss < losses[0] for loss in losses[TRIAL // 2 :])


def largest_eigenvalue(loss: Callable[[], Tensor], weights: Sequence[Tensor], enough: float) -> float | None:
    """The largest eigenvalue of a loss's Hessian, by power iteration on Hessian-vector products.

    The Rayleigh quotient of every iterate is a bound below it, so that stopping early never says too much. Iterates
    that lead to a negative eigenvalue of larger size are turned away from it by a shift. Products are central
    differences of gradients (LeCun et al. 1993, "Automatic learning rate maximization by on-line estimation of the
    Hessian's eigenvectors"): many operators have no second derivative, and depthwise convolutions take minutes for it.

    Args:
        loss: computes it, with a graph; the same for the same weights.
        weights: what it is a function of; moved, and put back.
        enough: the sharpness that matters; iteration ends above it.

    Returns:
        None where the loss has no curvature that is a finite number.
    """
    found, shift, base = None, 0.0, [weight.detach().clone() for weight in weights]
    try:
        vectors = _gradients(loss, weights)  # that is where a step goes, and it mostly lies in the sharpest directions
        for iteration in range(ITERATIONS):
            norm = float(torch.nn.utils.get_total_norm(vectors))
            if not math.isfinite(norm) or norm == 0:
                break
            vectors = [vector / norm for vector in vectors]
            products = _products(loss, weights, base, vectors)
            quotient = float(sum((v * p).sum().double() for v, p in zip(vectors, products, strict=True)))
            settled = found is not None and abs(quotient - found) <= SETTLED * abs(quotient)
            found = quotient if found is None else max(found, quotient)
            small = iteration >= ITERATIONS // 2 and 0 < found < NEGLIGIBLE * enough
            if (settled and quotient > 0) or small or found > enough:
                break
            shift = max(shift, -quotient)
            vectors = [product + shift * vector for product, vector in zip(products, vectors, strict=True)]
    finally:
        _move(weights, base, base, 0.0)
    return found if found is not None and math.isfinite(found) else None


def _products(
    loss: Callable[[], Tensor], weights: Sequence[Tensor], base: Sequence[Tensor], vectors: Sequence[Tensor]
) -> list[Tensor]:
    """The Hessian times a vector of length 1."""
    far = DIFFERENCE * max(1.0, float(torch.nn.utils.get_total_norm(base)))
    _move(weights, base, vectors, far)
    ahead = _gradients(loss, weights)
    _move(weights, base, vectors, -far)
    behind = _gradients(loss, weights)
    return [(front - back) / (2 * far) for front, back in zip(ahead, behind, strict=True)]


@torch.no_grad()
def _move(weights: Sequence[Tensor], base: Sequence[Tensor], along: Sequence[Tensor], far: float) -> None:
    for weight, start, direction in zip(weights, base, along, strict=True):
        weight.copy_(start if far == 0 else start + far * direction)


def _gradients(loss: Callable[[], Tensor], weights: Sequence[Tensor]) -> list[Tensor]:
    with torch.enable_grad():
        found = gradients_of(loss(), weights)
    return [torch.zeros_like(w) if g is None else g.detach() for w, g in zip(weights, found, strict=True)]
