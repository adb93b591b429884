"""Sizes that do not go together, and whatever else a model raises."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd

from prunekit.diagnosis.failing import shown
from prunekit.diagnosis.findings import Finding, check
from prunekit.diagnosis.observation import Failure, Observation


@check("shape_mismatch", "data")
def shape_mismatch(seen: Observation) -> Iterator[Finding]:
    """A module, or an operator between modules, was given sizes that it does not take."""
    failure = seen.failure
    if failure is not None and failure.of_shapes:
        advice = "change the size where it is made, on the way that the tensor took, or what the module is built for"
        yield _finding(seen, failure, "shape_mismatch", _wanted(seen.model, failure), advice)


@check("run_error", "data")
def run_error(seen: Observation) -> Iterator[Finding]:
    """The model, the loss or the backward pass raised for another reason."""
    failure = seen.failure
    if failure is not None and not failure.of_shapes:
        expected = f"{failure.stage} to run to its end"
        yield _finding(seen, failure, "run_error", expected, "see the line and the error")


def _finding(seen: Observation, failure: Failure, kind: str, expected: str, advice: str) -> Finding:
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
    """What the module that raised takes."""
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
