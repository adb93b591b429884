"""Checks on what fails: numbers that are not finite, sizes that do not fit together, and other exceptions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd

from prunekit.inspection.diagnosis.findings import DATA_ORDER, MAX_NAMES, Finding, check
from prunekit.inspection.diagnosis.observation import Failure, Observation
from prunekit.inspection.diagnosis.recorders import shapes_text
from prunekit.utils.display import listed
from prunekit.utils.tensors import is_finite


@check("non_finite", "data")
def non_finite(observation: Observation) -> Iterator[Finding]:
    """Yield the first NaN or Inf: in the inputs, a parameter or buffer, an activation, the loss, or a gradient."""
    for place in (_images, _tensors, _activation, _loss, _gradient):
        found = place(observation)
        if found is not None:
            yield found
            return


def _images(observation: Observation) -> Finding | None:
    if not observation.data.not_finite:
        return None
    count = observation.data.not_finite
    came = f"{count} values of the {observation.samples} are NaN or Inf"
    return _finding(
        "data", DATA_ORDER, came, f"look at how {observation.samples} are read and normalized", {"count": count}
    )


def _tensors(observation: Observation) -> Finding | None:
    named: Iterable[tuple[str, Tensor]] = [*observation.model.named_parameters(), *observation.model.named_buffers()]
    wrong = [name for name, tensor in named if not is_finite(tensor)]
    if not wrong:
        return None
    first = min(wrong, key=lambda name: observation.place(name.rpartition(".")[0]))
    path = first.rpartition(".")[0]
    came = f"{listed([first, *(name for name in wrong if name != first)], MAX_NAMES)} hold NaN or Inf"
    advice = "load weights that are finite; where training made these, lower the learning rate"
    return _finding(path, observation.place(path), came, advice, {"tensors": wrong})


def _activation(observation: Observation) -> Finding | None:
    stats, mode = (observation.stats, "train") if observation.stats.non_finite else (observation.eval_stats, "eval")
    if not stats.non_finite:
        return None
    first, after = stats.non_finite[0], len(stats.non_finite) - 1
    path, side = first.key.module, first.key.side
    came = f"in {mode} mode {first}; {after} activations after it have some too"
    where = "what is computed between this module and the one before" if side == "input" else "this module"
    advice = f"look into {where}: a division by zero, the logarithm or root of what may be 0, an overflow"
    figures = {"count": first.count, "batch": first.batch, "channel": first.channel, "after": after, "mode": mode}
    return _finding(path, observation.place(path), came, advice, figures)


def _loss(observation: Observation) -> Finding | None:
    wrong = [number for number, value in enumerate(observation.losses, 1) if value - value != 0]
    if not wrong:
        return None
    came = f"the loss of batch {wrong[0]} is {observation.losses[wrong[0] - 1]}, and every module's output is finite"
    advice = "look at the loss, and at what the model computes behind its last module"
    return _finding("", len(observation.order), came, advice, {"batch": wrong[0]})


def _gradient(observation: Observation) -> Finding | None:
    gradients = observation.gradients
    if gradients is None:
        return None
    wrong = [name for name, norm in gradients.parameters.items() if norm is not None and norm - norm != 0]
    if gradients.not_finite is None and not wrong:
        return None
    path = gradients.not_finite if gradients.not_finite is not None else wrong[-1].rpartition(".")[0]
    came = f"the gradient of its output is NaN or Inf, the first on the way back; {len(wrong)} parameters get such ones"
    advice = "look behind this module for an operation that has no gradient: the root of 0, a division by a norm of 0"
    return _finding(path, observation.place(path), came, advice, {"parameters": wrong})


def _finding(path: str, order: int, came: str, advice: str, evidence: dict[str, object]) -> Finding:
    return Finding(path, order, "finite numbers", came, advice, evidence)


@check("shape_mismatch", "data")
def shape_mismatch(observation: Observation) -> Iterator[Finding]:
    """Yield the module, or operator between modules, whose inputs have sizes that it does not take."""
    failure = observation.failure
    if failure is not None and failure.of_shapes:
        advice = "change the size where the tensor is computed, or the size that the module is built for"
        yield _failed(observation, failure, _wanted(observation.model, failure), advice)


@check("run_error", "data")
def run_error(observation: Observation) -> Iterator[Finding]:
    """Yield the exception that the model, the loss or the backward pass raised for another reason."""
    failure = observation.failure
    if failure is not None and not failure.of_shapes:
        expected = f"{failure.stage} to finish"
        yield _failed(observation, failure, expected, "see the line and the error")


def _failed(observation: Observation, failure: Failure, expected: str, advice: str) -> Finding:
    at = f"{failure.line}: " if failure.line else ""
    given = [f"{name} {shape}" for name, shape in failure.operands.items()]
    received = ", ".join(given) if given and not failure.module else shapes_text(failure.received)
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
    return Finding(failure.module, observation.place(failure.module), expected, came, advice, evidence)


def _wanted(model: nn.Module, failure: Failure) -> str:
    """Return which inputs the module that raised takes."""
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
    return f"sizes that fit together in {kind}"
