"""Gradients that grow or shrink on their way back."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from prunekit.diagnosis.findings import Finding, check
from prunekit.diagnosis.observation import Gradients, Observation

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
    """The gradient grows on its way back beyond all measure; named is the module in which it grows most."""
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
    """The largest growth of what has been the largest so far, from the last module back, and the module it is in."""
    best, largest = (0.0, shares[-1][0]), 0.0
    for (path, share), (_, before) in zip(reversed(shares), [*reversed(shares)][1:], strict=False):
        largest = max(largest, share)
        if largest > 0:
            best = max(best, (before / largest, path))
    return best


def _shares(seen: Observation, gradients: Gradients) -> list[tuple[str, float]]:
    """Modules in order of execution, each with the norm of its output's gradient over that of the model's output."""
    if not gradients.model > 0:
        return []
    ran = sorted((path for path in gradients.outputs if path in seen.order), key=seen.place)
    return [(path, gradients.outputs[path] / gradients.model) for path in ran]


def _starts_at_zero(module: nn.Module) -> bool:
    """Whether a module multiplies by a weight of zeros, as classifiers and residual branches may begin."""
    weight = getattr(module, "weight", None)
    return weight is not None and not bool(weight.detach().any())
