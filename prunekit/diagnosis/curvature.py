"""How sharply the loss is curved, and up to which learning rate a step along its sharpest direction is stable."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from prunekit.calibration.curvature import hessian_times
from prunekit.channels.running import plain_attention
from prunekit.diagnosis.observation import StepSize

MARGIN = 6.0
"""How far beyond the stable learning rate training still recovers: from up to 12 over the sharpness, 6 times the limit
of 2 over it, networks of ReLUs are thrown to where the loss is flatter, and beyond it they diverge (Lewkowycz et al.
2020, "The large learning rate phase of deep learning: the catapult mechanism")."""
TRIAL = 10
"""Steps on one batch, after which its loss has fallen below where it began unless training diverges. Normalisation
makes weights grow where a step was too long, until it no longer is (Arora et al. 2019, "Theoretical analysis of auto
rate-tuning by batch normalization"): such models train far beyond the margin, and only trying tells."""
ITERATIONS = 12
SETTLED = 0.05
"""Change from one iteration to the next, as a share, below which the eigenvalue is taken as found: the margin is far
wider."""


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
    """The sharpness from which on the learning rate is too high by more than `MARGIN`."""
    return MARGIN * 2 * (1 + step.momentum) / step.lr


def largest_eigenvalue(loss: Callable[[], Tensor], weights: Sequence[Tensor], enough: float) -> float | None:
    """The largest eigenvalue of a loss's Hessian, by power iteration on Hessian-vector products (Pearlmutter 1994).

    The Rayleigh quotient of every iterate is a bound below it, so that stopping early never says too much.

    Args:
        loss: computes it, with a graph.
        weights: what it is a function of.
        enough: iteration ends above this.

    Returns:
        None where the loss has no curvature that is a finite number.

    Raises:
        UsageError: an operator has no second derivative.
    """
    with torch.enable_grad(), plain_attention():  # fused kernels have no second derivative
        gradients = torch.autograd.grad(loss(), weights, create_graph=True, allow_unused=True)
        # Along the gradient first: that is where a step goes, and it mostly lies in the sharpest directions.
        vectors = [
            torch.zeros_like(w) if g is None else g.detach().clone() for w, g in zip(weights, gradients, strict=True)
        ]
        found = None
        for _ in range(ITERATIONS):
            norm = _norm(vectors)
            if not torch.isfinite(norm) or float(norm) == 0:
                return found
            vectors = [vector / norm for vector in vectors]
            products = [
                torch.zeros_like(v) if product is None else product.detach()
                for v, product in zip(vectors, hessian_times(vectors, weights, gradients), strict=True)
            ]
            quotient = float(sum((v * p).sum().double() for v, p in zip(vectors, products, strict=True)))
            settled = found is not None and abs(quotient - found) <= SETTLED * abs(quotient)
            found = quotient if found is None else max(found, quotient)
            if settled or found > enough:
                break
            vectors = products
    return found


def _norm(vectors: Sequence[Tensor]) -> Tensor:
    return torch.nn.utils.get_total_norm(vectors)
