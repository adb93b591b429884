"""Every check on one observation of a model.

Root causes first: what another finding is likely to have caused is told with it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from prunekit.errors import DataError, UsageError, nearest
from prunekit.hooks.wrappers import unwrapped
from prunekit.inspection.diagnosis import activation_checks as activations
from prunekit.inspection.diagnosis import activation_checks as norms
from prunekit.inspection.diagnosis import data_checks as data
from prunekit.inspection.diagnosis import gradient_checks as gradients
from prunekit.inspection.diagnosis import gradient_checks as learning_rate
from prunekit.inspection.diagnosis import gradient_checks as parameters
from prunekit.inspection.diagnosis import numeric_checks as numbers
from prunekit.inspection.diagnosis import numeric_checks as shapes
from prunekit.inspection.diagnosis.data_checks import Pool, batches_of
from prunekit.inspection.diagnosis.findings import CHECKS, Diagnosis, Finding
from prunekit.inspection.diagnosis.observation import Observation, StepSize
from prunekit.inspection.diagnosis.observer import Loss, observe
from prunekit.tasks.batches import ModelBatches
from prunekit.tasks.task import Task, get_task

_UNITS = frozenset({"dead_relu", "saturated_sigmoid", "constant_channels", "batchnorm_variance"})
_SIZES = frozenset({"exploding_gradient", "vanishing_gradient", "learning_rate"})
AFTER: dict[str, frozenset[str]] = {
    "input_normalization": _UNITS | _SIZES,
    "non_finite": _UNITS | _SIZES,
    "batchnorm_variance": _UNITS | {"exploding_gradient", "learning_rate"},
    "constant_channels": _UNITS,
    "dead_relu": _UNITS,
    "saturated_sigmoid": _UNITS,
    "exploding_gradient": frozenset({"learning_rate"}),
}
"""What a fault causes in modules that run later."""
BEFORE = dict.fromkeys(_UNITS, frozenset({"vanishing_gradient"}))
"""What it causes on the way back, in modules that ran before."""
LAST = ("vanishing_gradient", "exploding_gradient", "learning_rate")
"""Consequences of the others more often than their cause."""


def folded(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Return the findings that no other explains, in order of execution, each with those that it explains."""
    roots: list[Finding] = []
    below: list[list[Finding]] = []
    for finding in sorted(findings, key=lambda each: (each.kind in LAST, each.order)):
        cause = next((index for index, root in enumerate(roots) if _explains(root, finding)), None)
        if cause is None:
            roots.append(finding)
            below.append([])
        else:
            below[cause].append(finding)
    whole = (replace(root, consequences=tuple(rest)) for root, rest in zip(roots, below, strict=True))
    return tuple(sorted(whole, key=lambda each: each.order))


def _explains(root: Finding, finding: Finding) -> bool:
    later = root.order <= finding.order and finding.kind in AFTER.get(root.kind, ())
    return later or finding.kind in BEFORE.get(root.kind, ())


FILES = (data, shapes, numbers, parameters, norms, activations, gradients, learning_rate)
"""Imported so that their checks are registered."""


def diagnose(
    model: nn.Module,
    batches: Any,
    *,
    loss: Loss | None = None,
    task: Task | str | None = None,
    optimizer: Optimizer | None = None,
    ignore: Sequence[str] = (),
    pool: Pool | None = None,
    seed: int = 0,
) -> Diagnosis:
    """Look for what is wrong with a model and its data: every kind in `prunekit.inspection.diagnosis.findings.CHECKS`.

    The model runs forward and backward on each batch in train mode, and on the first one in eval mode, and the
    curvature of the loss is taken there. Parameters, buffers, gradients, modes, hooks and the process's random state
    are afterwards what they were. Channels that are masked, zero by weights of zeros, are not reported as dead.

    Args:
        model: with the weights, on the device and in the mode in which it would be trained; dense, masked or compact.
        batches: a few batches of inputs (B, ...) and labels, as the model is trained on them, in any form that
            `prunekit.prune` takes; gradients and learning rate are not looked at where labels are missing. All are kept
            in memory.
        loss: from what the model returned and the labels to one number, the mean over the batch; None: cross entropy
            over (B, classes), for labels (B,) that number the classes, or the task's.
        task: takes batches apart that come in another form, and has a loss; itself or its name.
        optimizer: SGD, Adam or AdamW as it would make its first step; None: the learning rate is not looked at.
        ignore: kinds that are not looked for, such as `frozen_parameter` where that is meant.
        pool: what else there is of the data, for copies; None: the batches are all.
        seed: of dropout and of whatever else is random in the model.

    Raises:
        UsageError: a kind in `ignore` is none.
        DataError: there are no batches, or one comes in a form that is not known.
        ModelError: the model is compiled: hooks added after `torch.compile` are silently ignored.

    Example:
        >>> import prunekit as pk, torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))
        >>> model[0].bias.data.fill_(-100)[:2]  # no ReLU behind it ever opens
        tensor([-100., -100.])
        >>> print(pk.diagnose(model, [(torch.randn(32, 4), torch.randint(2, (32,)))]))
        1 fault (32 training images, loss ...)
        ...
        1. dead_relu in 1
           expected: fewer than 50% of a ReLU's channels without any value above 0
           came:     16 of 16 channels behind 0 are 0 for all 32 inputs
        ...
    """
    model = unwrapped(model)
    require_kinds(ignore)
    task = None if task is None else get_task(task)
    given = batches_of(ModelBatches(model, batches, task, "batches"), "batches")
    if not given or not any(len(batch.images) for batch in given):
        raise DataError("batches: expected at least one batch with an input in it, got none")
    step = None if optimizer is None else step_size(optimizer)
    pool = pool or Pool()
    more, held_out = ModelBatches(model, pool.more, task, "more"), ModelBatches(model, pool.held_out, task, "held_out")
    pool = replace(pool, more=more, held_out=held_out)
    seen = observe(model, given, loss or (None if task is None else task.loss), step, pool, seed)
    wanted = [each for kind, each in CHECKS.items() if kind not in ignore]
    skipped = {each.kind: reason for each in wanted if (reason := seen.missing.get(each.needs)) is not None}
    run = [each for each in wanted if each.kind not in skipped]
    found = (finding for each in run for finding in each.run(seen))
    return Diagnosis(
        findings=folded(found),
        checked=tuple(each.kind for each in run),
        skipped=skipped,
        images=seen.images,
        figures=_figures(seen),
    )


def require_kinds(ignore: Sequence[str]) -> None:
    """Checks that each is a kind of fault.

    Raises:
        UsageError: one is none; names the nearest.
    """
    for kind in ignore:
        if kind not in CHECKS:
            raise UsageError(f"ignore: there is no check {kind!r}; {nearest(kind, CHECKS)}")


def _figures(seen: Observation) -> dict[str, float]:
    figures = {"loss": sum(seen.loss) / len(seen.loss)} if seen.loss else {}
    if seen.sharpness is not None:
        figures["sharpness"] = seen.sharpness
    if seen.step is not None:
        figures["lr"] = seen.step.lr
    return figures


def step_size(optimizer: Optimizer) -> StepSize | None:
    """Return how an optimizer makes its first step; None for one whose steps are not known."""
    groups = optimizer.param_groups
    lr = max(float(group["lr"]) for group in groups)
    if isinstance(optimizer, SGD):
        return StepSize(lr, max(float(group["momentum"]) for group in groups))
    return StepSize(lr, adaptive=True) if isinstance(optimizer, (Adam, AdamW)) else None
