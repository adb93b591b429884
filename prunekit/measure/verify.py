"""The proof: the compact model computes what the masked model computes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import inf
from typing import Any

import torch
from torch import nn

from prunekit.channels.comparing import check, following, record
from prunekit.channels.copying import has_gradients, named_tensors
from prunekit.channels.differences import TOLERANCE
from prunekit.channels.doubled import as_double, doubled, to_double
from prunekit.channels.narrowed import NarrowNorms
from prunekit.channels.precision import AS_DOUBLE, Precision
from prunekit.channels.running import plain_attention
from prunekit.channels.slicing import cut
from prunekit.context import training_mode
from prunekit.errors import ModelError, UsageError, VerificationError
from prunekit.measure.differing import apart, largest_difference
from prunekit.nested import tensors_in
from prunekit.planning import Plan


@dataclass(frozen=True)
class Verification:
    """How far masked and compact model are apart.

    Attributes:
        max_relative_difference: largest absolute difference of any output over the largest absolute reference value.
        inputs: samples compared.
        dtype: in which both were computed.
    """

    max_relative_difference: float
    inputs: int
    dtype: str = "float64"


def verify(
    masked: nn.Module,
    compact: nn.Module,
    plan: Plan,
    examples: Iterable[tuple[Any, ...]],
    *,
    tolerance: float = TOLERANCE,
) -> Verification:
    """Compares masked and compact model in float64 on the CPU: their outputs in eval mode, and what is in them.

    An output need not show a wrong index: the channel may be dead on these inputs. So every tensor of the compact
    model is compared with the kept entries of the masked one as well. Scores that are equal but for rounding may come
    in another order: outputs that differ are compared once more with the order of the masked model in both.

    Both are compared as they come back from a file: without what Accelerate or torch put around a method of an
    instance, such as autocast.

    Args:
        masked: the dense-sized model with zeros where the plan prunes, as fine-tuning left it; not re-masked here,
            but its norms see kept channels only, as under the masks.
        compact: what `prunekit.compaction.compact` made of it.
        plan: for finding the operator when they differ.
        examples: positional inputs of `forward`, one tuple for each call.
        tolerance: largest relative difference that counts as equal.

    Raises:
        PlanError: the plan is that of another model.
        VerificationError: they differ, or hold NaN; the message names the first operator and its module path.
        ModelError: the masked model does not run in float64, see `channels.precision`.
        UsageError: there is no example, or no tensor in the output: nothing would be compared.
    """
    plan.require_model(masked)
    masked64, compact64 = doubled(masked, to_double), doubled(compact, to_double)
    worst, seen = 0.0, 0
    misplaced = _misplaced(masked64, compact64, plan, tolerance)
    for example in examples:
        inputs = as_double(example, noise=False)
        precision, want = _expected(masked64, plan, inputs)
        try:
            got = _run(compact64, inputs, precision)
        except Exception as error:  # whatever the model's own code makes of a wrong size
            difference, reason = inf, f"{type(error).__name__}: {error}".splitlines()[0]
        else:
            difference, reason = largest_difference(want, got)
        if misplaced or not difference <= tolerance:
            difference, reason = _by_operator(masked64, compact64, plan, inputs, precision, misplaced or reason)
        if misplaced and difference <= tolerance:
            difference, reason = inf, f"{misplaced}; no operator before shows it"
        if not difference <= tolerance:
            raise VerificationError(f"masked and compact model differ: {reason}")
        worst = max(worst, difference)
        seen += next((tensor.shape[0] for tensor in tensors_in(inputs) if tensor.dim()), 1)
    if not seen:
        raise UsageError("examples: expected at least one input to compare the models on, got none")
    return Verification(worst, seen)


def compare_outputs(
    model: nn.Module, changed: nn.Module, example: tuple[Any, ...], *, tolerance: float = TOLERANCE
) -> float:
    """Largest relative difference of the outputs of two models in eval mode, in float64 on the CPU.

    Args:
        model: the reference.
        changed: what should compute the same.
        example: positional inputs of `forward`.
        tolerance: largest relative difference that counts as equal.

    Raises:
        VerificationError: they differ by more, or one output holds NaN.
        ModelError: the model does not run in float64, see `channels.precision`.
    """
    inputs = as_double(example, noise=False)
    precision, want = _in_double(doubled(model, to_double), inputs)
    difference, reason = largest_difference(want, _run(doubled(changed, to_double), inputs, precision))
    if not difference <= tolerance:
        raise VerificationError(f"{type(model).__name__} and its changed copy differ: {reason}")
    return difference


def _expected(masked: nn.Module, plan: Plan, inputs: tuple[Any, ...]) -> tuple[Precision, Any]:
    """The first way of running the masked model in float64 that its code lets through, and what it computes."""
    with NarrowNorms(masked, plan.channel_map, plan.keep):
        return _in_double(masked, inputs)


def _in_double(model: nn.Module, inputs: tuple[Any, ...]) -> tuple[Precision, Any]:
    failures = []
    for precision in AS_DOUBLE:
        try:
            return precision, _run(model, inputs, precision)
        except Exception as error:  # whatever the model's own code makes of a type that it does not expect
            failures.append(error)
    raise ModelError(
        f"{type(model).__name__} does not run in float64, in which models are compared: "
        f"{type(failures[0]).__name__}: {failures[0]}; expected code that takes the type of its inputs"
    ) from failures[0]


def _run(model: nn.Module, inputs: tuple[Any, ...], precision: Precision) -> Any:
    with training_mode(model, False), torch.no_grad(), plain_attention(), precision():
        return model(*inputs)


def _by_operator(
    masked: nn.Module, compact: nn.Module, plan: Plan, inputs: tuple[Any, ...], precision: Precision, reason: str
) -> tuple[float, str]:
    """Where two models first part; nowhere if only equal scores came in another order, see `Decision`."""
    if plan.channel_map.source is None:
        return inf, f"{reason}; the plan was read from a file: trace the model again to find the operator"
    run = plan.channel_map.traced.trace.runs[0]
    reference = record(masked, plan.channel_map, plan.keep, inputs, run, precision)
    divergence = check(reference, compact, inputs, run)[1]
    if divergence is not None:
        return inf, f"first at {divergence}"
    difference, reason = largest_difference(reference.outputs, following(reference, compact, inputs, run))
    return difference, f"{reason}; no operator before shows it"


def _misplaced(masked: nn.Module, compact: nn.Module, plan: Plan, tolerance: float) -> str:
    """The first tensor of the compact model that is not the kept entries of the masked one's; empty if none."""
    narrow = dict(named_tensors(compact))
    for name, tensor in named_tensors(masked):
        if name in narrow and has_gradients(tensor) and tensor.numel():
            difference, _ = apart(cut(tensor, plan.kept_indices.get(name, ())), narrow[name].detach())
            if not difference <= tolerance:
                return f"{name} of the compact model is not what the plan keeps of the masked model's"
    return ""
