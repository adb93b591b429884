"""The trial: masked and compact model run on the same input, and every operator's shape and values are compared."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from prunekit.channels.doubled import DoubledWhileRunning, doubled, to_double, to_masked_double
from prunekit.channels.flow import LockRecord
from prunekit.channels.labels import Labels
from prunekit.channels.map import ChannelMap, Keep
from prunekit.channels.resolve import with_locks
from prunekit.channels.slicing import kept_indices, narrow
from prunekit.channels.tracing import (
    ModuleStack,
    Operator,
    Run,
    map_tensors,
    mode_for_trace,
    plain_attention,
    tensors_in,
)
from prunekit.errors import PlanError

TOLERANCE = 1e-9
"""Largest difference over the largest reference value that float64 rounding explains."""

Key = tuple[str, int]
"""A module path and the how-manieth operator that ran directly in it: stable where the order of modules is not."""


@dataclass(frozen=True)
class Divergence:
    """The first operator at which masked and compact model part."""

    module: str
    operator: str
    key: Key
    difference: float
    detail: str

    def __str__(self) -> str:
        where = self.module or "the top-level forward"
        return f"{self.operator or 'the Python code'} in {where}: {self.detail}"


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts operators by module and hands each, with its key, to `see`."""

    def __init__(self, stack: ModuleStack, see: Callable[[Key, str, Any, bool], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.stack, self.see = stack, see
        self.counts: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        module = self.stack.current
        number = self.counts[module] = self.counts.get(module, -1) + 1
        self.see((module, number), str(func._schema.name).replace("::", "."), out, func.is_view)
        return out


def keyed(run: Run) -> dict[Key, Operator]:
    """The operators of a traced run by key."""
    counts: dict[str, int] = {}
    result = {}
    for operator in run.operators:
        number = counts[operator.module] = counts.get(operator.module, -1) + 1
        result[operator.module, number] = operator
    return result


def kept_entries(tensor: torch.Tensor, operator: Operator, output: int, channel_map: ChannelMap, keep: Keep) -> Any:
    """The entries of a masked tensor that the compact model has too; None if the trace saw another shape here."""
    fields = operator.outputs[output] if output < len(operator.outputs) else ()
    for field in fields:
        labels = channel_map.resolve(field)
        if labels.ndim != tensor.dim():
            return None
        kept = keep[labels]
        if kept.all():
            continue
        for axis in field.span:
            index = np.flatnonzero(kept.any(axis=tuple(a for a in range(kept.ndim) if a != axis)))
            if kept.shape[axis] != tensor.shape[axis] and index.size and index[-1] >= tensor.shape[axis]:
                return None
            if index.size < tensor.shape[axis]:
                tensor = tensor.index_select(axis, torch.from_numpy(index))
    return tensor


def compare(
    masked: nn.Module, compact: nn.Module, channel_map: ChannelMap, keep: Keep, example: tuple[Any, ...], run: Run
) -> tuple[float, Divergence | None]:
    """Runs both models on one input and compares every operator's kept entries.

    Returns:
        The largest relative difference seen, and the first operator beyond `TOLERANCE`, or None.
    """
    operators = keyed(run)
    reference: dict[Key, tuple[str, list[Any]]] = {}

    def record(key: Key, name: str, out: Any, is_view: bool) -> None:
        operator = operators.get(key)
        if is_view or operator is None or operator.name != name:
            return
        values = [kept_entries(t, operator, i, channel_map, keep) for i, t in enumerate(tensors_in(out))]
        fresh = [v.clone() if any(v is t for t in tensors_in(out)) else v for v in values]
        reference[key] = (name, fresh)

    worst = 0.0

    def check(key: Key, name: str, out: Any, is_view: bool) -> None:
        nonlocal worst
        expected = reference.pop(key, None)
        if expected is None or expected[0] != name:
            return
        for want, got in zip(expected[1], tensors_in(out), strict=False):
            difference, detail = _difference(want, got)
            worst = max(worst, difference)
            if not difference <= TOLERANCE:
                raise _Parted(Divergence(key[0], name, key, difference, detail))

    _forward(masked, example, run.training, record)
    try:
        _forward(compact, example, run.training, check)
    except _Parted as parted:
        return parted.divergence.difference, parted.divergence
    return worst, None


class _Parted(Exception):
    def __init__(self, divergence: Divergence) -> None:
        super().__init__(str(divergence))
        self.divergence = divergence


def _difference(want: torch.Tensor | None, got: torch.Tensor) -> tuple[float, str]:
    if want is None:
        return 0.0, ""
    if want.shape != got.shape:
        return float("inf"), f"shape {tuple(got.shape)}, expected {tuple(want.shape)}"
    if not want.numel() or want.is_meta:
        return 0.0, ""
    if not want.is_floating_point():
        same = torch.equal(want, got)
        return (0.0, "") if same else (float("inf"), "integer or boolean values differ")
    scale = max(float(want.abs().max()), torch.finfo(want.dtype).tiny)
    difference = float((want - got).abs_().max()) / scale
    if difference != difference:
        return (0.0, "") if torch.equal(want.isnan(), got.isnan()) else (float("inf"), "NaN in one model only")
    return difference, f"values differ by {difference:.3g} of the largest"


def _forward(
    model: nn.Module, example: tuple[Any, ...], training: bool, see: Callable[[Key, str, Any, bool], None]
) -> None:
    stack = ModuleStack(model)
    watch = _Watch(stack, see)
    with mode_for_trace(model, training), stack, torch.no_grad(), plain_attention():
        try:
            with watch:
                model(*example)
        except _Parted:
            raise
        except Exception as error:
            module = stack.current
            frame = traceback.extract_tb(error.__traceback__)[-1]
            detail = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''} ({frame.name})"
            raise _Parted(
                Divergence(module, "", (module, watch.counts.get(module, -1)), float("inf"), detail)
            ) from None


def as_double(example: tuple[Any, ...]) -> tuple[Any, ...]:
    """The example in float64; a constant one is exchanged for noise, which hides nothing."""

    def convert(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_floating_point():
            return tensor.cpu()
        if tensor.is_meta or not tensor.numel() or bool((tensor == tensor.reshape(-1)[0]).all()):
            return torch.randn(tensor.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        return tensor.detach().to("cpu", torch.float64)

    return tuple(map_tensors(value, convert) for value in example)


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
    runs = channel_map.traced.trace.runs
    for index, run in enumerate(runs):
        if run.training and run.same_calls(runs[index - 1]):
            continue
        example = examples[index // 2]
        with DoubledWhileRunning(model, mask) as masked, DoubledWhileRunning(compact, to_double) as small:
            difference, divergence = compare(masked.model, small.model, channel_map, keep, example, run)
        if divergence is not None:  # perhaps only because a module uses another's weights
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
