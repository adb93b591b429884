"""NaN and Inf: where they come from.

Sizes that do not go together, and whatever else a model raises.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd

from prunekit.inspection.diagnosis.findings import BEFORE, NAMED, Finding, check
from prunekit.inspection.diagnosis.forward_watch import shown
from prunekit.inspection.diagnosis.observation import Failure, Observation
from prunekit.utils.display import listed


@check("non_finite", "data")
def non_finite(seen: Observation) -> Iterator[Finding]:
    """Yield the first place that is NaN or Inf: images, a parameter or buffer, an activation, the loss, a gradient."""
    for place in (_images, _tensors, _activation, _loss, _gradient):
        found = place(seen)
        if found is not None:
            yield found
            return


def _images(seen: Observation) -> Finding | None:
    if not seen.data.not_finite:
        return None
    count = seen.data.not_finite
    came = f"{count} values of the images are NaN or Inf"
    return _finding("data", BEFORE, came, "look at how images are read and normalized", {"count": count})


def _tensors(seen: Observation) -> Finding | None:
    named: Iterable[tuple[str, Tensor]] = [*seen.model.named_parameters(), *seen.model.named_buffers()]
    wrong = [name for name, tensor in named if not bool(torch.isfinite(tensor).all())]
    if not wrong:
        return None
    first = min(wrong, key=lambda name: seen.place(name.rpartition(".")[0]))
    path = first.rpartition(".")[0]
    came = f"{listed([first, *(name for name in wrong if name != first)], NAMED)} hold NaN or Inf"
    advice = "load weights that are finite; where training made these, lower the learning rate"
    return _finding(path, seen.place(path), came, advice, {"tensors": wrong})


def _activation(seen: Observation) -> Finding | None:
    stats, mode = (seen.stats, "train") if seen.stats.non_finite else (seen.evaluated, "eval")
    if not stats.non_finite:
        return None
    first, after = stats.non_finite[0], len(stats.non_finite) - 1
    path, side = first.key.module, first.key.side
    came = f"in {mode} mode {first}; {after} activations after it have some too"
    where = "what comes before this module, between it and the one before" if side == "input" else "this module"
    advice = f"look into {where}: a division by zero, the logarithm or root of what may be 0, an overflow"
    figures = {"count": first.count, "batch": first.batch, "channel": first.channel, "after": after, "mode": mode}
    return _finding(path, seen.place(path), came, advice, figures)


def _loss(seen: Observation) -> Finding | None:
    wrong = [number for number, value in enumerate(seen.loss, 1) if value - value != 0]
    if not wrong:
        return None
    came = f"the loss of batch {wrong[0]} is {seen.loss[wrong[0] - 1]}, and every module's output is finite"
    advice = "look at the loss, and at what the model computes behind its last module"
    return _finding("", len(seen.order), came, advice, {"batch": wrong[0]})


def _gradient(seen: Observation) -> Finding | None:
    gradients = seen.gradients
    if gradients is None:
        return None
    wrong = [name for name, norm in gradients.parameters.items() if norm is not None and norm - norm != 0]
    if gradients.not_finite is None and not wrong:
        return None
    path = gradients.not_finite if gradients.not_finite is not None else wrong[-1].rpartition(".")[0]
    came = f"the gradient of its output is NaN or Inf, the first on the way back; {len(wrong)} parameters get such ones"
    advice = "look for what has no slope there behind this module: the root of 0, a division by a norm that is 0"
    return _finding(path, seen.place(path), came, advice, {"parameters": wrong})


def _finding(path: str, order: int, came: str, advice: str, evidence: dict[str, object]) -> Finding:
    return Finding("non_finite", path, order, "finite numbers", came, advice, evidence)


@check("shape_mismatch", "data")
def shape_mismatch(seen: Observation) -> Iterator[Finding]:
    """Yield a module, or an operator between modules, was given sizes that it does not take."""
    failure = seen.failure
    if failure is not None and failure.of_shapes:
        advice = "change the size where it is made, on the way that the tensor took, or what the module is built for"
        yield _finding_shapes(seen, failure, "shape_mismatch", _wanted(seen.model, failure), advice)


@check("run_error", "data")
def run_error(seen: Observation) -> Iterator[Finding]:
    """Yield the model, the loss or the backward pass raised for another reason."""
    failure = seen.failure
    if failure is not None and not failure.of_shapes:
        expected = f"{failure.stage} to run to its end"
        yield _finding_shapes(seen, failure, "run_error", expected, "see the line and the error")


def _finding_shapes(seen: Observation, failure: Failure, kind: str, expected: str, advice: str) -> Finding:
    at = f"{failure.line}: " if failure.line else ""
    given = [f"{name} {shape}" for name, shape in failure.operands.items()]
    received = ", ".join(given) if given and not failure.module else shown(failure.received)
    came = f"{received}, in {failure.stage}; {at}{failure.error}"
    if failure.trail:
        came += f"; its way: {' -> '.join(map(str, failure.trail))}"
    evidence = {
        "received": [list(shape) for shape in failure.received],
        "operands": {name: list(shape) for name, shape in failure.operands.items()},
        "trail": [str(step) for step in failure.trail],
        "line": failure.line,
        "error": failure.error,
    }
    return Finding(kind, failure.module, seen.place(failure.module), expected, came, advice, evidence)


def _wanted(model: nn.Module, failure: Failure) -> str:
    """Return what the module that raised takes."""
    module = model.get_submodule(failure.module)
    kind = type(module).__name__
    if isinstance(module, _ConvNd):
        return f"an input (N, {module.in_channels}, ...) of {kind}"
    if isinstance(module, nn.Linear):
        return f"an input (..., {module.in_features}) of {kind}"
    if isinstance(module, _BatchNorm):
        return f"an input (N, {module.num_features}, ...) of {kind}"
    if isinstance(module, nn.GroupNorm):
        return f"an input (N, {module.num_channels}, ...) of {kind}"
    if isinstance(module, (nn.LayerNorm, nn.RMSNorm)):
        return f"an input (..., {', '.join(map(str, module.normalized_shape))}) of {kind}"
    if failure.stage == "the loss":
        return "outputs and labels that the loss takes: for a classifier scores (N, classes) and labels (N,)"
    return f"sizes that go together in {kind}"
