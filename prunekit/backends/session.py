"""Sessions of runtimes: the setting, inputs and source that one is made from, how it runs, and the clocks that time it.

The sums of `OperatorTimer` are within 2 % of those of `torch.profiler` on resnet18, mobilenet_v3_small and vit_b_16
(minima of nine runs), which records five times as many events. Either way a timed call costs some microseconds more
than an untimed one; these are measured on operators that do nothing, and subtracted.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from prunekit.channels.tracing.execution import ModuleStack
from prunekit.channels.tracing.operator_mode import OperatorMode, run_operator
from prunekit.errors import UsageError
from prunekit.utils.inputs import call, described, select_samples, split
from prunekit.utils.tensors import gather, map_samples, map_tensors, sample_parts


@dataclass(frozen=True)
class Setting:
    """One way of running a model, in the terms of a row of results.

    `prunekit.measure.latency.comparison.choose_settings` makes them from settings, whose "fp32" is "float32" here.
    """

    runtime: str
    device: str  # "cpu", "cuda" or "cuda:n"
    batch: int
    threads: int  # of the CPU
    # of the model's computations, by torch's name: "float32", "bfloat16", "float16", or "int8" for a file that was
    # quantized, whose inputs and outputs are in float32
    dtype: str = "float32"
    memory_format: str = "contiguous"  # "contiguous" or "channels_last"

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype as an object of torch."""
        found: torch.dtype = getattr(torch, self.dtype)
        return found


Sample = tuple[Any, ...]
"""An example (see `prunekit.utils.inputs.as_example`): (B, ...) tensors on the CPU, floating-point ones in float32."""


def in_dtype(sample: Sample, dtype: torch.dtype) -> Sample:
    """Return a sample with its floating-point tensors in a dtype."""
    found: Sample = map_tensors(sample, lambda one: one.to(dtype) if one.is_floating_point() else one)
    return found


@dataclass(frozen=True, eq=False)
class Inputs:
    """The inputs of a model, from which batches of any size are made."""

    one: tuple[Any, ...]  # an example with one sample
    # whether its numbers are drawn at random; else the sample is repeated. Several inputs may depend on each other, as
    # targets that `forward` takes depend on their images, and whole numbers on the model's tables.
    drawn: bool = False

    def sample(self, batch: int) -> Sample:
        """Return a batch, the same at each call: standard normal numbers, or the sample repeated."""
        if not self.drawn:
            repeated: Sample = map_samples(
                self.one, lambda one: one.repeat_interleave(batch, 0), lambda samples: samples * batch
            )
            return repeated
        generator = torch.Generator().manual_seed(0)
        random: Sample = map_tensors(self.one, lambda one: torch.randn(batch, *one.shape[1:], generator=generator))
        return random

    def described(self) -> list[Any]:
        """Return plain data that is equal for equal inputs: a shape for a drawn tensor, else a list for each input."""
        positional, named = split(self.one)
        if self.drawn and not named:
            return list(positional[0].shape[1:])
        return [*map(self._described, positional), {name: self._described(value) for name, value in named.items()}]

    def _described(self, value: Any) -> Any:
        tensors = gather(value)
        if not tensors:
            return repr(value)
        marks = [sha256(one.contiguous().numpy().tobytes()).hexdigest() for one in tensors if not self.drawn]
        return [described(value), *marks]


def inputs_of(given: Sequence[int] | Inputs) -> Inputs:
    """Return the inputs of a model with one floating-point input, from its shape without the batch, or `Inputs`."""
    return given if isinstance(given, Inputs) else Inputs((torch.empty(1, *given),), drawn=True)


def inputs_like(example: tuple[Any, ...], *, drawn: bool = True) -> Inputs:
    """Return the inputs of a model from an example, of which the first sample is taken.

    With `drawn`, numbers are drawn at random if the only input is a tensor of floating-point ones.

    Raises:
        UsageError: an input does not have as many samples as the first.
    """
    positional, named = split(example)
    values = (*positional, *named.values())
    counts = {len(part) if isinstance(part, list) or part.dim() else None for part in sample_parts(example)}
    odd = [type(value).__name__ for value in values if not gather(value) and not isinstance(value, CONSTANTS)]
    if odd or len(counts) != 1 or None in counts:
        found = ", ".join(odd) or " and ".join(described(value) for value in values) or "none"
        raise UsageError(
            "inputs that are timed: expected tensors, each with the batch on its first axis, or lists of samples, "
            f"because batches of other sizes are made of them; got {found}"
        )
    one = map_tensors(select_samples(example, slice(1)), lambda tensor: tensor.detach().cpu())
    alone = len(values) == 1 and isinstance(values[0], Tensor) and values[0].is_floating_point()
    return Inputs(one, drawn and alone)


CONSTANTS = (bool, int, float, str, type(None))
"""Arguments that are the same for batches of any size."""


MODULE = "module"
"""The carrier of runtimes that run the module itself."""
FileKey = tuple[int, str]
"""Batch, and the dtype of `Setting`; after "int8" comes the quantizer, as in "int8 by nncf"."""
INT8 = "int8"
"""The dtype of settings whose files are quantized."""


@dataclass(frozen=True, eq=False)
class Source:
    """A model in the form that a runtime takes: the module itself, or files by batch and dtype.

    Beside a quantized file there is always the file in float32 that it was made from.
    """

    module: nn.Module | None = None
    files: Mapping[FileKey, Path] = field(default_factory=dict)
    # opens a session of a model that was exported before, in place of the runtime's own function
    open: Callable[[Sample, Setting], Session] | None = None


@dataclass(frozen=True)
class LayerClock:
    """A model that is ready to run with every operator timed."""

    run: Callable[[], object]  # runs one forward
    # takes a number of forwards, and returns for each of the last ones the milliseconds by path of the innermost module
    # ("" the model's own code), and under None those of no module; called once, when all forwards have run
    passes: Callable[[int], Sequence[Mapping[str | None, float]]]


@dataclass(frozen=True)
class Session:
    """A model that is ready to run on one sample.

    Attributes:
        run: runs one forward.
        tensors: turns what `run` returned into tensors, nested as the model nests them; is not timed.
        layers: opens this model on this sample, to be timed layer by layer; None if the runtime cannot do that.
        move: moves its weights elsewhere in memory, see `prunekit.backends.eager.WeightMover`; None if it cannot.

    Example:
        >>> import prunekit as pk, torch
        >>> model, x = torch.nn.Linear(8, 2), torch.randn(4, 8)
        >>> session = pk.Session(run=lambda: model(x).detach().numpy(), tensors=torch.from_numpy)
        >>> session.tensors(session.run()).shape  # `run` is what is timed
        torch.Size([4, 2])
    """

    run: Callable[[], Any]
    tensors: Callable[[Any], Any] = lambda output: output
    layers: Callable[[], LayerClock] | None = None
    move: Callable[[], object] | None = None


OperatorKey = tuple[str, str]
"""Path of the innermost module that runs, and the operator's name."""
HOLD_CYCLES = 50_000_000
"""Clock cycles that a GPU waits while the operators of a forward pass are queued: some 25 ms."""


class Timer:
    """A clock for one model: calling it runs a forward pass and returns its milliseconds."""

    def __init__(self, forward: Callable[[], object], device: torch.device) -> None:
        self.forward, self.device = forward, device

    def __call__(self) -> float:
        """Run one forward pass and return its milliseconds."""
        return self._events() if self.device.type == "cuda" else self._clock()

    def _clock(self) -> float:
        start = time.perf_counter_ns()
        self.forward()
        if self.device.type == "mps":
            torch.mps.synchronize()
        return (time.perf_counter_ns() - start) / 1e6

    def _events(self) -> float:
        with torch.cuda.device(self.device):
            torch.cuda.synchronize()
            start = _event()
            self.forward()
            end = _event()
            end.synchronize()
        return float(start.elapsed_time(end))


class OperatorTimer:
    """A clock for operators: calling it runs a forward pass and returns the milliseconds of all operators together.

    On CUDA the pass is queued while the GPU waits, so that events time the kernels and not the gaps between them. What
    timing itself costs an operator, `clock_ms`, is subtracted.
    """

    def __init__(self, model: nn.Module, inputs: tuple[Any, ...], device: torch.device, clock_ms: float = 0.0) -> None:
        self.model, self.inputs, self.cuda, self.clock_ms = model, inputs, device.type == "cuda", clock_ms
        self.stack = ModuleStack(model)
        self.passes: list[Mapping[OperatorKey, float]] = []  # milliseconds by module and operator, of every call so far

    def __call__(self) -> float:
        """Run a forward pass, and append its times to `passes`."""
        clock = _OperatorClock(self.stack, _event if self.cuda else time.perf_counter_ns)
        with self.stack, clock:
            if self.cuda:
                torch.cuda.synchronize()
                torch.cuda._sleep(HOLD_CYCLES)  # type: ignore[no-untyped-call]
            call(self.model, self.inputs)
        if self.cuda:
            torch.cuda.synchronize()
        times: dict[OperatorKey, float] = defaultdict(float)
        for key, start, end in clock.spans:
            ms = start.elapsed_time(end) if self.cuda else (end - start) / 1e6
            times[key] += max(0.0, ms - self.clock_ms)
        self.passes.append(dict(times))
        return sum(times.values())


class _OperatorClock(OperatorMode):
    def __init__(self, stack: ModuleStack, mark: Callable[[], Any]) -> None:
        super().__init__()
        self.stack, self.mark = stack, mark
        self.spans: list[tuple[OperatorKey, Any, Any]] = []

    def operator(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        start = self.mark()
        result = run_operator(func, args, kwargs)
        end = self.mark()
        self.spans.append(((self.stack.current, name_of(func)), start, end))
        return result


def _event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


def name_of(operator: Any) -> str:
    """Return an operator's name, without the prefix of ATen."""
    return str(operator.overloadpacket).removeprefix("aten.")


CHAIN = 200
RUNS = 15


@dataclass(frozen=True)
class Floor:
    """The time of an operator that does nothing."""

    operator_ms: float  # of an operator on one number, in a model that is not timed
    clock_ms: float  # additional time if it is timed


def measure_floor(device: torch.device) -> Floor:
    """Measure both times on a chain of additions; the least of several runs counts, as other processes only add."""
    chain, one = _Chain(), torch.ones(1, device=device)
    clock = OperatorTimer(chain, (one,), device)
    with torch.no_grad():
        timed = min(clock() for _ in range(RUNS)) / CHAIN
        if device.type == "cuda":  # the GPU waits meanwhile, so that kernels alone are timed
            return Floor(timed, 0.0)
        plain = min(Timer(lambda: chain(one), device)() for _ in range(RUNS)) / CHAIN
    return Floor(plain, max(0.0, timed - plain))


class _Chain(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        for _ in range(CHAIN):
            x = x + 1
        return x
