"""Two models on the same input, compared operator by operator: shapes and values."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Container
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from prunekit.channels.map import ChannelMap, Keep
from prunekit.channels.narrowed import NarrowNorms
from prunekit.channels.running import ModuleStack, mode_for_trace, plain_attention
from prunekit.channels.tracing import Operator, Run, is_counted
from prunekit.errors import ModelError
from prunekit.nested import gather, map_tensors, tensors_in

TOLERANCE = 1e-9
"""Largest difference over the largest reference value that float64 rounding explains."""

FILLER = 1e6
"""Larger values are taken for fillers, such as those that mask attention, and say nothing of the run's scale."""

CANCELLED = 1e-4
"""Below this share of the largest value in the run, what is left of a sum may be rounding alone."""

Key = tuple[str, str, int]
"""A module path, an operator, and the how-manieth call of it directly in that module: stable where order is not."""


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

    def __init__(self, stack: ModuleStack, see: Callable[[Key, str, Any], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.stack, self.see = stack, see
        self.counts: dict[tuple[str, str], int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func._schema.name).replace("::", ".")
        out = without_chance(name, func(*args, **(kwargs or {})))
        if is_counted(func, name):
            module = self.stack.current
            number = self.counts[module, name] = self.counts.get((module, name), -1) + 1
            self.see((module, name, number), name, out)
        return out


RANDOM = {f"aten.{name}{suffix}" for suffix in ("", "_") for name in
          ("bernoulli", "uniform", "normal", "rand", "randn", "rand_like", "randn_like", "exponential")}  # fmt: skip


def without_chance(name: str, out: Any) -> Any:
    """Random numbers and unwritten memory made equal: two models of different widths cannot have the same."""
    if isinstance(out, torch.Tensor):
        if name in RANDOM:
            out.fill_(1.0)
        elif "empty" in name:
            out.zero_()
    return out


def keyed(run: Run) -> dict[Key, Operator]:
    """The operators of a traced run by key."""
    counts: dict[tuple[str, str], int] = {}
    result = {}
    for operator in run.operators:
        if not operator.counted:
            continue
        number = counts[operator.module, operator.name] = counts.get((operator.module, operator.name), -1) + 1
        result[operator.module, operator.name, number] = operator
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
    masked: nn.Module,
    compact: nn.Module,
    channel_map: ChannelMap,
    keep: Keep,
    example: tuple[Any, ...],
    run: Run,
    tolerance: float = TOLERANCE,
) -> tuple[float, Divergence | None]:
    """Runs both models on one input and compares every operator's kept entries.

    The masked model's norms over channels run on kept ones (see `NarrowNorms`), and not the operators in them are
    compared but those that read their output.

    Returns:
        The largest relative difference seen, and the first operator beyond `tolerance`, or None.

    Raises:
        ModelError: already the masked model does not run.
    """
    operators = {key: operator for key, operator in keyed(run).items() if not _inside(key[0], channel_map.norms)}
    reference: dict[Key, tuple[str, list[Any]]] = {}

    def record(key: Key, name: str, out: Any) -> None:
        operator = operators.get(key)
        if operator is None or operator.name != name:
            return
        values = [kept_entries(t, operator, i, channel_map, keep) for i, t in enumerate(tensors_in(out))]
        fresh = [v.clone() if any(v is t for t in tensors_in(out)) else v for v in values]
        reference[key] = (name, fresh)

    worst = peak = 0.0

    def check(key: Key, name: str, out: Any) -> None:
        nonlocal worst, peak
        expected = reference.pop(key, None)
        if expected is None or expected[0] != name:
            return
        for want, got in zip(expected[1], tensors_in(out), strict=False):
            difference, detail, peak = _difference(want, got, peak)
            worst = max(worst, difference)
            if not difference <= tolerance:
                raise _Parted(Divergence(key[0], name, key, difference, detail))

    try:
        with NarrowNorms(masked, channel_map, keep):
            wanted = _forward(masked, example, run.training, record)
    except _Parted as parted:
        if parted.divergence.module in channel_map.norms:  # its narrow copy
            return parted.divergence.difference, parted.divergence
        raise ModelError(f"the masked model does not run in the trial: {parted.divergence}") from None
    try:
        outputs = _forward(compact, example, run.training, check)
    except _Parted as parted:
        return parted.divergence.difference, parted.divergence
    if len(wanted) != len(outputs):
        detail = f"{len(outputs)} tensors in the output, expected {len(wanted)}"
        return float("inf"), Divergence("", "", ("", "", -1), float("inf"), detail)
    for want, got in zip(wanted, outputs, strict=True):
        difference, detail, peak = _difference(want, got, peak)
        worst = max(worst, difference)
        if not difference <= tolerance:
            return difference, Divergence("", "", ("", "", -1), difference, f"only the model's outputs part: {detail}")
    return worst, None


def _inside(path: str, norms: Container[str]) -> bool:
    """Whether a module is a norm or a part of one: under masks a narrow copy runs in its place."""
    return any(prefix in norms for prefix in accumulate(path.split("."), "{}.{}".format))


class _Parted(Exception):
    def __init__(self, divergence: Divergence) -> None:
        super().__init__(str(divergence))
        self.divergence = divergence


def _largest(tensor: torch.Tensor) -> float:
    """Largest absolute value; one vectorised pass, ten times faster than the infinity norm."""
    low, high = torch.aminmax(tensor)
    return max(-float(low), float(high)) if low == low else float("nan")


def _difference(want: torch.Tensor | None, got: torch.Tensor, peak: float) -> tuple[float, str, float]:
    """Relative difference, what to say of it, and the largest value met so far in the run.

    Values that cancel to less than `CANCELLED` of that largest are rounding, and are measured against it.
    """
    if want is None:
        return 0.0, "", peak
    if want.shape != got.shape:
        return float("inf"), f"shape {tuple(got.shape)}, expected {tuple(want.shape)}", peak
    if not want.numel() or want.is_meta:
        return 0.0, "", peak
    if not want.is_floating_point():
        same = torch.equal(want, got)
        return (0.0, "", peak) if same else (float("inf"), "integer or boolean values differ", peak)
    largest = _largest(want)
    peak = max(peak, largest) if largest < FILLER else peak
    scale = max(largest, CANCELLED * peak, torch.finfo(want.dtype).tiny)
    difference = _largest(want - got) / scale
    if difference != difference or largest == float("inf"):
        finite = want.isfinite()
        if finite.all() or not torch.equal(want[~finite].nan_to_num(), got[~finite].nan_to_num()):
            return float("inf"), "NaN or Inf where the other model has none", peak
        return _difference(want[finite], got[finite], peak)
    return difference, f"values differ by {difference:.3g} of the largest", peak


def _forward(
    model: nn.Module, example: tuple[Any, ...], training: bool, see: Callable[[Key, str, Any], None]
) -> list[torch.Tensor]:
    """Runs a model with every operator seen, and returns the tensors of its output."""
    stack = ModuleStack(model)
    watch = _Watch(stack, see)
    with mode_for_trace(model, training), stack, torch.no_grad(), plain_attention():
        try:
            with watch:
                output = model(*example)
        except _Parted:
            raise
        except Exception as error:
            module = stack.current
            frame = traceback.extract_tb(error.__traceback__)[-1]
            detail = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''} ({frame.name})"
            raise _Parted(Divergence(module, "", (module, "", -1), float("inf"), detail)) from None
    return gather(output)


def as_double(
    example: tuple[Any, ...], dtype: torch.dtype | None = torch.float64, *, noise: bool = True
) -> tuple[Any, ...]:
    """The example in float64, or in its own precision with None; constant tensors, which hide much, become noise."""

    def convert(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_floating_point():
            return tensor.cpu()
        constant = tensor.numel() > 1 and not tensor.is_meta and bool((tensor == tensor.reshape(-1)[0]).all())
        if tensor.is_meta or (constant and noise):
            return torch.randn(tensor.shape, dtype=dtype or tensor.dtype, generator=torch.Generator().manual_seed(0))
        return tensor.detach().to("cpu", dtype)

    return tuple(map_tensors(value, convert) for value in example)
