"""Why a pruned model is not as fast as its multiply-accumulates say."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from prunekit.channels.copying import copied
from prunekit.context import device_of, on_device, paused_garbage_collection, resolve_device, seeded, training_mode
from prunekit.context import threads as with_threads
from prunekit.display import Displayed, Table
from prunekit.errors import UsageError
from prunekit.inputs import call, running
from prunekit.inputs import example as normalized
from prunekit.measure.breakdown import Breakdown, OperatorRow, Side, break_down
from prunekit.measure.causes import Cause
from prunekit.measure.evidence import Estimate, oversubscribed
from prunekit.nested import gather, map_tensors
from prunekit.numbers import digits, factor, interval, plural, share
from prunekit.progress import stage
from prunekit.report.explain import operator_cells
from prunekit.workflow.causes import Search, find_causes
from prunekit.workflow.runs import Log
from prunekit.wrappers import unwrapped

SLOWEST = 15
"""Operators that an explanation shows."""
NOISY = 0.1
"""Width of the speedup's interval, as a share of it, above which the figures are called noisy."""


@dataclass(frozen=True, repr=False)
class Explanation(Displayed):
    """Where the time of a dense and a pruned model goes, and why the second is not faster.

    Attributes:
        device, batch, threads: what was measured on.
        dense_ms, pruned_ms: median of a forward pass of the batch.
        speedup: dense over pruned, paired.
        macs_ratio: dense over pruned multiply-accumulates: the ideal.
        shortfall_ms: of the pruned model's time, beyond the dense one's over that ratio.
        dense_outside_ms, pruned_outside_ms: not in any operator: Python, dispatch, gaps between kernels.
        dense_operators_ms, pruned_operators_ms: sum of the medians of all operators.
        operators: every operator of every module, the pruned model's slowest first.
        causes: what was found, the most milliseconds first; empty if nothing was.
        notes: what to know when reading the figures.

    Example:
        >>> import prunekit as pk, torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))
        >>> x = torch.randn(4, 8)
        >>> found = pk.explain(model, pk.prune(model, x, macs=0.5).model, x, rounds=5)
        >>> found
        <Explanation: ...>
        >>> found.macs_ratio  # how much faster it would be if time went by multiply-accumulates
        2.0
        >>> sorted({row.module for row in found.operators})
        ['0', '1', '2']
    """

    device: str
    batch: int
    threads: int
    dense_ms: float
    pruned_ms: float
    speedup: Estimate
    macs_ratio: float
    shortfall_ms: float
    dense_outside_ms: float
    pruned_outside_ms: float
    dense_operators_ms: float
    pruned_operators_ms: float
    operators: tuple[OperatorRow, ...]
    causes: tuple[Cause, ...]
    notes: tuple[str, ...]

    def figures(self) -> dict[str, Any]:
        """All of it as JSON has it."""
        named = {"rows" if name == "operators" else name: value for name, value in asdict(self).items()}
        return {**named, "speedup": self.speedup._asdict()}

    def rows(self) -> list[dict[str, Any]]:
        """Every operator of every module, the pruned model's slowest first: milliseconds and MACs of both models, how
        many times faster it is and could be, and its share of the pruned model's time.
        """
        return [
            {
                "module": row.module,
                "operator": row.operator,
                **{f"{name}_ms": None if side is None else side.ms for name, side in _sides(row)},
                **{f"{name}_macs": None if side is None else side.macs for name, side in _sides(row)},
                "speedup": row.speedup,
                "ideal": row.ideal,
                "share": row.share,
            }
            for row in self.operators
        ]

    def _headline(self) -> str:
        threads = plural(self.threads, "thread")
        return (
            f"{factor(self.speedup.median)} faster than the dense model, {share(self.reached, 0)} of the ideal "
            f"{factor(self.macs_ratio)} ({self.device}, batch {self.batch}, {threads}); "
            f"{plural(len(self.causes), 'cause')}"
        )

    @property
    def reached(self) -> float:
        """The speedup as a share of the ideal."""
        return self.speedup.median / self.macs_ratio

    def _parts(self) -> Iterator[str | Table]:
        inside, outside = self.pruned_operators_ms, self.pruned_outside_ms
        more = "more" if self.shortfall_ms > 0 else "less"
        yield (
            f"on {self.device}, batch {self.batch}, threads {self.threads}: {digits(self.pruned_ms)} ms, dense "
            f"{digits(self.dense_ms)} ms\n"
            f"{factor(self.speedup.median)} faster {interval(self.speedup.low, self.speedup.high)}; its "
            f"multiply-accumulates say {factor(self.macs_ratio)}: {share(self.reached, 0)} of the ideal, "
            f"{digits(abs(self.shortfall_ms))} ms {more} than that\n"
            f"in operators {digits(inside)} ms (dense {digits(self.dense_operators_ms)}), outside of them (Python, "
            f"dispatch) {digits(outside)} ms (dense {digits(self.dense_outside_ms)}): "
            f"{share(outside / ((inside + outside) or 1), 0)} of the time"
        )
        yield "\n".join(self._causes())
        rows = [operator_cells(asdict(row)) for row in self.operators if row.pruned is not None]
        heads = ("module", "operator", "dense ms", "pruned ms", "MACs", "pruned", "faster", "ideal", "share")
        slowest = f"The {SLOWEST} slowest of {len(rows)} operators"
        title = slowest if len(rows) > SLOWEST else "Operators, the slowest first"
        yield Table((*heads, "MACs/byte"), rows, text=("operator",), title=title, most=SLOWEST)
        if self.notes:
            yield "\n".join(self.notes)

    def _causes(self) -> Iterator[str]:
        if not self.causes:
            yield "No cause was found: nothing that was tried makes it faster."
            return
        yield "Causes, each measured; they overlap, so that their milliseconds do not add up:"
        for cause in self.causes:
            yield f"  {cause.name} (about {digits(cause.ms)} ms)"
            yield f"    {cause.evidence}."
            yield f"    To fix it: {cause.fix}."


def _sides(row: OperatorRow) -> tuple[tuple[str, Side | None], ...]:
    return ("dense", row.dense), ("pruned", row.pruned)


def explain(
    dense: nn.Module,
    pruned: nn.Module,
    example: Any,
    *,
    threads: int | None = None,
    device: torch.device | str | None = None,
    rounds: int = 15,
    log: Log = stage,
) -> Explanation:
    """Times two models alternately and operator by operator, and tries what would make the pruned one faster.

    Every cause was measured on this machine: a layer at rounded widths, the model with another memory format, a larger
    batch, without its masks, with subnormal numbers taken as 0, with fewer threads; or its operators' times beside
    those of copies and of operators that do nothing. In eval mode, eager, without gradients.

    Args:
        dense: not changed.
        pruned: the compact model, or a masked one; not changed.
        example: what the models are called with: a tensor, a tuple of positional arguments or a mapping of arguments by
            name; samples on the first axis of every tensor.
        threads: of the CPU; None: as many as torch uses now.
        device: `auto`, `cpu` or a CUDA device, which is timed by events; None: where the pruned model is.
        rounds: timed forward passes of each model, as it is and by operator; at least 5.
        log: told what is being measured.

    Raises:
        UsageError: `example` holds no tensor, there are fewer than 5 rounds, or there is no such device.
        ModelError: a model does not run on `example`.

    Example:
        >>> import prunekit as pk, torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))
        >>> small = pk.prune(model, torch.randn(1, 4), macs=0.5).model
        >>> print(pk.explain(model, small, torch.randn(1, 4), threads=1, rounds=5))
        on cpu, batch 1, threads 1: ... ms, dense ... ms
        ...
        Operators, the slowest first
          module  operator  dense ms  pruned ms  MACs  pruned  faster  ideal ...
        ...
    """
    dense, pruned = unwrapped(dense), unwrapped(pruned)
    if rounds < 5:
        raise UsageError(f"rounds: expected at least 5, got {rounds}")
    place = resolve_device(str(device or device_of(pruned)))
    inputs = map_tensors(normalized(pruned, example), lambda tensor: tensor.to(place))
    batch = next((tensor.shape[0] for tensor in gather(inputs) if tensor.dim()), 0)
    if not batch:
        raise UsageError("example: expected at least one tensor of samples, got none")
    dense, pruned = _placed(dense, place), _placed(pruned, place)
    with (
        training_mode(dense, False), training_mode(pruned, False), with_threads(threads), seeded(0),
        paused_garbage_collection(), on_device(place), torch.no_grad(),
    ):  # fmt: skip
        for name, model in (("dense", dense), ("pruned", pruned)):
            with running(model, inputs, called=f"the {name} model"):
                call(model, inputs)
        log(f"timing {rounds} rounds of both models, as they are and by operator")
        found = break_down(dense, pruned, inputs, batch=batch, rounds=rounds, device=place)
        causes = find_causes(Search(dense, pruned, inputs, batch, place, found), log)
    return _explanation(found, causes, batch, threads or torch.get_num_threads(), place)


def _placed(model: nn.Module, device: torch.device) -> nn.Module:
    """The model itself where it is on the device already: a copy would be without its hooks."""
    where = device if device.index is not None or device.type != "cuda" else torch.device("cuda", 0)
    here = all(tensor.device == where for tensor in (*model.parameters(), *model.buffers()))
    return model if here else copied(model, device)


def _explanation(
    found: Breakdown, causes: tuple[Cause, ...], batch: int, threads: int, device: torch.device
) -> Explanation:
    return Explanation(
        device=str(device),
        batch=batch,
        threads=threads,
        dense_ms=found.dense_ms,
        pruned_ms=found.pruned_ms,
        speedup=found.speedup,
        macs_ratio=found.macs_ratio,
        shortfall_ms=found.shortfall_ms,
        dense_outside_ms=found.dense_outside_ms,
        pruned_outside_ms=found.pruned_outside_ms,
        dense_operators_ms=found.dense_operators_ms,
        pruned_operators_ms=found.pruned_operators_ms,
        operators=found.rows,
        causes=causes,
        notes=tuple(_notes(found)),
    )


def _notes(found: Breakdown) -> Iterator[str]:
    width, crowded = found.speedup.width, oversubscribed(found.contention)
    if crowded:
        yield crowded
    elif width > NOISY:
        yield (
            f"noisy: the speedup's 95 % interval is {100 * width:.0f} % of it wide; an idle machine or more rounds "
            "would settle it"
        )
    missing = found.pruned_ms - found.pruned_operators_ms - found.pruned_outside_ms
    if missing > NOISY * found.pruned_ms:
        yield (
            f"the pruned model's operators take {found.pruned_operators_ms:.3g} ms, each by its median, of "
            f"{found.pruned_ms:.3g} ms: {missing:.3g} ms are in neither, because rounds differed that much"
        )
    unknown = [row for row in found.rows if row.pruned is not None and row.pruned.macs is None]
    if unknown:
        names = ", ".join(sorted({row.operator for row in unknown}))
        yield f"multiply-accumulates of {names} are not known, and not in the ratio"
