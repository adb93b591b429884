"""Checks on gradients: vanishing, exploding, parameters that do not learn, and a learning rate that is too high.

The learning rate is compared with the curvature of the loss: its sharpness is the largest eigenvalue of the Hessian.
"""

import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

from prunekit.hooks.model_copy import has_gradients
from prunekit.inspection.diagnosis.findings import MAX_NAMES, Finding, GradientNorms, Observation, StepSize, check
from prunekit.utils import display as numbers
from prunekit.utils.context import gradients_of
from prunekit.utils.display import listed

VANISHED = 1e-5
"""Norm of the gradient of a module's output over that of the model's output, below which the gradient has vanished.
Initializations keep it constant through the layers (Glorot & Bengio 2010; He et al. 2015): the first layers of 14
healthy models of torchvision and CIFAR, fresh and trained, show 0.1 to 2000; saturated or badly scaled models lose a
factor at each layer."""
EXPLODED = 1e5
"""The same share above which it has exploded."""


@check("vanishing_gradient", "gradients")
def vanishing_gradient(observation: Observation) -> Iterator[Finding]:
    """Yield the last module of those at the beginning of the model that get hardly any gradient.

    Residual branches that are zero-initialized or scaled down are no fault: the modules before them get their gradient
    by the shortcut. Nor is a gradient that is stopped by a weight of zeros which itself gets a gradient.
    """
    gradients = observation.gradients
    assert gradients is not None
    shares = _shares(observation, gradients)
    gone: list[str] = []
    for path, share in shares:
        if not share < VANISHED:
            if gone and not _starts_at_zero(observation.model.get_submodule(path)):
                last, first, known = gone[-1], gone[0], dict(shares)
                yield Finding(
                    last,
                    observation.place(last),
                    f"gradients of at least {VANISHED:g} of that of the model's output",
                    f"{known[last]:.2g} of it, {share:.2g} at {path}, and {known[first]:.2g} at {first}: the "
                    f"{len(gone)} modules up to here learn hardly anything",
                    "use activations that do not saturate, an initialization made for them (He), normalization or "
                    "shortcuts",
                    {"share": known[last], "share_at_first": known[first], "modules": gone},
                )
            return
        gone.append(path)


@check("exploding_gradient", "gradients")
def exploding_gradient(observation: Observation) -> Iterator[Finding]:
    """Yield the module in which gradients grow most, if any module's gradient has exploded."""
    gradients = observation.gradients
    assert gradients is not None
    shares = _shares(observation, gradients)
    over = [path for path, share in shares if share > EXPLODED]
    if over:
        largest, most = max(shares, key=lambda item: item[1])
        growth, culprit = _steepest(shares)
        yield Finding(
            culprit,
            observation.place(culprit),
            f"gradients of at most {EXPLODED:g} times that of the model's output",
            f"it grows to {most:.2g} times that at {largest}; {growth:.2g} times on its way back through {culprit}",
            "scale the initialization to the layers' width (He), normalize, or clip gradients",
            {"largest_share": most, "growth": growth, "modules": over},
        )


def _steepest(shares: list[tuple[str, float]]) -> tuple[float, str]:
    """Return the largest growth of the gradient in the backward pass, and the path of its module."""
    best, largest = (0.0, shares[-1][0]), 0.0
    for (path, share), (_, before) in zip(reversed(shares), [*reversed(shares)][1:], strict=False):
        largest = max(largest, share)
        if largest > 0:
            best = max(best, (before / largest, path))
    return best


def _shares(observation: Observation, gradients: GradientNorms) -> list[tuple[str, float]]:
    """Return modules in order of execution, each with its gradient's norm over that of the model's output."""
    if not gradients.model > 0:
        return []
    ran = sorted((path for path in gradients.outputs if path in observation.order), key=observation.place)
    return [(path, gradients.outputs[path] / gradients.model) for path in ran]


def _starts_at_zero(module: nn.Module) -> bool:
    """Return whether a module multiplies by a weight of zeros, as classifiers and residual branches may begin."""
    weight = getattr(module, "weight", None)
    return weight is not None and not bool(weight.detach().any())


@check("unused_parameter", "gradients")
def unused_parameter(observation: Observation) -> Iterator[Finding]:
    """Yield the trainable parameters on which the loss depends in no batch."""
    assert observation.gradients is not None
    unused = [name for name, norm in observation.gradients.parameters.items() if norm is None]
    if unused:
        never = [name for name in unused if _owner(name) not in observation.order]
        runs = _owner(unused[0]) in observation.order
        why = "its output does not reach the loss" if runs else "its module never runs"
        yield Finding(
            _owner(unused[0]),
            observation.place(_owner(unused[0])),
            "a loss that depends on every trainable parameter",
            f"{len(unused)} parameters get no gradient: {listed(unused, MAX_NAMES)}; {why}",
            "use the module in forward, look for detach() and no_grad(), or remove it",
            {"parameters": unused, "never_ran": len(never)},
        )


@check("frozen_parameter", "model")
def frozen_parameter(observation: Observation) -> Iterator[Finding]:
    """Yield the parameters that do not require gradients."""
    named = [(name, parameter) for name, parameter in observation.model.named_parameters() if has_gradients(parameter)]
    frozen = [name for name, parameter in named if not parameter.requires_grad]
    if frozen:
        share = sum(parameter.numel() for _, parameter in named if not parameter.requires_grad)
        total = sum(parameter.numel() for _, parameter in named)
        yield Finding(
            _owner(frozen[0]),
            observation.place(_owner(frozen[0])),
            "parameters that require gradients",
            f"{len(frozen)} of {len(named)} are frozen, {numbers.share(share / total)} of all values: "
            f"{listed(frozen, MAX_NAMES)}",
            "set requires_grad_(True) on those that should learn, or ignore frozen_parameter if that is on purpose",
            {"parameters": frozen, "share": share / total},
        )


def _owner(name: str) -> str:
    return name.rpartition(".")[0]


@check("learning_rate", "step")
def learning_rate(observation: Observation) -> Iterator[Finding]:
    """Yield an SGD step that diverges along the sharpest direction, or an Adam step larger than the weights."""
    step = observation.step
    assert step is not None
    if step.adaptive:
        yield from _adaptive(observation, step.lr)
        return
    sharpness, losses = observation.sharpness, observation.trial
    if sharpness is not None and sharpness > sharpness_limit(step) and not recovers(losses):
        stable = step.lr * sharpness_limit(step) / sharpness
        yield Finding(
            "",
            len(observation.order),
            f"a learning rate of at most {stable:.2g}, or one from which training recovers",
            f"{step.lr:.3g}, where the sharpest curvature of the loss is at least {sharpness:.3g}"
            + (f" and the momentum {step.momentum:g}" if step.momentum else "")
            + f"; on one batch {len(losses)} steps take the loss from {losses[0]:.3g} to {losses[-1]:.3g}",
            f"lower it to about {stable:.1g}, or begin with a warm-up",
            {
                "lr": step.lr,
                "sharpness": sharpness,
                "stable_lr": stable,
                "momentum": step.momentum,
                "trial": list(losses),
            },
        )


def _adaptive(observation: Observation, lr: float) -> Iterator[Finding]:
    """Yield a rate larger than the weights, which Adam's first step moves by it (Kingma & Ba 2015, section 2.1)."""
    sizes = sorted(
        float(weight.detach().float().norm()) / math.sqrt(weight.numel())
        for weight in observation.model.parameters()
        if weight.ndim > 1 and weight.requires_grad and bool(weight.detach().any())
    )
    if sizes and lr > sizes[len(sizes) // 2]:
        middle = sizes[len(sizes) // 2]
        yield Finding(
            "",
            len(observation.order),
            f"a learning rate well below the size of the weights, {middle:.2g} (root mean square, median layer)",
            f"{lr:.3g}: Adam's first step moves every weight by that much, more than the weights are large",
            f"lower it to {middle / 10:.1g} at most, or begin with a warm-up",
            {"lr": lr, "weights": middle},
        )


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


def sharpness_limit(step: StepSize) -> float:
    """Return the sharpness beyond which gradient descent on a quadratic loss diverges at the learning rate of a step.

    It is 2 / rate, and with momentum b 2 (1 + b) / rate; training on full batches settles just there (Cohen et al.
    2021, "Gradient descent on neural networks typically occurs at the edge of stability").
    """
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
