"""The comparison of masked and compact model on one input: shapes and values, operator by operator.

Operators are matched by module, name and number of the call there, (module, name, i). Of the masked model's results the
entries of kept channels are recorded, and compared with the compact model's as soon as it has computed them:

    masked.layer1.conv  aten.convolution 0   (8, 64, 7, 7), kept channels 0, 2, 5 of 64
    compact.layer1.conv aten.convolution 0   (8, 3, 7, 7)        |difference| <= tolerance * largest value?

1. The first operator that differs ends the run: what follows may differ because of it.
2. Norms of the masked model see kept channels alone (`NarrowNorms`), and random numbers for removed ones are zeros.
3. Where floats become whole numbers or booleans (a sort, a comparison), rounding alone may change the result. Such a
   `Decision` is taken over from the masked model, if both had the same arguments within the tolerance.
4. Values that cancel to almost nothing are measured against the largest value of the run so far.
5. Both models run in float64, weights converted while their module runs; where that is impossible with whole copies,
   and at last in their own precision, with its tolerance (`RUN_PRECISIONS`).
"""

import sys
from collections import Counter
from collections.abc import Callable, Collection, Container, Hashable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice, zip_longest
from math import isfinite
from typing import Any

import numpy as np
import torch
from torch import nn

from prunekit.channels import float64
from prunekit.channels.cut.narrow_norms import NarrowNorms
from prunekit.channels.cut.slicing import KeptIndices, take
from prunekit.channels.labels.branch import is_inside
from prunekit.channels.rules.rule import Trait
from prunekit.channels.tracing import execution
from prunekit.channels.tracing.channel_map import ChannelMap, Keep
from prunekit.channels.tracing.kept_state import drop_remade_
from prunekit.channels.tracing.operator_mode import OperatorMode, run_operator, without_randomness
from prunekit.channels.tracing.storages import is_plain, plain_in
from prunekit.channels.tracing.traced_run import Examples, TracedOperator, TracedRun, is_counted
from prunekit.errors import ModelError, is_of_torchscript, reason_of, reraise_shortage
from prunekit.hooks.model_copy import has_gradients
from prunekit.utils.context import same_draws
from prunekit.utils.inputs import counted_positions, sequence_shape
from prunekit.utils.private_torch import without_torch_dispatch
from prunekit.utils.tensors import FileMemory, gather, leaves, map_tensors

MEMORY = 2**27
"""Bytes that are kept in memory: float64 results of all operators of a language model are gigabytes."""
TOKENS = 32
"""Positions of a sequence on which models are compared."""
OperatorKey = tuple[str, str, int]
"""A module path, an operator, and the number of its call directly in that module, from 0."""


@dataclass(frozen=True)
class Divergence:
    """The first operator at which masked and compact model differ, or the module in which one fails."""

    module: str  # path of the running module
    operator: str  # its name; empty if Python code failed
    key: OperatorKey  # of the operator
    difference: float  # the relative difference
    detail: str  # what differs
    line: str = ""  # the line of Python that ran, as file:number: text
    after: int = 0  # the number of operators that ran before
    owner: str = ""  # path of the module whose method failed, if another module called it
    # the last operator that began before Python code failed: its module, its name, and which of those it is, views and
    # copies included
    started: OperatorKey = ("", "", -1)
    failed: str = ""  # the operator that failed in code of torch's making, where one module may be a whole network
    masked: bool = False  # whether a norm of the masked model failed, so that nothing was compared

    def __str__(self) -> str:
        where = self.module or "the top-level forward"
        return f"{self.operator or 'the Python code'} in {where}: {self.detail}{self.line and f' at {self.line}'}"


Failure = tuple[Divergence, TracedRun]
"""The operator where two models differ, and the run in which they do."""
Outcome = tuple[float, Failure | None]
"""The largest relative difference, and where it is too large; None if nowhere."""
OnOperator = Callable[[OperatorKey, str, Any, list[torch.Tensor]], None]
"""Called with an operator's key, name, positional and named arguments, and the tensors of its result."""


class _OperatorWatch(OperatorMode):
    """Numbers the operators of each module and calls `see` for each of them."""

    def __init__(self, stack: execution.ModuleStack, see: OnOperator) -> None:
        super().__init__()
        self.stack, self.see = stack, see
        self.counts = Counter[tuple[str, str]]()  # of those that `see` may be called for, by module and name
        self.started = Counter[tuple[str, str]]()  # of all, also those that did not end
        self.total = 0
        self.last = ("", "")
        self.raised: Exception | None = None  # the last one in an operator or `see`, which TorchScript hides
        self.failed = ""

    def operator(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run an operator, and show it with its key."""
        name = str(func._schema.name).replace("::", ".")
        place = self.last = self.stack.current, name
        self.started[place] += 1
        try:
            out = without_randomness(name, run_operator(func, args, kwargs))
            self.total += 1
            if is_counted(func, name):
                outs, key = gather(out), (*place, self.counts[place])
                self.counts[place] += 1
                if all(map(is_plain, gather((args, kwargs, outs)))):
                    with without_torch_dispatch():  # what `see` computes is no part of the run
                        self.see(key, name, (args, kwargs), outs)
        except Exception as error:
            self.raised, self.failed = error, name
            raise
        return out


def operators_by_key(run: TracedRun) -> dict[OperatorKey, TracedOperator]:
    """Return the operators of a traced run by key, without those that lead only to what the model keeps aside."""
    counts = Counter[tuple[str, str]]()
    result = {}
    for operator in run.operators:
        place = operator.module, operator.name
        if operator.counted and not operator.aside:
            result[*place, counts[place]] = operator
        counts[place] += operator.counted
    return result


def number_of(run: TracedRun, started: OperatorKey) -> int | None:
    """Return the position in a traced run of an operator that a `Divergence` names; None if the run lacks it."""
    module, name, ordinal = started
    alike = (i for i, operator in enumerate(run.operators) if (operator.module, operator.name) == (module, name))
    return next(islice(alike, max(ordinal, 0), None), None)


def kept_entries(
    tensor: torch.Tensor, operator: TracedOperator, output: int, channel_map: ChannelMap, keep: Keep
) -> Any:
    """Return the entries of a masked tensor that the compact model has too; None if its traced shape was another."""
    fields = operator.outputs[output] if output < len(operator.outputs) else ()
    for labeled in fields:
        labels = channel_map.resolve(labeled)
        if labels.ndim != tensor.dim():
            return None
        kept = keep[labels]
        if kept.all():
            continue
        for axis in labeled.span:
            index = np.flatnonzero(kept.any(axis=tuple(a for a in range(kept.ndim) if a != axis)))
            if kept.shape[axis] != tensor.shape[axis] and index.size and index[-1] >= tensor.shape[axis]:
                return None
            if index.size < tensor.shape[axis]:
                tensor = take(tensor, axis, torch.from_numpy(index))
    return tensor


def _silence(noise: torch.Tensor, operator: TracedOperator, channel_map: ChannelMap, keep: Keep) -> None:
    """Set the noise of removed channels to 0, in place: the compact model draws none for them."""
    for labeled in operator.outputs[0]:
        kept = keep[channel_map.resolve(labeled)]
        pairs = zip(kept.shape, noise.shape, strict=False)
        if kept.ndim == noise.dim() and all(own in (1, size) for own, size in pairs):
            noise.mul_(torch.from_numpy(kept).to(noise.dtype))


@dataclass(frozen=True, eq=False)
class Decision:
    """One call that made whole numbers or booleans of floating-point values: a sort, a comparison, a suppression.

    Its results may jump if its arguments differ by rounding alone, and everything that follows with them.
    """

    tensors: list[torch.Tensor]
    settings: Any
    outs: list[torch.Tensor]

    def follow(self, arguments: Any, outs: Sequence[torch.Tensor], tolerance: float, peak: float) -> None:
        """Write these results over those of another call that had the same arguments within a tolerance."""
        if all(map(torch.equal, self.outs, outs)) or _without_tensors(arguments) != self.settings:
            return
        pairs = zip(self.tensors, gather(arguments), strict=True)
        if all(float64.relative_difference(want, got, peak)[0] <= tolerance for want, got in pairs):
            for want, got in zip(self.outs, outs, strict=True):
                if not has_gradients(want):
                    got.resize_(want.shape).copy_(want)


def _without_tensors(arguments: Any) -> Any:
    """Return the arguments with a placeholder for every tensor."""
    return map_tensors(arguments, lambda tensor: torch.Tensor)  # type: ignore[arg-type, return-value]


def _numbers(arguments: Any) -> list[Any]:
    """Return the numbers among the arguments of an operator."""
    return [value for value in leaves(arguments) if isinstance(value, (int, float))]


def decision(name: str, arguments: Any, outs: Sequence[torch.Tensor]) -> Decision | None:
    """Return a call as a decision; None if its results cannot jump, or if it wrote over its arguments."""
    tensors = gather(arguments)
    jumps = any(map(has_gradients, tensors)) and not all(map(has_gradients, outs))
    if not jumps or name.endswith("_") or any(tensor.is_meta for tensor in [*tensors, *outs]):
        return None
    return Decision([tensor.clone() for tensor in tensors], _without_tensors(arguments), [out.clone() for out in outs])


class RecordedValues:
    """Results of operators by a key: so many bytes of them in memory, what comes later in a temporary file."""

    def __init__(self, memory: int = MEMORY) -> None:
        self._memory = FileMemory(memory)
        self._found: dict[Hashable, tuple[str, list[Any]]] = {}

    def add(self, key: Hashable, name: str, values: list[Any], shared: Collection[torch.Tensor] = ()) -> None:
        """Record the results of an operator, tensors or None, and its name; those in `shared` may be written to."""
        self._found[key] = name, self.kept(values, shared)

    def kept(self, values: list[Any], written: Collection[torch.Tensor] = ()) -> list[Any]:
        """Return values as they are stored: as tensors, and beyond the limit of memory as parts of a file."""
        found = []
        for value in values:
            shared = any(value is other for other in written)
            if isinstance(value, torch.Tensor) and is_plain(value):
                found.append(self._memory.keep(value, shared=shared))
            else:
                found.append(value.clone() if shared else value)
        self._memory.release()
        return found

    def get(self, key: Hashable) -> tuple[str, list[Any]] | None:
        """Return name and results of an operator; None if there is none of this key."""
        self._memory.release()
        return self._found.get(key)


@dataclass(frozen=True, eq=False)
class Reference:
    """The results of a masked model."""

    precision: float64.Precision  # in which both models run
    # the name of every operator, and the kept entries of its outputs
    values: RecordedValues = field(default_factory=RecordedValues)
    outputs: list[torch.Tensor] = field(default_factory=list)  # the tensors of the model's output
    # those that the compact model has to repeat
    decisions: dict[OperatorKey, Decision] = field(default_factory=dict)
    failed: Divergence | None = None  # where the narrow copy of one of its norms raised
    # of operators that return whole numbers or booleans, the numbers among their arguments
    numbers: dict[OperatorKey, Any] = field(default_factory=dict)


def record_reference(
    masked: nn.Module,
    channel_map: ChannelMap,
    keep: Keep,
    example: tuple[Any, ...],
    run: TracedRun,
    precision: float64.Precision,
    compact: nn.Module | None = None,
) -> Reference:
    """Return the results of the masked model on one input, its norms over channels on kept ones (see `NarrowNorms`).

    Operators inside those norms are not recorded. The model is a copy, without what forward makes where it is missing.
    Norms state the sizes that those of `compact` state, where that is given.
    """
    narrow = channel_map.narrow(keep)
    gone = channel_map.branches.gone(keep)
    small = {path for branch in gone for path in branch.small}  # whose own operators run on less, or are others
    away = [*narrow, *(path for branch in gone for path in branch.modules)]
    every = operators_by_key(run).items()
    operators = {key: one for key, one in every if key[0] not in small and not is_inside(key[0], away)}
    reference = Reference(precision)

    def see(key: OperatorKey, name: str, arguments: Any, outs: list[torch.Tensor]) -> None:
        operator = operators.get(key)
        if operator is None or operator.name != name:
            return
        if name in Trait.NOISE:
            _silence(outs[0], operator, channel_map, keep)
        kept = [kept_entries(t, operator, i, channel_map, keep) for i, t in enumerate(outs)]
        reference.values.add(key, name, kept, outs)
        if not any(map(has_gradients, outs)):
            reference.numbers[key] = _numbers(arguments)
        whole = all(keep[channel_map.resolve(field)].all() for field in operator.inputs)
        if whole and (found := decision(name, arguments, outs)) is not None:
            reference.decisions[key] = found

    if channel_map.state:
        drop_remade_(masked, channel_map.state)
    try:
        with NarrowNorms(masked, channel_map, keep, compact) if narrow else nullcontext():
            outputs = _forward(masked, example, run, see, precision)
        return replace(reference, outputs=reference.values.kept(outputs))
    except _Diverged as parted:
        if parted.divergence.module in narrow:
            return replace(reference, failed=replace(parted.divergence, masked=True))
        raise ModelError(f"the masked model does not run in the trial: {parted.divergence}") from None


def compare(
    reference: Reference,
    compact: nn.Module,
    example: tuple[Any, ...],
    run: TracedRun,
    tolerance: float = float64.TOLERANCE,
    *,
    skipping: Container[str] = (),
) -> tuple[float, Divergence | None]:
    """Run the compact model on the same input and compare every operator's entries with the masked model's.

    Modules in `skipping` may compute their results in another way: their own operators are not compared.
    """
    if reference.failed is not None:
        return reference.failed.difference, reference.failed
    worst = peak = 0.0
    own = reference.precision is float64.OWN  # results of coarse numbers are as coarse

    def see(key: OperatorKey, name: str, arguments: Any, outs: list[torch.Tensor]) -> None:
        nonlocal worst, peak, tolerance
        tolerance = max(tolerance, float64.rounding(outs)) if own else tolerance
        expected = reference.values.get(key)
        if expected is None or expected[0] != name or key[0] in skipping:
            return
        if key in reference.numbers and reference.numbers[key] != _numbers(arguments):
            return  # numbers that differ are widths, as in a check that as many entries are written as there are
        if key in reference.decisions:
            reference.decisions[key].follow(arguments, outs, tolerance, peak)
        for want, got in zip(expected[1], outs, strict=False):
            difference, detail, peak = float64.relative_difference(want, got, peak)
            worst = max(worst, difference)
            if not difference <= tolerance:
                raise _Diverged(Divergence(key[0], name, key, difference, detail))

    try:
        outputs = _forward(compact, example, run, see, reference.precision)
    except _Diverged as parted:
        return parted.divergence.difference, replace(parted.divergence, line=execution.line_of(parted))
    for want, got in zip_longest(reference.outputs, outputs):
        difference, detail = float("inf"), f"{len(outputs)} tensors in the output, expected {len(reference.outputs)}"
        if want is not None and got is not None:
            difference, detail, peak = float64.relative_difference(want, got, peak)
            detail = f"only the model's outputs differ: {detail}"
        worst = max(worst, difference)
        if not difference <= tolerance:
            return difference, Divergence("", "", ("", "", -1), difference, detail, after=sys.maxsize)
    return worst, None


def output_with_decisions(
    reference: Reference, compact: nn.Module, example: tuple[Any, ...], run: TracedRun
) -> list[torch.Tensor]:
    """Return the tensors of the compact model's output, with the decisions of the masked model in it."""

    def see(key: OperatorKey, name: str, arguments: Any, outs: list[torch.Tensor]) -> None:
        if key in reference.decisions:
            reference.decisions[key].follow(arguments, outs, float64.TOLERANCE, 0.0)

    return _forward(compact, example, run, see, reference.precision)


def watch_operators(
    model: nn.Module,
    example: tuple[Any, ...],
    run: TracedRun,
    see: OnOperator,
    precision: float64.Precision = float64.AS_DOUBLE[0],
) -> None:
    """Show a model's operators to `see`, as far as the model runs."""
    with suppress(_Diverged):
        _forward(model, example, run, see, precision)


def shortened(
    model: nn.Module, channel_map: ChannelMap, example: tuple[Any, ...], traced: tuple[Any, ...], number: int = 0
) -> tuple[Any, ...]:
    """Return an example with `TOKENS` of its token numbers, if the model runs on them as on the traced example.

    Of padded sequences they are those around the edge of the padding. Other inputs stay as they are, and so does the
    example if an operator of the trace is missing, or returns other shapes but for the numbers of samples and tokens.
    """
    before, whole = sequence_shape(model, traced), sequence_shape(model, example)
    tensors = gather(example)
    if before is None or whole is None or whole[1] <= TOKENS:
        return example
    if any(tuple(tensor.shape) != whole or tensor.is_floating_point() for tensor in tensors):
        return example
    places, counted = torch.arange(TOKENS).repeat(whole[0], 1), counted_positions(model, example)
    if counted is not None:
        there = counted.masks[0]
        edges = (there[:, 1:] != there[:, :-1]).int().argmax(1).cpu()
        places += (edges - TOKENS // 2).clamp(0, whole[1] - TOKENS)[:, None]
    short: tuple[Any, ...] = map_tensors(example, lambda tensor: tensor.gather(1, places.to(tensor.device)))
    sizes = {whole[0]: before[0], TOKENS: before[1], whole[0] * TOKENS: before[0] * before[1]}
    runs = [run for run in channel_map.traced.trace.runs if run.example == number]
    return short if all(_runs_alike(model, run, short, sizes) for run in runs) else example


def _runs_alike(model: nn.Module, run: TracedRun, example: tuple[Any, ...], sizes: dict[int, int]) -> bool:
    """Return whether a model calls the operators of a traced run, with results as large but for some sizes."""
    left = operators_by_key(run)

    def see(key: OperatorKey, name: str, arguments: Any, outs: list[torch.Tensor]) -> None:
        if key in left and _alike([tuple(out.shape) for out in outs], left[key].call[2], sizes):
            del left[key]

    with float64.Float64WhileRunning(model, float64.as_it_is, borrowed=run.borrowed) as running:
        watch_operators(running.model, run.inputs([example] * (run.example + 1)), run, see, float64.OWN)
    return not left


def _alike(shapes: list[tuple[int, ...]], traced: list[Any], sizes: dict[int, int]) -> bool:
    """Return whether shapes are as they were traced, each axis but for some sizes, times or plus a constant."""

    def equal(own: int, other: int) -> bool:
        return own == other or any(own * was == other * now or own - now == other - was for now, was in sizes.items())

    return [len(shape) for shape in shapes] == [len(shape) for shape in traced] and all(
        all(map(equal, own, other)) for own, other in zip(shapes, traced, strict=True)
    )


def failure_of(model: nn.Module, example: tuple[Any, ...], run: TracedRun) -> Divergence | None:
    """Return where a model raises in its own precision; None if it runs."""
    try:
        _forward(model, example, run, lambda *_: None, float64.OWN)
    except _Diverged as parted:
        return replace(parted.divergence, line=execution.line_of(parted))
    return None


class _Diverged(Exception):
    def __init__(self, divergence: Divergence) -> None:
        super().__init__(str(divergence))
        self.divergence = divergence


def _forward(
    model: nn.Module, example: tuple[Any, ...], run: TracedRun, see: OnOperator, precision: float64.Precision
) -> list[torch.Tensor]:
    """Run a model, show every operator to `see`, and return the tensors of its output."""
    stack = execution.ModuleStack(model, alternatives=run.alternatives)
    watch = _OperatorWatch(stack, see)
    with (
        same_draws(model), execution.mode_for_trace(model, run.training), stack,
        torch.set_grad_enabled(run.gradients), execution.plain_operators(model), precision(),
    ):  # fmt: skip
        try:
            with watch:
                read = [run.calls.read.of(output) for output in run.calls.outputs(model, example)]
        except Exception as error:
            reraise_shortage(error)
            cause = watch.raised if is_of_torchscript(error) and watch.raised is not None else error
            if isinstance(cause, _Diverged):
                cause.divergence = replace(cause.divergence, after=watch.total)
                raise cause from (None if cause is error else error)
            module, owner = stack.current, stack.path_of(execution.innermost_module(error))
            key, started = (module, "", -1), (*watch.last, watch.started[watch.last] - 1)
            where = Divergence(
                module, "", key, float("inf"), reason_of(cause), after=watch.total, owner=owner, started=started
            )
            if is_of_torchscript(error) or execution.has_fixed_code(model, module):
                where = replace(where, detail=f"{where.detail} ({execution.FIXED_CODE})", failed=watch.failed)
            raise _Diverged(where) from error
    return [tensor.detach() for tensor in plain_in(read)]


@dataclass(eq=False)
class Comparison:
    """The comparison of one masked model, which runs once on each example, with one or several compact models."""

    model: nn.Module  # the dense model
    kept: KeptIndices  # indices of what is no zero in the masked model
    # channel_map, keep: the plan
    channel_map: ChannelMap
    keep: Keep
    examples: Examples  # inputs of the model
    references: dict[TracedRun, Reference] = field(default_factory=dict)  # results of the masked model, by run
    skipping: frozenset[str] = frozenset()  # paths of modules that may compute their results in another way

    def elsewhere(self, divergence: Divergence, compact: nn.Module) -> float | None:
        """Return the largest difference outside of the modules that compute in another way; None if others differ too.

        A function may take another path at another width, as torch's attention does where all query heads share one
        key. What modules of the class return is still compared: it is what others read.
        """
        if not divergence.operator or isfinite(divergence.difference) or not divergence.module:
            return None
        cls = type(self.model.get_submodule(divergence.module))
        alike = frozenset(path for path, module in self.model.named_modules() if type(module) is cls)
        difference, found = replace(self, skipping=alike).compare(compact)
        return difference if found is None else None

    def compare(self, compact: nn.Module, *, copies: bool = False) -> Outcome:
        """Compare on every example in eval mode, and in train mode if that differs.

        Without float64 copies of the models it takes less memory, but weights that another module than their owner
        uses may make a difference.
        """
        worst = 0.0
        for run in self.channel_map.traced.trace.runs:
            if run.repeats:
                continue
            difference, divergence = (self.with_copies if copies else self.without_copies)(compact, run)
            worst = max(worst, difference)
            if divergence is not None:
                return worst, (divergence, run)
        return worst, None

    def failure_as_it_is(self, compact: nn.Module) -> Failure | None:
        """Return where the compact model raises in its own precision and the dense one does not.

        Kernels of narrower floats need strides that those of float64 do not, or that a conversion to it repairs.
        """
        run = self.channel_map.traced.trace.runs[0]
        example = float64.float64_inputs(run.inputs(self.examples), None)
        with float64.Float64WhileRunning(compact, float64.as_it_is, borrowed=run.borrowed) as small:
            found = failure_of(small.model, example, run)
        if found is None:
            return None
        with float64.Float64WhileRunning(self.model, float64.as_it_is, borrowed=run.borrowed) as dense:
            return (found, run) if failure_of(dense.model, example, run) is None else None

    def without_copies(self, compact: nn.Module, run: TracedRun) -> tuple[float, Divergence | None]:
        """Compare in float64 without copies, if that is possible."""
        example = float64.float64_inputs(run.inputs(self.examples))
        try:
            if run not in self.references or self.references[run].failed:  # with the sizes that are being tried
                convert = partial(float64.with_zeros, float64.to_double, self.kept)
                whole = self.channel_map.narrow(self.keep)
                with float64.Float64WhileRunning(self.model, convert, whole=whole, borrowed=run.borrowed) as masked:
                    self.references[run] = record_reference(
                        masked.model, self.channel_map, self.keep, example, run, float64.AS_DOUBLE[0], compact
                    )
            with float64.Float64WhileRunning(compact, float64.to_double, borrowed=run.borrowed) as small:
                return compare(self.references[run], small.model, example, run, skipping=self.skipping)
        except ModelError:  # a module uses another's weights
            return self.with_copies(compact, run)

    def with_copies(self, compact: nn.Module, run: TracedRun) -> tuple[float, Divergence | None]:
        """Compare in float64 with copies; if the model runs in no kind of float64, in its own precision."""
        for way in float64.RUN_PRECISIONS:
            example = way.inputs(run.inputs(self.examples))
            masked = float64.float64_copy(self.model, partial(float64.with_zeros, way.convert, self.kept))
            try:
                reference = record_reference(masked, self.channel_map, self.keep, example, run, way.precision, compact)
            except ModelError:  # the model's code asks for another precision
                if way is float64.RUN_PRECISIONS[-1]:
                    raise
                continue
            small = float64.float64_copy(compact, way.convert)
            return compare(reference, small, example, run, way.tolerance, skipping=self.skipping)
        raise AssertionError("there is a last way")
