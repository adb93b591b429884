"""Explanations why a pruned model is not as fast as its multiply-accumulates say.

`explain` times both models by operator, and `find_causes` makes an experiment for each possible cause.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from prunekit.backends.session import Inputs, inputs_of
from prunekit.compaction.zero_patterns import zero_patterns
from prunekit.deploy.batchnorm_folding import fold_batchnorm
from prunekit.errors import PrunekitError, UsageError
from prunekit.hooks.model_copy import copied
from prunekit.hooks.wrappers import unwrapped
from prunekit.measure.causes import experiments, overhead_causes, width_causes
from prunekit.measure.causes.breakdown import Breakdown, IsolatedLayer, OperatorFigures, OperatorRow, break_down
from prunekit.measure.causes.width_causes import Cause
from prunekit.measure.latency.row_text import Row
from prunekit.measure.latency.timing import Estimate, time_paired
from prunekit.measure.model_size import subnormals
from prunekit.modes.public_call import public_call
from prunekit.report.sections.explanation import of_report, operator_cells, unsettled, verdict
from prunekit.settings.deployment import LatencySettings
from prunekit.utils.context import (
    device_of,
    on_device,
    paused_garbage_collection,
    resolve_device,
    seeded,
    training_mode,
)
from prunekit.utils.context import threads as with_threads
from prunekit.utils.display import Displayed, Table, digits, plural, share
from prunekit.utils.inputs import as_example, call, running
from prunekit.utils.progress import Log, stage
from prunekit.utils.tensors import gather, map_tensors

SLOWEST = 15
"""Operators that an explanation shows."""
MISSING = 0.1
"""Share of the pruned model's time in neither operators nor outside of them, above which a note says so."""
LAYERS = 12
"""How many layers are run alone: the slowest."""
LARGER, LONG_MS = (8, 4, 2), 1500.0
"""A larger batch that is tried has the most times the samples for which the dense model should take at most so long."""
ROUNDS = 11
"""Timed forward passes of each model in a job, at most."""
SPLIT = [f"{model}_{part}ms" for model in ("dense", "pruned") for part in ("", "outside_", "operators_")]
MEASURED = (*SPLIT, "speedup", "macs_ratio", "shortfall_ms", "doubts")
"""What an explanation takes from the breakdown as it is."""


@public_call
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
    """Time two models alternately and operator by operator, and try what would make the pruned one faster.

    Every cause was measured on this machine: a layer at rounded widths, the model with another memory format, a larger
    batch, without its masks, with subnormal numbers taken as 0, with random numbers in place of its zeros, with fewer
    threads; or its operators' times beside those of copies and of operators that do nothing. In eval mode, eager,
    without gradients.

    Args:
        dense: not changed.
        pruned: the compact model, or a masked one; not changed.
        example: what the models are called with: a tensor, a tuple of positional arguments or a mapping of arguments by
            name; samples on the first axis of every tensor.
        threads: of the CPU; None: as many as torch uses now.
        device: `auto`, `cpu` or a CUDA device, which is timed by events; None: where the pruned model is.
        rounds: timed forward passes of each model, as it is and by operator; at least 5.
        log: gets a line on what is measured.

    Raises:
        UsageError: `example` holds no tensor, there are fewer than 5 rounds, or there is no such device.
        ModelError: a model does not run on `example`.

    Example:
        >>> import prunekit as pk, torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))
        >>> small = pk.prune(model, torch.randn(1, 4), macs=0.5).model
        >>> print(pk.explain(model, small, torch.randn(1, 4), threads=1, rounds=5))
        on cpu, batch 1, 1 thread: ...
    """
    dense, pruned = unwrapped(dense), unwrapped(pruned)
    if rounds < 5:
        raise UsageError(f"rounds: expected at least 5, got {rounds}")
    place = resolve_device(str(device or device_of(pruned)))
    inputs = map_tensors(as_example(pruned, example), lambda tensor: tensor.to(place))
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
        causes = find_causes(CauseSearch(dense, pruned, inputs, batch, place, found), log)
    return Explanation(
        device=str(place),
        batch=batch,
        threads=threads or torch.get_num_threads(),
        operators=found.rows,
        causes=causes,
        notes=tuple(_notes(found)),
        **{name: getattr(found, name) for name in MEASURED},
    )


def _placed(model: nn.Module, device: torch.device) -> nn.Module:
    """Return the model on a device: itself if it is there, as a copy would lose its hooks."""
    where = device if device.index is not None or device.type != "cuda" else torch.device("cuda", 0)
    here = all(tensor.device == where for tensor in (*model.parameters(), *model.buffers()))
    return model if here else copied(model, device)


def _notes(found: Breakdown) -> Iterator[str]:
    missing = found.pruned_ms - found.pruned_operators_ms - found.pruned_outside_ms
    if missing > MISSING * found.pruned_ms:
        yield (
            f"the pruned model's operators take {found.pruned_operators_ms:.3g} ms, each by its median, of "
            f"{found.pruned_ms:.3g} ms: {missing:.3g} ms are in neither, because rounds differed that much"
        )
    unknown = [row for row in found.rows if row.pruned is not None and row.pruned.macs is None]
    if unknown:
        names = ", ".join(sorted({row.operator for row in unknown}))
        yield f"multiply-accumulates of {names} are not known, and not in the ratio"


def explain_job(
    dense: nn.Module,
    pruned: nn.Module,
    inputs: Sequence[int] | Inputs,
    settings: LatencySettings,
    speedup: Sequence[Row],
    log: Log,
) -> dict[str, Any] | None:
    """Return the explanation for the first batch and thread count in eager on the CPU, for `metrics.json`.

    The log says it of the job's own speedup, whose rows are given.

    It is None if it was not asked for, if eager is not timed, or if it failed, which is logged: the models run in ways
    that their code may not support, which must not end the job.
    """
    if not settings.explain or "eager" not in settings.runtimes:
        return None
    example, rounds = inputs_of(inputs).sample(settings.batches[0]), min(ROUNDS, settings.repeats)
    try:
        found = explain(dense, pruned, example, threads=settings.threads[0], device="cpu", rounds=rounds)
    except Exception as error:  # whatever a model's own code raises
        log(f"explain: not done: {type(error).__name__}: {error}")
        return None
    figures = found.figures()
    said = of_report(figures, speedup)
    log(f"explain: {unsettled(said) or verdict(said)}")
    for cause in () if said["doubts"] else found.causes:
        log(f"explain: {cause.name} (about {cause.ms:.3g} ms); to fix it: {cause.fix}")
    return figures


@dataclass(frozen=True, repr=False)
class Explanation(Displayed):
    """Explanation of where a dense and a pruned model spend time, and why the second is not faster.

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
        doubts: why nothing can be concluded from the times, with what would settle it; empty if they are stable.

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
    doubts: tuple[str, ...] = ()

    def figures(self) -> dict[str, Any]:
        """Return the explanation as plain data."""
        named = {"rows" if name == "operators" else name: value for name, value in asdict(self).items()}
        return {**named, "speedup": self.speedup._asdict()}

    def rows(self) -> list[dict[str, Any]]:
        """Return a row for every operator of every module, the pruned model's slowest first.

        It holds milliseconds and MACs of both models, the speedup and the ideal one, and the share of the pruned
        model's time.
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
        figures = self.figures()
        found = f"{verdict(figures)}; {plural(len(self.causes), 'cause')}"
        return f"{self._where}: {unsettled(figures) or found}"

    @property
    def _where(self) -> str:
        return f"on {self.device}, batch {self.batch}, {plural(self.threads, 'thread')}"

    def _parts(self) -> Iterator[str | Table]:
        if self.doubts:
            yield self._headline()
            return
        inside, outside = self.pruned_operators_ms, self.pruned_outside_ms
        missing = f"; {digits(self.shortfall_ms)} ms are missing from it" if self.shortfall_ms > 0 else ""
        yield (
            f"{self._where}: {digits(self.pruned_ms)} ms, dense {digits(self.dense_ms)} ms\n"
            f"{verdict(self.figures())}{missing}\n"
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


def _sides(row: OperatorRow) -> tuple[tuple[str, OperatorFigures | None], ...]:
    return ("dense", row.dense), ("pruned", row.pruned)


@dataclass(frozen=True)
class CauseSearch:
    """Two models, and their times by operator, in which causes are searched for."""

    dense: nn.Module  # on the device, in eval mode, as is the pruned one
    pruned: nn.Module
    inputs: tuple[Any, ...]  # an example, see `prunekit.utils.inputs.as_example`, on the device
    batch: int  # samples in them
    device: torch.device  # where they run
    found: Breakdown  # the time of both by operator

    @property
    def on_cpu(self) -> bool:
        """True if the CPU computes."""
        return self.device.type == "cpu"

    def slowest(self) -> Iterator[tuple[str, float, IsolatedLayer, IsolatedLayer | None]]:
        """Yield path, milliseconds and layer of the pruned model's slowest ones, and the dense layer at that path."""
        keys = [(row.module, row.operator) for row in self.found.rows]
        there = [key for key in keys if key in self.found.pruned_calls]
        layers = [(key, self.found.pruned_calls[key].layer) for key in there]
        ms = {(row.module, row.operator): row.pruned.ms for row in self.found.rows if row.pruned is not None}
        for key, layer in [(key, layer) for key, layer in layers if layer is not None][:LAYERS]:
            dense = self.found.dense_calls.get(key)
            yield key[0], ms[key], layer, None if dense is None else dense.layer


def find_causes(search: CauseSearch, log: Callable[[str], None]) -> tuple[Cause, ...]:
    """Return the causes that experiments on this machine show, the most milliseconds first.

    Threads are tried first: if they have to wait for cores, nothing else can be measured.
    """
    log("measuring: fewer threads")
    threads = _fewer_threads(search)
    if threads is not None and search.found.contention is not None and search.found.contention.oversubscribed:
        return (threads,)
    found = [] if threads is None else [threads]
    for name, look in _LOOKS:
        log(f"measuring: {name}")
        found += [cause for cause in look(search) if cause is not None]
    return tuple(sorted(found, key=lambda cause: -cause.ms))


def _fewer_threads(search: CauseSearch) -> Cause | None:
    now, contention = torch.get_num_threads(), search.found.contention
    if contention is None or now == 1:
        return None
    fewer = experiments.with_thread_counts(sorted({1, now // 2}), search.pruned, search.inputs, now)
    return overhead_causes.too_many_threads(contention, fewer)


def _overheads(search: CauseSearch) -> Iterator[Cause | None]:
    found = search.found
    copies = experiments.copy_times(search.device)
    yield overhead_causes.launch_bound(found, cuda=not search.on_cpu)
    yield overhead_causes.memory_bound(found.rows, copies, found.floor_ms, found.pruned_ms, search.batch)
    yield overhead_causes.layout_conversions(found.rows, found.pruned_ms)
    yield overhead_causes.without_macs(found.rows, found.macs_ratio, found.pruned_ms)


def _norms(search: CauseSearch) -> Iterator[Cause | None]:
    found = search.found
    shown = overhead_causes.unfused_norms(found.rows, found.pruned_ms, None)
    if shown is None or not search.on_cpu:
        yield shown
        return
    try:
        folded = fold_batchnorm(search.pruned, search.inputs).model
    except PrunekitError:  # not folded, the norms' own time has to do
        yield shown
        return
    gain = time_paired(lambda: call(search.pruned, search.inputs), lambda: call(folded, search.inputs), search.device)
    yield overhead_causes.unfused_norms(found.rows, found.pruned_ms, gain)


def _widths(search: CauseSearch) -> Iterator[Cause | None]:
    rounded, dense_widths = list[width_causes.WidthTimes](), list[width_causes.KernelTimes]()
    for path, ms, layer, dense in search.slowest():
        if dense is not None:
            rounded += experiments.width_times(path, ms, layer, dense.widths, search.device)
            kernels = experiments.kernel_times(path, ms, layer, dense.widths, search.device)
            dense_widths += [] if kernels is None else [kernels]
    yield width_causes.off_step_widths(rounded, search.found.pruned_ms)
    yield width_causes.slower_kernels(dense_widths, search.found.pruned_ms)


def _masks(search: CauseSearch) -> Iterator[Cause | None]:
    hooks = experiments.mask_hooks(search.pruned)
    bare = experiments.without_masks(search.pruned, search.inputs, search.device) if hooks else None
    layers = {key[0]: call.layer for key, call in search.found.pruned_calls.items() if call.layer is not None}
    zeros = experiments.zero_channels(search.pruned, layers)
    saved = 0.0
    for path, ms, layer, _ in search.slowest():
        if path in zeros:
            left = max(1, layer.widths[1] - zeros[path][0])
            narrower = (left, left) if layer.tied else (layer.widths[0], left)
            saved += ms * experiments.share_without(layer, narrower, search.device)
    yield overhead_causes.masks_attached(hooks, zeros, bare, saved, search.found.pruned_ms)


def _small_numbers(search: CauseSearch) -> Iterator[Cause | None]:
    if not search.on_cpu:
        return
    weights = {
        path: count
        for path, module in search.pruned.named_modules()
        if (count := subnormals([*module.parameters(recurse=False), *module.buffers(recurse=False)]))
    }
    activations: dict[str, int] = {}
    for (path, _), seen in search.found.pruned_calls.items():
        if seen.subnormal:
            activations[path] = activations.get(path, 0) + seen.subnormal
    if weights or activations:
        flushed = experiments.with_flushing(search.pruned, search.inputs)
        yield overhead_causes.subnormal_numbers(weights, activations, flushed)


def _single_zeros(search: CauseSearch) -> Iterator[Cause | None]:
    zeros = zero_patterns(search.pruned)
    if not zeros.many or experiments.mask_hooks(search.pruned):  # masks would set the numbers to zero again
        return
    times: dict[str, float] = {}
    for row in search.found.rows:
        if row.pruned is not None and row.pruned.macs:
            times[row.module] = times.get(row.module, 0.0) + row.pruned.ms
    filled = experiments.with_filled_zeros(search.pruned, search.inputs, search.device)
    yield overhead_causes.unused_zeros(zeros, times, filled)


def _memory_format(search: CauseSearch) -> Iterator[Cause | None]:
    yield overhead_causes.memory_format(experiments.with_channels_last(search.pruned, search.inputs, search.device))


def _larger_batch(search: CauseSearch) -> Iterator[Cause | None]:
    found = search.found
    times = next((times for times in LARGER if times * found.dense_ms <= LONG_MS), LARGER[-1])
    try:
        larger = experiments.with_larger_batch(search.dense, search.pruned, search.inputs, times, search.device)
    except Exception:  # a model's own code may take one batch only, and memory may not last
        return
    yield overhead_causes.small_batch(found.speedup, found.pruned_ms, larger, search.batch, times * search.batch)


_LOOKS: tuple[tuple[str, Callable[[CauseSearch], Iterator[Cause | None]]], ...] = (
    ("operators beside copies and beside operators that do nothing", _overheads),
    ("BatchNorm folded", _norms),
    ("the slowest layers at rounded widths, and at the dense model's", _widths),
    ("masks and channels of zeros", _masks),
    ("subnormal numbers", _small_numbers),
    ("zeros of single weights, beside random numbers in their place", _single_zeros),
    ("channels last", _memory_format),
    ("a larger batch", _larger_batch),
)
