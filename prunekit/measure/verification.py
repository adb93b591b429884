"""Verification: the proof that the compact model computes what the masked one does, and a file what its model does."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from prunekit.channels.cut.narrow_norms import NarrowNorms
from prunekit.channels.cut.slicing import cut, is_variance
from prunekit.channels.float64 import (
    ROUNDING,
    RUN_PRECISIONS,
    TOLERANCE,
    Float64WhileRunning,
    RunPrecision,
    float64_copy,
    relative_difference,
    rounding,
)
from prunekit.channels.tracing.cached_state import ONE_CALL, ModelCalls, model_calls
from prunekit.channels.tracing.execution import first_outputs, plain_attention
from prunekit.channels.tracing.kept_state import (
    NO_STATE,
    KeptState,
    cut_state_,
    drop_remade_,
    give_state_,
    kept_tensors,
)
from prunekit.channels.tracing.operator_mode import OperatorMode, run_operator
from prunekit.channels.tracing.storages import plain_in
from prunekit.channels.trial.comparison import compare, output_with_decisions, record_reference
from prunekit.errors import ModelError, RunError, UsageError, VerificationError, raised_as, reason_of, reraise_shortage
from prunekit.hooks.model_copy import copied, has_gradients, named_tensors
from prunekit.hooks.wrappers import require_values, unwrapped
from prunekit.models.interface import ModelInterface
from prunekit.modes.public_call import public_call
from prunekit.planning.plan import Plan, require_plan
from prunekit.utils.context import is_large, same_draws, training_mode, without_gradients
from prunekit.utils.display import Displayed, listed, plural, scientific
from prunekit.utils.inputs import as_examples, call, described, example_advice, sample_count
from prunekit.utils.outputs import Outputs, ReadOutputs
from prunekit.utils.progress import reporting
from prunekit.utils.tensors import gather

if TYPE_CHECKING:
    from prunekit.backends.backend import FileBackend
    from prunekit.backends.files.export_source import Run


@dataclass(frozen=True, repr=False)
class Verification(Displayed):
    """The difference of the outputs of masked and compact model.

    Attributes:
        max_relative_difference: largest absolute difference of any output over the largest absolute reference value.
        inputs: number of samples compared.
        dtype: the coarsest in which both were computed: float64, except for models whose code only runs in its own
            precision, such as quantized layers; then its rounding counts as equal.

    Example:
        >>> import prunekit as pk, torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))
        >>> x = torch.randn(4, 8)
        >>> result = pk.prune(model, x, macs=0.5)
        >>> found = pk.verify(model, result.model, result.plan, x)
        >>> found
        <Verification: masked and compact model agree: outputs differ by at most ... on 4 samples in float64>
        >>> found.max_relative_difference < 1e-12
        True
    """

    max_relative_difference: float
    inputs: int
    dtype: str = "float64"

    def rows(self) -> list[dict[str, Any]]:
        """Return one row: the difference, the samples, and the precision."""
        return [asdict(self)]

    def _headline(self) -> str:
        found, samples = scientific(self.max_relative_difference), plural(self.inputs, "sample")
        return (
            f"masked and compact model agree: outputs differ by at most {found} of their largest value, on {samples} "
            f"in {self.dtype}"
        )

    def _parts(self) -> Iterator[str]:
        yield f"Verified: {self._headline()}"


@public_call
@reporting(None, "verify")
def verify(
    masked: nn.Module,
    compact: nn.Module,
    plan: Plan,
    examples: Any,
    *,
    tolerance: float = TOLERANCE,
    strict: bool = False,
    outputs: Outputs | None = None,
) -> Verification:
    """Compare masked and compact model in float64 on the CPU: their outputs in eval mode, and their tensors.

    The masked model is the dense-sized one with zeros where the plan prunes; they are set in the copy that runs.

    A model whose code does not run in float64 is compared in its own precision, as in the trial of its plan.

    A wrong index need not change an output, as the channel may be dead on these inputs. So every tensor of the compact
    model is also compared with the kept entries of the masked one, after both ran once. What a forward pass leaves for
    the next, as in a cache, is that of the masked model in both when they begin. Scores that are equal up to rounding
    may be in another order: outputs that differ are compared again with the order of the masked model in both.

    Both are compared as they would be loaded from a file: without wrappers of Accelerate or torch around a method of an
    instance, such as autocast.

    Args:
        masked: the model of dense size, whose norms see kept channels only, as under the masks; not changed.
        compact: the compact model that was made of it.
        plan: for finding the operator when they differ.
        examples: what the models are called with: a tensor, a tuple of positional arguments or a mapping of arguments
            by name; or a list or other iterable of such examples.
        tolerance: largest relative difference that counts as equal; at least the rounding of the precision in which the
            model runs.
        strict: whether the model must be zero where the plan prunes, as it is after training under masks.
        outputs: which outputs are compared, as for `trace`; None: those that the plan was made for. A plan from a file
            knows their names, and no function.

    Raises:
        PlanError: the plan is that of another model.
        VerificationError: they differ, or hold NaN; the message names the first operator and its module path.
        ModelError: the masked model does not run on an example.
        UsageError: there is no example, or no tensor in the output: nothing would be compared.

    Example:
        >>> import prunekit as pk, torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))
        >>> x = torch.randn(8, 4)
        >>> plan = pk.plan(model, x, macs=0.5)
        >>> pk.verify(model, pk.compact(model, plan), plan, x).max_relative_difference < 1e-12
        True
    """
    masked, compact = unwrapped(masked), unwrapped(compact)
    require_values(masked, "verify")
    require_values(compact, "verify")
    require_plan(plan, masked)
    if not isinstance(tolerance, (int, float)) or not tolerance >= 0:
        raise UsageError(f"tolerance: expected a relative difference of at least 0, got {tolerance!r}")
    read = plan.channel_map.read if outputs is None else ReadOutputs.given(outputs)
    state = plan.channel_map.state
    masked_in, compact_in = _ModelCopies(masked, None if strict else plan, state), _ModelCopies(compact, state=state)
    misplaced_in: dict[RunPrecision, str] = {}
    worst, seen, coarsest, ways = 0.0, 0, TOLERANCE, RUN_PRECISIONS
    light = strict and is_large(masked) and not _misplaced(masked, compact, plan, tolerance)
    for example in as_examples(masked, examples):
        calls = model_calls(masked, example, read)
        difference = _without_copies(masked, compact, plan, example, calls) if light else inf
        if difference <= tolerance:
            worst, seen = max(worst, difference), seen + sample_count(example, 1)
            continue
        expected = _expected(
            masked_in, example, ways, lambda copy: NarrowNorms(copy, plan.channel_map, plan.keep), calls
        )
        way, allowed = expected.way, max(tolerance, expected.rounding)
        ways = ways[ways.index(way) :]  # what does not run in float64 on one example is not tried on the next
        masked_copy, inputs = masked_in[way], way.inputs(example, noise=False)
        if way not in compact_in:
            _begin_alike(masked_in, compact_in[way], way, plan)
        compact_copy = compact_in[way]
        try:
            got = _run(compact_copy, inputs, way, calls)
        except Exception as error:  # whatever the model's own code makes of a wrong size
            reraise_shortage(error)
            difference, reason = inf, reason_of(error)
        else:
            difference, reason = largest_difference(expected.output, got)
        if way not in misplaced_in:  # once both ran: forward may write its own tensors
            misplaced_in[way] = _misplaced(masked_copy, compact_copy, plan, allowed)
        misplaced = misplaced_in[way]
        if (misplaced or not difference <= allowed) and way.dtype is not None:
            later = _after_a_pass(masked, compact, plan, example, way, calls, strict)
            if later <= allowed:
                difference, misplaced = later, ""
        if misplaced or not difference <= allowed:
            difference, reason = _by_operator(masked_copy, compact_copy, plan, inputs, way, misplaced or reason)
        if misplaced and difference <= allowed:
            difference, reason = inf, f"{misplaced}; no operator before shows it"
        if not difference <= allowed:
            said = (_not_masked(masked, plan) if strict else "") + _keeps(masked, state)
            raise VerificationError(f"masked and compact model differ: {reason}{said}")
        worst, coarsest = max(worst, difference), max(coarsest, expected.rounding)
        seen += sample_count(inputs, 1)
    if not seen:
        raise UsageError("examples: expected at least one input to compare the models on, got none")
    names = {rounded: str(dtype).removeprefix("torch.") for dtype, rounded in ROUNDING.items()}
    return Verification(worst, seen, names[coarsest])


def compare_outputs(
    model: nn.Module,
    changed: nn.Module,
    example: tuple[Any, ...],
    *,
    tolerance: float = TOLERANCE,
    narrow: nn.Module | None = None,
) -> float:
    """Return the largest relative difference of the outputs of two models in eval mode, in float64 on the CPU.

    A model whose code does not run in float64 is compared in its own precision; then its rounding counts as equal.
    """
    expected = _expected(_ModelCopies(model), example)
    way = expected.way
    other = changed if narrow is None or way.dtype is not None else narrow
    with raised_as(VerificationError, f"{type(model).__name__} runs, and its changed copy does not: "):
        got = _run(_ModelCopies(other)[way], way.inputs(example, noise=False), way)
    difference, reason = largest_difference(expected.output, got)
    if not difference <= max(tolerance, expected.rounding):
        raise VerificationError(f"{type(model).__name__} and its changed copy differ: {reason}")
    return difference


def largest_difference(want: Any, got: Any) -> tuple[float, str]:
    """Return the largest relative difference of any tensor, infinite if two cannot be compared, and a description."""
    references, values = ([tensor.detach() for tensor in plain_in(output)] for output in (want, got))
    if not references:
        raise UsageError(f"no tensor in the model's output ({type(want).__name__}): there is nothing to compare")
    if len(references) != len(values):
        return inf, f"{len(values)} tensors in the output, expected {len(references)}"
    return max(_tensor_difference(reference, value) for reference, value in zip(references, values, strict=True))


def _tensor_difference(want: torch.Tensor, got: torch.Tensor) -> tuple[float, str]:
    """Return the relative difference of two tensors of one dtype, infinite if they cannot be compared, in words too."""
    if want.shape == got.shape and bool(want.isnan().any() or got.isnan().any()):
        return inf, "NaN in the output"
    difference, reason, _ = relative_difference(want, got, 0.0)
    return difference, f"in the output, {reason}"


@dataclass(frozen=True, eq=False)
class _Expected:
    """The output of the reference; `rounding` is the relative error by the coarsest dtype that it computes with."""

    way: RunPrecision
    output: Any
    rounding: float


class _ModelCopies(dict[RunPrecision, nn.Module]):
    """Copies of a model by the way in which they run, made when they are asked for; masked, where a plan is given."""

    def __init__(self, model: nn.Module, plan: Plan | None = None, state: KeptState = NO_STATE) -> None:
        super().__init__()
        self.model, self.plan, self.state = model, plan, state
        self._begun: dict[RunPrecision, dict[str, tuple[torch.Tensor, int, torch.Tensor]]] = {}

    def __missing__(self, way: RunPrecision) -> nn.Module:
        self[way] = float64_copy(self.model, way.convert)
        drop_remade_(self[way], self.state)
        if self.plan is not None:
            self.plan.zero(self[way])
        self._begun[way] = {name: (one, one._version, one.clone()) for name, one in self[way].named_buffers()}
        return self[way]

    def written(self, way: RunPrecision) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the buffers that a copy has written since it was made, as they were when it was made."""
        now = dict(self[way].named_buffers())
        for name, (tensor, version, first) in self._begun[way].items():
            kept = now.get(name) is tensor and tensor._version == version
            alike = tensor.layout != torch.strided or torch.equal(tensor, first)  # a write to `.data` counts no version
            if not (kept and alike):
                yield name, first


def _expected(
    copies: _ModelCopies,
    example: tuple[Any, ...],
    ways: Sequence[RunPrecision] = RUN_PRECISIONS,
    around: Callable[[nn.Module], AbstractContextManager[Any]] = nullcontext,
    calls: ModelCalls = ONE_CALL,
) -> _Expected:
    """Return the output in the first way of running a model that does not fail."""
    failures = []
    for way in ways:
        watch = _Rounding()
        try:
            with around(copies[way]), watch if way.dtype is None else nullcontext():
                output = _run(copies[way], way.inputs(example, noise=False), way, calls)
        except Exception as error:  # of the model's own code, which may not take this dtype
            failures.append(error)
            copies.pop(way, None)
            continue
        return _Expected(way, output, max(way.tolerance, watch.found))
    raise ModelError(
        f"{type(copies.model).__name__} does not run, neither in float64 nor as it is: {type(failures[-1]).__name__}: "
        f"{failures[-1]}; {example_advice(copies.model, [example], str(failures[-1]))}"
    ) from failures[-1]


class _Rounding(OperatorMode):
    """Finds the coarsest dtype that a model computes with."""

    def __init__(self) -> None:
        super().__init__()
        self.found = 0.0

    def operator(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        out = run_operator(func, args, kwargs)
        self.found = max(self.found, rounding(gather(out)))
        return out


def _run(model: nn.Module, inputs: tuple[Any, ...], way: RunPrecision, calls: ModelCalls = ONE_CALL) -> Any:
    with same_draws(model), training_mode(model, False), plain_attention(), way.precision():
        found: list[Any] = without_gradients(lambda: [calls.read.of(output) for output in calls.outputs(model, inputs)])
    return found[0] if len(found) == 1 else found


def _without_copies(
    masked: nn.Module, compact: nn.Module, plan: Plan, example: tuple[Any, ...], calls: ModelCalls
) -> float:
    """Return the difference in float64 of models that are converted module by module; infinite on failure."""
    way, source, whole = RUN_PRECISIONS[0], plan.channel_map.source, plan.channel_map.narrow(plan.keep)
    inputs = way.inputs(example, noise=False)
    used = [pair for run in ([] if source is None else source.trace.runs) for pair in run.borrowed]
    # this takes the memory of one module in place of two models
    try:
        running = Float64WhileRunning(masked, way.convert, whole=whole, borrowed=used)
        with running, NarrowNorms(running.model, plan.channel_map, plan.keep):
            expected = _run(running.model, inputs, way, calls)
        with Float64WhileRunning(compact, way.convert, borrowed=used) as running:
            return largest_difference(expected, _run(running.model, inputs, way, calls))[0]
    except Exception as error:  # of the model's own code: copies will tell
        reraise_shortage(error)
        return inf


def _after_a_pass(
    masked: nn.Module,
    compact: nn.Module,
    plan: Plan,
    example: tuple[Any, ...],
    way: RunPrecision,
    calls: ModelCalls,
    strict: bool,
) -> float:
    """Return the difference of copies that both ran before; infinite if they fail, or their tensors do not match."""
    # a module may keep tensors of an earlier pass in its precision, as detectors do, and only one model may have run
    try:
        first, second = (_ModelCopies(_after_running(model, example, calls))[way] for model in (masked, compact))
        if not strict:
            plan.zero(first)
        inputs = way.inputs(example, noise=False)
        with NarrowNorms(first, plan.channel_map, plan.keep):
            expected = _run(first, inputs, way, calls)
        difference, _ = largest_difference(expected, _run(second, inputs, way, calls))
        return inf if _misplaced(first, second, plan, way.tolerance) else difference
    except Exception as error:  # whatever the model's own code makes of a precision, or of a wrong size
        reraise_shortage(error)
        return inf


def _after_running(model: nn.Module, example: tuple[Any, ...], calls: ModelCalls) -> nn.Module:
    """Return a copy of a model that has run on an example, in its own precision."""
    twin, own = copied(model, "cpu"), RUN_PRECISIONS[-1]
    _run(twin, own.inputs(example, noise=False), own, calls)
    return twin


def _by_operator(
    masked: nn.Module, compact: nn.Module, plan: Plan, inputs: tuple[Any, ...], way: RunPrecision, reason: str
) -> tuple[float, str]:
    """Return where two models first differ; nowhere if only equal scores are in another order, see `Decision`."""
    if plan.channel_map.source is None:
        return inf, f"{reason}; the plan was read from a file: trace the model again to find the operator"
    run = plan.channel_map.traced.trace.runs[0]
    reference = record_reference(masked, plan.channel_map, plan.keep, inputs, run, way.precision)
    divergence = compare(reference, compact, inputs, run, way.tolerance)[1]
    if divergence is not None:
        return inf, f"first at {divergence}"
    difference, reason = largest_difference(reference.outputs, output_with_decisions(reference, compact, inputs, run))
    return difference, f"{reason}; no operator before shows it"


@torch.no_grad()
def _begin_alike(masked_in: _ModelCopies, compact: nn.Module, way: RunPrecision, plan: Plan) -> None:
    """Let a compact model begin with what earlier passes left in the masked one, in attributes and written buffers."""
    give_state_(compact, masked_in.model, masked_in.state)
    cut_state_(compact, masked_in.state, plan.keep)
    own = dict(compact.named_buffers())
    for name, first in masked_in.written(way):
        left = cut(first, plan.kept_indices.get(name, ()))
        if name in own and own[name].shape == left.shape:
            own[name].copy_(left)


def _not_masked(masked: nn.Module, plan: Plan) -> str:
    """Return a message that a model is not masked, as if the dense one was given; empty if it is."""
    for name, tensor in named_tensors(masked):
        keep = plan.mask(name) if has_gradients(tensor) and not is_variance(name) else None
        if keep is not None and bool(tensor.detach().masked_fill(keep.to(tensor.device), 0).any()):
            return (
                f"; {name} of the masked model is not 0 where the plan prunes: give the model as `prunekit.masked` "
                "or a repair left it, not the dense one"
            )
    return ""


def _keeps(masked: nn.Module, state: KeptState) -> str:
    """Return a message on attributes that hold tensors whose widths nothing tells; empty if there are none."""
    known = {place[:2] for place in state.labels} | state.remade
    names = {f"{path}.{name}".lstrip(".") for path, name, _ in kept_tensors(masked) if (path, name) not in known}
    if not names:
        return ""
    return (
        f"; the model keeps tensors in attributes that are no buffers ({listed(sorted(names), 3)}): if earlier calls "
        "left them, reset them, or trace the model on inputs that write them"
    )


def _misplaced(masked: nn.Module, compact: nn.Module, plan: Plan, tolerance: float) -> str:
    """Return a message on the first tensor of the compact model that is not the masked one's, cut; empty if none is."""
    narrow = dict(named_tensors(compact))
    for name, tensor in named_tensors(masked):
        if name in narrow and name in plan.channel_map.shapes and has_gradients(tensor) and tensor.numel():
            difference, _ = largest_difference(cut(tensor, plan.kept_indices.get(name, ())), narrow[name])
            if not difference <= tolerance:
                return f"{name} of the compact model is not what the plan keeps of the masked model's"
    return ""


@dataclass(frozen=True)
class Parity:
    """The agreement of an exported file with its model on one batch."""

    inputs: str  # shapes and dtypes, in words
    batch: int  # number of samples
    max_relative_difference: float  # largest difference of an output, over its largest value


def check_export(
    kind: FileBackend, path: Path, run: Run, model: nn.Module, interface: ModelInterface, example: tuple[Any, ...]
) -> Parity:
    """Compare a file's outputs with the model's in float32, on an example."""
    with torch.inference_mode():
        expected = gather(call(model, example))
    with raised_as(RunError, f"{kind.format}: the exported model does not run on {described(example)}: "):
        found = run(example)
    worst, reason = largest_difference(expected, found)
    if not worst <= kind.tolerance:
        named = "; ".join(_parted(expected, found, interface, kind.tolerance)) or reason
        where = kind.parts(path, example, first_outputs(model, example))
        raise RunError(
            f"{kind.format}: the exported model computes something else than {type(model).__name__} on "
            f"{described(example)}: {named}{f'; it first differs at {where}' if where else ''}; the file was removed"
        )
    return Parity(described(example), sample_count(example, 1), worst)


def _parted(
    expected: Sequence[Tensor], found: Sequence[Tensor], interface: ModelInterface, tolerance: float
) -> Iterator[str]:
    """Yield the difference of each output that differs by more than a tolerance."""
    if len(expected) != len(found):
        return
    names = [one.name for one in interface.outputs]
    for index, (want, got) in enumerate(zip(expected, found, strict=True)):
        difference, reason = largest_difference([want], [got])
        if not difference <= tolerance:
            yield f"{names[index] if index < len(names) else f'output {index}'}: {reason}"
