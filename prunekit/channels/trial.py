"""The trial: a plan is tried, what differs is locked, and the plan is made again until masked == compact."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from prunekit.channels.attributes import attribute_values
from prunekit.channels.comparing import TOLERANCE, Divergence, as_double, compare, keyed
from prunekit.channels.doubled import DoubledWhileRunning, as_it_is, doubled, to_double, with_zeros
from prunekit.channels.flow import LockRecord
from prunekit.channels.labels import Labels
from prunekit.channels.map import ChannelMap, Keep
from prunekit.channels.resolve import with_locks, with_sizes
from prunekit.channels.searching import SizeSearch
from prunekit.channels.slicing import KeptIndices, bare_widths, kept_indices, narrow
from prunekit.channels.tracing import Operator, Run
from prunekit.context import seeded
from prunekit.errors import ModelError, PlanError

Trial = tuple[float, tuple[Divergence, Run] | None]
"""The largest difference, and where the models parted, if they did."""

OWN_PRECISION = 1e-4
"""Tolerance of a trial in the model's own precision, for models whose code does not let them run in float64."""


@dataclass(frozen=True, eq=False)
class Settled:
    """What the trial agreed to.

    Attributes:
        channel_map: with the locks that were needed.
        keep: the plan made for it, bool (n_labels,).
        compact: the compact model.
        difference: the largest relative difference of any operator between masked and compact model (float64).
    """

    channel_map: ChannelMap
    keep: Keep
    compact: nn.Module
    difference: float


def settle(
    model: nn.Module,
    channel_map: ChannelMap,
    choose: Callable[[ChannelMap], Keep],
    examples: list[tuple[Any, ...]],
    *,
    attempts: int = 20,
) -> Settled:
    """Plans, tries, locks what differs, and plans again until masked and compact model agree everywhere.

    Args:
        choose: makes `keep` (bool, (n_labels,)) for a map; called again after each lock.
        examples: inputs as for the trace.

    Raises:
        PlanError: no agreement after `attempts` locks.
    """
    divergence: Divergence | None = None
    for _ in range(attempts):
        keep = choose(channel_map)
        kept = kept_indices(channel_map, keep)
        widths, attributes = bare_widths(model, channel_map, keep), attribute_values(model, channel_map, keep)
        compact = narrow(model, kept, widths, attributes)

        def attempt(compact: nn.Module = compact, chart: ChannelMap = channel_map, keep: Keep = keep) -> Trial:
            with seeded(0):
                return _try(model, compact, kept_indices(chart, keep), chart, keep, examples)

        worst, found = attempt()
        if found is None:
            return Settled(channel_map, keep, compact, worst)
        divergence, run = found
        sizes = SizeSearch(model, compact, channel_map, keep, lambda: attempt()[1]).after(found)
        locks = () if sizes else _locks_for(divergence, run)
        channel_map = with_locks(with_sizes(channel_map, sizes), locks)
    raise PlanError(f"no plan passed its trial after {attempts} locks; the last to differ was {divergence}")


def _try(
    model: nn.Module,
    compact: nn.Module,
    kept: KeptIndices,
    channel_map: ChannelMap,
    keep: Keep,
    examples: list[tuple[Any, ...]],
) -> tuple[float, tuple[Divergence, Run] | None]:
    """One trial: on every example in eval mode, and in train mode if that differs."""
    worst = 0.0
    for run in channel_map.traced.trace.runs:
        if run.repeats:
            continue

        def compared(masked: nn.Module, small: nn.Module, run: Run = run, dtype: Any = torch.float64) -> Any:
            tolerance = TOLERANCE if dtype else OWN_PRECISION
            return compare(masked, small, channel_map, keep, as_double(examples[run.example], dtype), run, tolerance)

        difference, divergence = _run_in_turn(model, compact, kept, compared)
        worst = max(worst, difference)
        if divergence is not None:
            return worst, (divergence, run)
    return worst, None


def _run_in_turn(
    model: nn.Module, compact: nn.Module, kept: KeptIndices, compared: Callable[..., tuple[float, Divergence | None]]
) -> tuple[float, Divergence | None]:
    """Compares in float64 without copies; where that fails, with copies; where that fails, in the model's precision."""
    mask = with_zeros(to_double, kept)
    small = DoubledWhileRunning(compact, to_double, in_place=True)
    try:
        with DoubledWhileRunning(model, mask) as masked, small:
            found = compared(masked.model, small.model)
        if found[1] is None:
            return found
    except ModelError:
        pass  # a module uses another's weights
    try:
        return compared(doubled(model, mask), doubled(compact, to_double))
    except ModelError:  # the model's code fixes a precision
        return compared(doubled(model, with_zeros(as_it_is, kept)), doubled(compact, as_it_is), dtype=None)


def _locks_for(divergence: Divergence, run: Run) -> list[LockRecord]:
    """Locks all labels at the operator that differs, or at every operator of the module whose Python failed."""
    operators = keyed(run)
    culprit = operators.get(divergence.key) if divergence.operator else None
    if culprit is not None:
        before = run.operators[: run.operators.index(culprit) + 1]
        candidates = [[operator] for operator in reversed(before)]  # the culprit, or the last before it with labels
    else:
        inside = [operator for operator in run.operators if operator.module == divergence.module]
        candidates = [inside, run.operators[-1:]]
    labels = next((found for found in map(_labels_at, candidates) if found), None)
    if not labels:
        raise PlanError(f"the compact model fails where no channel is known: {divergence}")
    reason = f"the trial found a difference: {divergence.detail}{divergence.line and f' at {divergence.line}'}"
    return [LockRecord(reason, divergence.module, divergence.operator, np.concatenate(labels))]


def _labels_at(operators: list[Operator]) -> list[Labels]:
    fields = [f for o in operators for f in (*o.inputs, *(f for fields in o.outputs for f in fields))]
    return [field.labels.reshape(-1) for field in fields]
