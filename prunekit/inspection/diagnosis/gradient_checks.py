"""Gradients that grow or shrink on their way back.

Parameters that do not learn.

How sharply the loss is curved, and up to which learning rate a step along its sharpest direction is stable.

A learning rate that is too high for the loss's curvature.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

from prunekit.channels.cut.model_copy import has_gradients
from prunekit.inspection.diagnosis.findings import NAMED, Finding, check
from prunekit.inspection.diagnosis.observation import Gradients, Observation, StepSize
from prunekit.utils.context import gradients_of
from prunekit.utils.display import listed

VANISHED = 1e-5
"""Norm of the loss's gradient for a module's output, as a share of that for the model's output, below which it has
vanished. Initializations keep it of one size through the layers (Glorot & Bengio 2010; He et al. 2015): the first
layers of 14 healthy models of torchvision and CIFAR, fresh and trained, show 0.1 to 2000, and saturated or badly scaled
ones lose a factor at each layer."""
EXPLODED = 1e5
"""The same share above which it has exploded."""


@check("vanishing_gradient", "gradients")
def vanishing_gradient(seen: Observation) -> Iterator[Finding]:
    """No module before some point gets a gradient to speak of.

    A branch that starts at next to nothing on purpose, such as a zero-initialized or scaled residual one, is none: the
    modules before it get their gradient past it. Nor is one that a zero weight stops which itself gets a gradient.
    """
    gradients = seen.gradients
    assert gradients is not None
    shares = _shares(seen, gradients)
    gone: list[str] = []
    for path, share in shares:
        if not share < VANISHED:
            if gone and not _starts_at_zero(seen.model.get_submodule(path)):
                yield _vanished(seen, gone, path, dict(shares))
            return
        gone.append(path)


def _vanished(seen: Observation, gone: list[str], before: str, shares: dict[str, float]) -> Finding:
    last, first = gone[-1], gone[0]
    return Finding(
        "vanishing_gradient",
        last,
        seen.place(last),
        f"gradients of at least {VANISHED:g} of that of the model's output",
        f"{shares[last]:.2g} of it, {shares[before]:.2g} at {before}, and {shares[first]:.2g} at {first}: the "
        f"{len(gone)} modules up to here learn next to nothing",
        "use activations that do not saturate, an initialization made for them (He), normalization or shortcuts",
        {"share": shares[last], "share_at_first": shares[first], "modules": gone},
    )


@check("exploding_gradient", "gradients")
def exploding_gradient(seen: Observation) -> Iterator[Finding]:
    """Yield the gradient grows on its way back beyond all measure; named is the module in which it grows most."""
    gradients = seen.gradients
    assert gradients is not None
    shares = _shares(seen, gradients)
    over = [path for path, share in shares if share > EXPLODED]
    if over:
        largest, most = max(shares, key=lambda item: item[1])
        growth, culprit = _steepest(shares)
        yield Finding(
            "exploding_gradient",
            culprit,
            seen.place(culprit),
            f"gradients of at most {EXPLODED:g} times that of the model's output",
            f"it grows to {most:.2g} times that at {largest}; {growth:.2g} times on its way back through {culprit}",
            "scale the initialization to the layers' width (He), normalize, or clip gradients",
            {"largest_share": most, "growth": growth, "modules": over},
        )


def _steepest(shares: list[tuple[str, float]]) -> tuple[float, str]:
    """Return the largest growth of what has been the largest so far, from the last module back, and the module it is
    in.
    """
    best, largest = (0.0, shares[-1][0]), 0.0
    for (path, share), (_, before) in zip(reversed(shares), [*reversed(shares)][1:], strict=False):
        largest = max(largest, share)
        if largest > 0:
            best = max(best, (before / largest, path))
    return best


def _shares(seen: Observation, gradients: Gradients) -> list[tuple[str, float]]:
    """Return modules in order of execution, each with the norm of its output's gradient over that of the model's
    output.
    """
    if not gradients.model > 0:
        return []
    ran = sorted((path for path in gradients.outputs if path in seen.order), key=seen.place)
    return [(path, gradients.outputs[path] / gradients.model) for path in ran]


def _starts_at_zero(module: nn.Module) -> bool:
    """Return whether a module multiplies by a weight of zeros, as classifiers and residual branches may begin."""
    weight = getattr(module, "weight", None)
    return weight is not None and not bool(weight.detach().any())


@check("unused_parameter", "gradients")
def unused_parameter(seen: Observation) -> Iterator[Finding]:
    """Trainable parameters on which the loss depends in no batch."""
    assert seen.gradients is not None
    unused = [name for name, norm in seen.gradients.parameters.items() if norm is None]
    if unused:
        never = [name for name in unused if _owner(name) not in seen.order]
        why = (
            "its module never runs" if _owner(unused[0]) not in seen.order else "what it makes does not reach the loss"
        )
        yield Finding(
            "unused_parameter",
            _owner(unused[0]),
            seen.place(_owner(unused[0])),
            "a loss that depends on every trainable parameter",
            f"{len(unused)} parameters get no gradient: {listed(unused, NAMED)}; {why}",
            "use the module in forward, look for detach() and no_grad(), or remove it",
            {"parameters": unused, "never_ran": len(never)},
        )


@check("frozen_parameter", "model")
def frozen_parameter(seen: Observation) -> Iterator[Finding]:
    """Yield parameters that do not require a gradient."""
    named = [(name, parameter) for name, parameter in seen.model.named_parameters() if has_gradients(parameter)]
    frozen = [name for name, parameter in named if not parameter.requires_grad]
    if frozen:
        share = sum(parameter.numel() for _, parameter in named if not parameter.requires_grad)
        total = sum(parameter.numel() for _, parameter in named)
        yield Finding(
            "frozen_parameter",
            _owner(frozen[0]),
            seen.place(_owner(frozen[0])),
            "parameters that require gradients",
            f"{len(frozen)} of {len(named)} are frozen, {share / total:.1%} of all values: {listed(frozen, NAMED)}",
            "set requires_grad_(True) on what is to learn; if they are frozen on purpose, ignore frozen_parameter",
            {"parameters": frozen, "share": share / total},
        )


def _owner(name: str) -> str:
    return name.rpartition(".")[0]


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
    """Return the largest learning rate at which gradient descent does not grow along the sharpest direction of a
    quadratic.

    2 / sharpness, and with momentum b 2 (1 + b) / sharpness; full batches train just at it (Cohen et al. 2021,
    "Gradient descent on neural networks typically occurs at the edge of stability").
    """
    return 2 * (1 + step.momentum) / sharpness


def too_sharp(step: StepSize) -> float:
    """Return the sharpness beyond which the learning rate is not stable."""
    return 2 * (1 + step.momentum) / step.lr


def trial(loss: Callable[[], Tensor], weights: Sequence[Tensor], step: StepSize) -> tuple[float, ...]:
    """Return the loss of one batch before each of up to `TRIAL` steps of SGD on it; the weights are changed.

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
    """Return whether a trial's loss is below where it began in its second half; NaN and Inf are not."""
    return any(loss < losses[0] for loss in losses[TRIAL // 2 :])


def largest_eigenvalue(loss: Callable[[], Tensor], weights: Sequence[Tensor], enough: float) -> float | None:
    """Return the largest eigenvalue of a loss's Hessian, by power iteration on Hessian-vector products.

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


@check("learning_rate", "step")
def learning_rate(seen: Observation) -> Iterator[Finding]:
    """SGD that is unstable along the sharpest direction and does not recover; Adam that replaces the weights."""
    step = seen.step
    assert step is not None
    if step.adaptive:
        yield from _adaptive(seen, step.lr)
    elif seen.sharpness is not None and seen.sharpness > too_sharp(step) and not recovers(seen.trial):
        stable = stable_rate(step, seen.sharpness)
        yield Finding(
            "learning_rate",
            "",
            len(seen.order),
            f"a learning rate of at most {stable:.2g}, or one from which training recovers",
            f"{step.lr:.3g}, where the sharpest curvature of the loss is at least {seen.sharpness:.3g}"
            + (f" and the momentum {step.momentum:g}" if step.momentum else "")
            + f"; on one batch {len(seen.trial)} steps take the loss from {seen.trial[0]:.3g} to {seen.trial[-1]:.3g}",
            f"lower it to about {stable:.1g}, or begin with a warm-up",
            {
                "lr": step.lr,
                "sharpness": seen.sharpness,
                "stable_lr": stable,
                "momentum": step.momentum,
                "trial": list(seen.trial),
            },
        )


def _adaptive(seen: Observation, lr: float) -> Iterator[Finding]:
    """Adam's first step moves every weight by the learning rate, whatever the gradient (Kingma & Ba 2015, section 2.1):
    it must be small beside the weights."""
    sizes = sorted(
        float(weight.detach().float().norm()) / math.sqrt(weight.numel())
        for weight in seen.model.parameters()
        if weight.ndim > 1 and weight.requires_grad and bool(weight.detach().any())
    )
    if sizes and lr > sizes[len(sizes) // 2]:
        middle = sizes[len(sizes) // 2]
        yield Finding(
            "learning_rate",
            "",
            len(seen.order),
            f"a learning rate well below the size of the weights, {middle:.2g} (root mean square, median layer)",
            f"{lr:.3g}: Adam's first step moves every weight by that much, more than there is of it",
            f"lower it to {middle / 10:.1g} at most, or begin with a warm-up",
            {"lr": lr, "weights": middle},
        )
