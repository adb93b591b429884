"""Recorders of a running model: the modules that run, what nonlinearities are given, and gradients.

If the model raises an exception, `failure_of` says which module ran, and which ran before it.
"""

import inspect
import math
import re
import traceback
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from prunekit.channels.tracing.execution import ModuleStack, channel_axis
from prunekit.channels.tracing.operator_mode import OperatorMode, run_operator
from prunekit.hooks.hook import never_called
from prunekit.hooks.owner import HookOwner
from prunekit.inspection.diagnosis.findings import Failure, NonlinearityInputs, Shape, TrailStep
from prunekit.utils.tensors import gather

FLAT = 0.04
"""A sigmoid or tanh is flat where its slope is below this share of its steepest: a sigmoid beyond 0.01 and 0.99, where
a unit learns 25 times slower (saturation: Glorot & Bengio 2010, "Understanding the difficulty of training deep
feedforward neural networks")."""
_EDGE = math.atanh(math.sqrt(1 - FLAT))
LIMITS = {"sigmoid": 2 * _EDGE, "tanh": _EDGE, "hardsigmoid": 3.0}
"""Absolute values of inputs beyond which they are flat; `hardsigmoid` has no slope at all there."""
_RECTIFIERS = {"relu", "hardtanh", "clamp_min", "threshold"}
TRAIL = 8
"""Steps that a trail has at most."""
SHAPE_WORDS = re.compile(
    r"\b(shapes?|sizes?|dimensions?|channels?|expand|broadcast|numel|stack|split|view|batch_size|Expected \d-?D)\b",
    re.I,
)
"""Words in torch's messages about sizes that do not fit together, for which it has no exception of their own."""
_TORCH = f"{Path(torch.__file__).parent}/"
_PACKAGE = Path(__file__).parents[2]
_AROUND = (
    *(f"{_PACKAGE / room}/" for room in ("inspection", "statistics", "hooks", "masks")),
    inspect.getfile(OperatorMode),
)


class ExecutionRecorder(ModuleStack):
    """The modules that run, in order of execution; the stack is left as it is when one raises."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model, self._entered, self._left)
        self.order: dict[str, int] = {}  # place in the order in which modules are first entered, by path
        self.steps: list[TrailStep] = []  # modules without children that ran in the latest forward pass
        self.received: list[list[Tensor]] = []  # input tensors of every module that is running, outermost first
        self.last = ""  # path of the module without children that ran last

    def begin(self) -> None:
        """Forget the previous pass."""
        self.steps.clear()
        self.received.clear()
        self.paths[1:] = []
        self.last = ""

    def _entered(self, path: str, module: nn.Module, arguments: Any) -> None:
        self.order.setdefault(path, len(self.order))
        self.received.append(gather(arguments))

    def _left(self, path: str, module: nn.Module, arguments: Any, output: Any) -> None:
        self.received.pop()
        if any(True for _ in module.children()):
            return
        self.last = path
        tensors = gather(output)
        if tensors:
            name = f"{path or type(module).__name__} ({type(module).__name__})"
            self.steps.append(TrailStep(name, tuple(tensors[0].shape)))


class NonlinearityRecorder(OperatorMode):
    """The inputs of nonlinearities, whether modules or functions: `nn.ReLU`, `F.relu` and `x.relu_()` alike."""

    def __init__(self, execution: ExecutionRecorder) -> None:
        super().__init__()
        self._execution = execution
        self._calls: Counter[tuple[str, str]] = Counter()
        # by the innermost module that runs, the function, and the number of its call there
        self.inputs: dict[tuple[str, str, int], NonlinearityInputs] = {}

    def begin(self) -> None:
        """Start counting calls at the beginning of a pass."""
        self._calls.clear()

    def operator(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Record the input before an in-place function overwrites it."""
        function = _nonlinearity(func, args)
        if function is not None and args[0].ndim > 1 and args[0].numel():
            self._record(function, args[0])
        return run_operator(func, args, kwargs)

    def _record(self, function: str, values: Tensor) -> None:
        path = self._execution.current
        key = path, function, self._calls[path, function]
        self._calls[path, function] += 1
        after = self._execution.last
        axis = channel_axis(self._execution.model.get_submodule(after), values.ndim)
        channels = values.movedim(axis, 0).flatten(1)
        low, high = torch.aminmax(channels.float(), dim=1)
        limit = LIMITS.get(function)
        flat = 0 if limit is None else int((values.abs() >= limit).sum())
        inputs = NonlinearityInputs(
            function, after, low.double().cpu().numpy(), high.double().cpu().numpy(), flat, values.numel()
        )
        before = self.inputs.get(key)
        if before is None or before.low.shape == inputs.low.shape:
            self.inputs[key] = inputs if before is None else before.merge(inputs)


def _nonlinearity(func: Any, args: Any) -> str | None:
    name: str = func.overloadpacket.__name__.removesuffix("_")
    if name in LIMITS:
        return name
    if name not in _RECTIFIERS:
        return None
    lower = args[1] if len(args) > 1 else None if name != "relu" else 0
    return "relu" if lower == 0 else None


class GradientRecorder(HookOwner):
    """Norms of the gradients of modules' outputs."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._model = model
        self.squares: dict[str, float] = {}  # of the latest backward pass by path, all calls of a module together
        self.not_finite: str | None = None  # path of the first module whose gradient was NaN or Inf

    def register(self) -> None:
        """Register hooks on every module with parameters or without children, and on the model."""
        for path, module in self._model.named_modules():
            own = any(True for _ in module.parameters(recurse=False))
            if never_called(module):
                continue
            if own or not path or not any(True for _ in module.children()):
                self.own_output_gradients(module, partial(self._look, path))

    def _look(self, path: str, gradient: Tensor, index: int) -> None:
        square = float(gradient.detach().float().square().sum())
        self.squares[path] = self.squares.get(path, 0.0) + square
        if not math.isfinite(square) and self.not_finite is None and not bool(torch.isfinite(gradient).all()):
            self.not_finite = path

    def begin(self) -> None:
        """Forget the previous pass."""
        self.squares.clear()

    @property
    def norms(self) -> dict[str, float]:
        """The norms of the latest backward pass, by path."""
        return {path: math.sqrt(square) for path, square in self.squares.items() if square >= 0}


def failure_of(error: Exception, execution: ExecutionRecorder, stage: str) -> Failure:
    """Return a failure, from an exception and the modules that were running."""
    text = str(error).strip().splitlines()
    line, operands = _own_line(error)
    received = execution.received[-1] if execution.received else []
    return Failure(
        module=execution.current,
        received=shapes_of(received),
        operands={name: tuple(tensor.shape) for name, tensor in operands.items()},
        error=f"{type(error).__name__}: {text[0] if text else ''}",
        line=line,
        trail=tuple(execution.steps[-TRAIL:]),
        of_shapes=not isinstance(error, (TypeError, AttributeError)) and bool(SHAPE_WORDS.search(str(error))),
        stage=stage,
    )


def _own_line(error: Exception) -> tuple[str, dict[str, Tensor]]:
    """Return the innermost line of the model's own code, and the tensors that it names; empty if there is none."""
    frames = zip(traceback.walk_tb(error.__traceback__), traceback.extract_tb(error.__traceback__), strict=True)
    for (frame, _), summary in reversed(list(frames)):
        if not summary.filename.startswith((_TORCH, *_AROUND)):
            text = summary.line or ""
            values = {name: frame.f_locals.get(name) for name in re.findall(r"[A-Za-z_]\w*", text)}
            tensors = {name: value for name, value in values.items() if isinstance(value, Tensor)}
            return f"{Path(summary.filename).name}:{summary.lineno}: {text}", tensors
    return "", {}


def shapes_of(tensors: list[Tensor]) -> tuple[Shape, ...]:
    """Return the shapes of tensors."""
    return tuple(tuple(tensor.shape) for tensor in tensors)


def shapes_text(shapes: tuple[Shape, ...]) -> str:
    """Return shapes as text."""
    return ", ".join(map(str, shapes)) or "no tensor"
