"""The proof: the compact model computes what the masked model computes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from prunekit.channels.comparing import TOLERANCE, as_double, compare
from prunekit.channels.doubled import doubled, to_double
from prunekit.channels.nested import tensors_in
from prunekit.context import training_mode
from prunekit.errors import VerificationError
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
    """Compares the outputs of masked and compact model in float64, in eval mode, on the CPU.

    Args:
        masked: the dense-sized model with zeros where the plan prunes, as fine-tuning left it; not re-masked here.
        compact: what `prunekit.compaction.compact` made of it.
        plan: for finding the operator when they differ.
        examples: positional inputs of `forward`, one tuple for each call.
        tolerance: largest relative difference that counts as equal.

    Raises:
        VerificationError: they differ; the message names the first operator and its module path.
    """
    masked64, compact64 = doubled(masked, to_double), doubled(compact, to_double)
    worst, seen = 0.0, 0
    for example in examples:
        inputs = as_double(example)
        with training_mode(masked64, False), training_mode(compact64, False), torch.no_grad():
            try:
                difference = _difference(masked64(*inputs), compact64(*inputs))
            except RuntimeError as error:
                difference = float("nan")
                reason = str(error).splitlines()[0]
            else:
                reason = f"outputs differ by {difference:.3g} of the largest"
        if not difference <= tolerance:
            raise VerificationError(
                f"masked and compact model differ: {_where(masked64, compact64, plan, inputs, reason)}"
            )
        worst = max(worst, difference)
        seen += next((tensor.shape[0] for tensor in tensors_in(inputs) if tensor.dim()), 1)
    return Verification(worst, seen)


def _where(masked: nn.Module, compact: nn.Module, plan: Plan, inputs: tuple[Any, ...], reason: str) -> str:
    if plan.channel_map.source is None:
        return f"{reason}; the plan was read from a file: trace the model again to find the operator"
    run = plan.channel_map.traced.trace.runs[0]
    divergence = compare(masked, compact, plan.channel_map, plan.keep, inputs, run)[1]
    return f"{reason}; only the final outputs part" if divergence is None else f"first at {divergence}"


def _difference(want: Any, got: Any) -> float:
    worst = 0.0
    for reference, value in zip(tensors_in(want), tensors_in(got), strict=True):
        if reference.shape != value.shape:
            return float("inf")
        scale = max(float(reference.abs().max()), torch.finfo(torch.float64).tiny)
        worst = max(worst, float((reference - value).abs().max()) / scale)
        if worst != worst:
            return worst
    return worst
