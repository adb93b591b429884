"""A learning rate that is too high for the loss's curvature."""

from __future__ import annotations

import math
from collections.abc import Iterator

from prunekit.diagnosis.curvature import recovers, stable_rate, too_sharp
from prunekit.diagnosis.findings import Finding, check
from prunekit.diagnosis.observation import Observation


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
