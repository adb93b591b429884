"""The trial: a plan is tried, what differs is locked, and the plan is made again until masked == compact."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import nn

from prunekit.channels.comparing import Divergence, as_double, compare, keyed
from prunekit.channels.doubled import DoubledWhileRunning, doubled, to_double, to_masked_double
from prunekit.channels.flow import LockRecord
from prunekit.channels.labels import Labels
from prunekit.channels.map import ChannelMap, Keep
from prunekit.channels.resolve import with_locks
from prunekit.channels.slicing import kept_indices, narrow
from prunekit.channels.tracing import Run
from prunekit.errors import ModelError, PlanError


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
    double = [as_double(example) for example in examples]
    divergence: Divergence | None = None
    for _ in range(attempts):
        keep = choose(channel_map)
        kept = kept_indices(channel_map, keep)
        compact = narrow(model, kept)
        worst, found = _try(model, compact, channel_map, keep, double)
        if found is None:
            return Settled(channel_map, keep, compact, worst)
        divergence, run = found
        channel_map = with_locks(channel_map, _locks_for(divergence, run))
    raise PlanError(f"no plan passed its trial after {attempts} locks; the last to differ was {divergence}")


def _try(
    model: nn.Module, compact: nn.Module, channel_map: ChannelMap, keep: Keep, examples: list[tuple[Any, ...]]
) -> tuple[float, tuple[Divergence, Run] | None]:
    """One trial in float64: on every example in eval mode, and in train mode if that runs other operators."""
    mask = to_masked_double(kept_indices(channel_map, keep))
    worst = 0.0
    for run in channel_map.traced.trace.runs:
        if run.repeats:
            continue
        example = examples[run.example]
        small = DoubledWhileRunning(compact, to_double, in_place=True)
        try:
            with DoubledWhileRunning(model, mask) as masked, small:
                difference, divergence = compare(masked.model, small.model, channel_map, keep, example, run)
            agreed = divergence is None
        except ModelError:
            agreed = False
        if not agreed:  # perhaps only because a module uses another's weights
            whole = doubled(model, mask), doubled(compact, to_double)
            difference, divergence = compare(*whole, channel_map, keep, example, run)
        worst = max(worst, difference)
        if divergence is not None:
            return worst, (divergence, run)
    return worst, None


def _locks_for(divergence: Divergence, run: Run) -> list[LockRecord]:
    """Locks all labels at the operator that differs, or at every operator of the module whose Python failed."""
    operators = keyed(run)
    guilty = [operators[divergence.key]] if divergence.operator and divergence.key in operators else []
    if not guilty:
        guilty = [operator for operator in run.operators if operator.module == divergence.module]
    labels: list[Labels] = [
        field.labels.reshape(-1)
        for operator in guilty
        for field in (*operator.inputs, *(f for fields in operator.outputs for f in fields))
    ]
    if not labels:
        raise PlanError(f"the compact model fails where no channel is known: {divergence}")
    reason = f"the trial found a difference: {divergence.detail}"
    return [LockRecord(reason, divergence.module, divergence.operator, np.concatenate(labels))]
