"""Why a job's pruned model is not as fast as its multiply-accumulates say: a section of the report."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from prunekit.measure.runtimes import Inputs, inputs_of
from prunekit.settings.latency import LatencySettings
from prunekit.workflow.explain import Explanation, explain
from prunekit.workflow.runs import Log

ROUNDS = 11
"""Timed forward passes of each model, as it is and by operator, at most."""


def explain_job(
    dense: nn.Module, pruned: nn.Module, inputs: Sequence[int] | Inputs, settings: LatencySettings, log: Log
) -> dict[str, Any] | None:
    """The explanation of the first batch and thread count in eager on the CPU, as `metrics.json` has it.

    Returns:
        None where it was not asked for, eager is not timed, or it failed, which the log says: the models are run in
        ways that their code may not take, and a whole job is worth more than this section.
    """
    if not settings.explain or "eager" not in settings.runtimes:
        return None
    example, rounds = inputs_of(inputs).sample(settings.batches[0]), min(ROUNDS, settings.repeats)
    try:
        found = explain(dense, pruned, example, threads=settings.threads[0], device="cpu", rounds=rounds)
    except Exception as error:  # whatever a model's own code raises
        log(f"explain: not done: {type(error).__name__}: {error}")
        return None
    for line in _lines(found):
        log(f"explain: {line}")
    return found.figures()


def _lines(found: Explanation) -> list[str]:
    reached = found.speedup.median / found.macs_ratio
    lines = [f"{reached:.0%} of the ideal {found.macs_ratio:.2f}x, the ratio of MACs, was reached"]
    return lines + [f"{cause.name} (about {cause.ms:.3g} ms); to fix it: {cause.fix}" for cause in found.causes]
