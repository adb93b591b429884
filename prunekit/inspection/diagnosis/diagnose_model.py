"""The diagnosis of a model: every check on one observation, root causes first.

What a finding is likely to have caused is listed with it.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from prunekit.errors import DataError, UsageError, nearest
from prunekit.hooks.wrappers import require_trainable, unwrapped
from prunekit.inspection.diagnosis import activation_checks, data_checks, gradient_checks
from prunekit.inspection.diagnosis.data_checks import Pool, batches_of
from prunekit.inspection.diagnosis.findings import CHECKS, Diagnosis, Finding, Observation, StepSize
from prunekit.inspection.diagnosis.observer import Loss, Training, observe
from prunekit.modes.public_call import public_call
from prunekit.tasks.batches import ModelBatches
from prunekit.tasks.task import Task, get_task
from prunekit.utils.inputs import sample_noun

CHECK_FILES = (activation_checks, data_checks, gradient_checks)
"""Files that register their checks when they are imported."""


@public_call
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
    """Look for faults in a model of any task and its data: every kind in `inspection.diagnosis.findings.CHECKS`.

    The model runs forward and backward on each batch in train mode, and forward on the first one in eval mode; the
    curvature of the loss is computed on the first one. Parameters, buffers, gradients, modes, hooks and the process's
    random state are afterwards what they were. Masked channels, which are zero by weights of zeros, are not reported
    as dead.

    Args:
        model: a dense, masked or compact model, with the weights, device and mode that it is trained with.
        batches: a few batches of inputs (B, ...) and targets, as the model is trained on them, in any form that
            `prunekit.prune` takes; without targets, gradients and learning rate are not checked. All of them are kept
            in memory.
        loss: a function of the model's output and the targets that returns one number, the mean over the batch; None:
            the task's loss, or cross entropy of scores (B, classes) and class labels (B,).
        task: a task or its name, which splits batches of another form and has a loss.
        optimizer: SGD, Adam or AdamW before its first step; None: the learning rate is not checked.
        ignore: kinds that are not looked for, such as `frozen_parameter` if parameters are frozen on purpose.
        pool: the rest of the data set, which is searched for copies; None: the batches are the whole set.
        seed: seed of dropout and other randomness in the model.

    Raises:
        UsageError: a name in `ignore` is no kind of fault.
        DataError: there are no batches, or one has an unknown form, such as without the targets of the task.
        ModelError: the model is compiled: hooks added after `torch.compile` are silently ignored.

    Example:
        >>> import prunekit as pk, torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))
        >>> model[0].bias.data.fill_(-100)[:2]  # the ReLU behind it is always 0
        tensor([-100., -100.])
        >>> print(pk.diagnose(model, [(torch.randn(32, 4), torch.randint(2, (32,)))]))
        1 fault (32 training samples, loss ...)
        ...
        1. dead_relu in 1
           expected: fewer than 50 % of a ReLU's channels without any value above 0
           came:     16 of 16 channels behind 0 are 0 for all 32 inputs
        ...
    """
    model = unwrapped(model)
    require_trainable(model, "diagnose")
    require_kinds(ignore)
    task = None if task is None else get_task(task)
    given = batches_of(ModelBatches(model, batches, task, "batches"), "batches", task)
    if not given or not any(len(batch.images) for batch in given):
        raise DataError("batches: expected at least one batch with an input in it, got none")
    step = None if optimizer is None else step_size(optimizer)
    pool = pool or Pool()
    more, held_out = ModelBatches(model, pool.more, task, "more"), ModelBatches(model, pool.held_out, task, "held_out")
    pool = replace(pool, more=more, held_out=held_out)
    samples = sample_noun(given[0].inputs) if task is None else task.samples
    observation = observe(model, given, Training(task, loss), step, pool, seed, samples)
    wanted = [each for kind, each in CHECKS.items() if kind not in ignore]
    skipped = {each.kind: reason for each in wanted if (reason := observation.missing.get(each.needs)) is not None}
    run = [each for each in wanted if each.kind not in skipped]
    found = (finding for each in run for finding in each.run(observation))
    return Diagnosis(
        findings=with_consequences(found),
        checked=tuple(each.kind for each in run),
        skipped=skipped,
        images=observation.images,
        samples=samples,
        figures=_figures(observation),
    )


def require_kinds(ignore: Sequence[str]) -> None:
    """Raise unless every name is a kind of fault."""
    for kind in ignore:
        if kind not in CHECKS:
            raise UsageError(f"ignore: there is no check {kind!r}; {nearest(kind, CHECKS)}")


def step_size(optimizer: Optimizer) -> StepSize | None:
    """Return the first step of an optimizer; None if its steps are unknown."""
    groups = optimizer.param_groups
    lr = max(float(group["lr"]) for group in groups)
    if isinstance(optimizer, SGD):
        return StepSize(lr, max(float(group["momentum"]) for group in groups))
    return StepSize(lr, adaptive=True) if isinstance(optimizer, (Adam, AdamW)) else None


def _figures(observation: Observation) -> dict[str, float]:
    figures = {"loss": sum(observation.losses) / len(observation.losses)} if observation.losses else {}
    if observation.sharpness is not None:
        figures["sharpness"] = observation.sharpness
    if observation.step is not None:
        figures["lr"] = observation.step.lr
    return figures


_UNITS = frozenset({"dead_relu", "saturated_sigmoid", "constant_channels", "batchnorm_variance"})
_SIZES = frozenset({"exploding_gradient", "vanishing_gradient", "learning_rate"})
CAUSED_LATER: dict[str, frozenset[str]] = {
    "input_normalization": _UNITS | _SIZES,
    "non_finite": _UNITS | _SIZES,
    "batchnorm_variance": _UNITS | {"exploding_gradient", "learning_rate"},
    "constant_channels": _UNITS,
    "dead_relu": _UNITS,
    "saturated_sigmoid": _UNITS,
    "exploding_gradient": frozenset({"learning_rate"}),
}
"""Kinds of faults that a fault causes in modules that run later."""
CAUSED_EARLIER = dict.fromkeys(_UNITS, frozenset({"vanishing_gradient"}))
"""Kinds that it causes in modules that run earlier, by their gradients."""
CONSEQUENCES = ("vanishing_gradient", "exploding_gradient", "learning_rate")
"""Kinds that are more often a consequence of others than their cause."""


def with_consequences(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Return the root causes in order of execution, each with the findings that it is likely to have caused."""
    roots: list[Finding] = []
    below: list[list[Finding]] = []
    for finding in sorted(findings, key=lambda each: (each.kind in CONSEQUENCES, each.order)):
        cause = next((index for index, root in enumerate(roots) if _explains(root, finding)), None)
        if cause is None:
            roots.append(finding)
            below.append([])
        else:
            below[cause].append(finding)
    whole = (replace(root, consequences=tuple(rest)) for root, rest in zip(roots, below, strict=True))
    return tuple(sorted(whole, key=lambda each: each.order))


def _explains(root: Finding, finding: Finding) -> bool:
    later = root.order <= finding.order and finding.kind in CAUSED_LATER.get(root.kind, ())
    return later or finding.kind in CAUSED_EARLIER.get(root.kind, ())
