"""The curvature of a loss: its sharpness, the learning rates that are stable there, and steps that are tried.

The sharpness is the largest eigenvalue of the loss's Hessian.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from prunekit.inspection.diagnosis.observation import StepSize
from prunekit.utils.context import gradients_of

TRIAL = 16
"""Steps that are tried on one batch if the learning rate is beyond what the curvature allows: networks of ReLUs may
leave for where the loss is flatter (Lewkowycz et al. 2020, "The large learning rate phase of deep learning: the
catapult mechanism"), and normalized weights grow until a step is short compared to them (Arora et al. 2019,
"Theoretical analysis of auto rate-tuning by batch normalization"). Such models train, others diverge, and only a trial
tells which."""
ITERATIONS = 12
NEGLIGIBLE = 0.2
"""Share of `enough` below which half of the iterations suffice."""
DIFFERENCE = 1e-4
"""Distance by which weights are moved to either side for a difference of gradients, as a share of their norm: in
float32 the difference stays well above rounding, and curvatures of up to 1e4 change the loss by less than a tenth."""
SETTLED = 0.05
"""Relative change from one iteration to the next below which the eigenvalue has converged."""


def largest_eigenvalue(loss: Callable[[], Tensor], weights: Sequence[Tensor], enough: float) -> float | None:
    """Return the largest eigenvalue of a loss's Hessian, by power iteration on Hessian-vector products.

    The Rayleigh quotient of every iterate is a lower bound, so that stopping early never overstates it. A shift keeps
    iterates from converging to a negative eigenvalue of larger size. Products are central differences of gradients
    (LeCun et al. 1993, "Automatic learning rate maximization by on-line estimation of the Hessian's eigenvectors"),
    because many operators have no second derivative, and that of depthwise convolutions takes minutes.
    """
    found, shift, base = None, 0.0, [weight.detach().clone() for weight in weights]
    try:
        vectors = _gradients(loss, weights)  # where a step goes, mostly along the sharpest directions
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
    """Return the Hessian times a vector of length 1."""
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


def stable_learning_rate(step: StepSize, sharpness: float) -> float:
    """Return the largest learning rate at which gradient descent on a quadratic loss does not diverge.

    It is 2 / sharpness, and with momentum b 2 (1 + b) / sharpness; training on full batches settles just there (Cohen
    et al. 2021, "Gradient descent on neural networks typically occurs at the edge of stability").
    """
    return 2 * (1 + step.momentum) / sharpness


def sharpness_limit(step: StepSize) -> float:
    """Return the sharpness beyond which the learning rate of a step is not stable."""
    return 2 * (1 + step.momentum) / step.lr


def try_steps(loss: Callable[[], Tensor], weights: Sequence[Tensor], step: StepSize) -> tuple[float, ...]:
    """Return the loss of one batch before each of up to `TRIAL` steps of SGD on it; the weights are changed.

    In the second half it ends as soon as the loss is below where it began.
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
    """Return whether losses of steps fall below the first one in their second half; NaN and Inf do not."""
    return any(loss < losses[0] for loss in losses[TRIAL // 2 :])
