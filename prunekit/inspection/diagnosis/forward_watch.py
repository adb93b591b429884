"""What runs in which order, what nonlinearities are given, and which gradients come back.

What an exception of a model's says about shapes.
"""

from __future__ import annotations

import math
import re
import traceback
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from prunekit.channels.tracing.execution import ModuleStack
from prunekit.channels.tracing.operator_mode import OperatorMode, run_operator
from prunekit.channels.tracing.tracer import channel_axis
from prunekit.hooks.hook import never_called
from prunekit.hooks.owner import HookOwner
from prunekit.inspection.diagnosis.observation import Failure, Shape, Step, Units
from prunekit.utils.tensors import gather

FLAT = 0.04
"""A sigmoid or tanh is flat where its slope is below this share of its steepest: a sigmoid beyond 0.01 and 0.99, where
a unit learns 25 times slower (saturation: Glorot & Bengio 2010, "Understanding the difficulty of training deep
feedforward neural networks")."""
_EDGE = math.atanh(math.sqrt(1 - FLAT))
LIMITS = {"sigmoid": 2 * _EDGE, "tanh": _EDGE, "hardsigmoid": 3.0}
"""Inputs, in absolute value, from which on they are that flat; `hardsigmoid` has no slope at all there."""
TRAIL = 8
"""Steps of a tensor's way that are shown."""
_RECTIFIERS = {"relu", "hardtanh", "clamp_min", "threshold"}


@dataclass(frozen=True, eq=False)
class Ran:
    """One call of a module; `node` is what autograd knows its first result by."""

    path: str
    step: Step
    node: Any


class Running(ModuleStack):
    """The modules that run, in order; the stack stays as it is when one raises.

    Attributes:
        order: place of each module by path, by when it was first entered.
        calls: every call of a module without children in the latest forward pass.
        received: shapes of the tensors that each module now running was given, outermost first.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model, self._entered, self._left)
        self.order: dict[str, int] = {}
        self.calls: list[Ran] = []
        self.received: list[list[Tensor]] = []
        self.last = ""
        """Path of the module without children that ran last."""

    def begin(self) -> None:
        """Forget the pass before."""
        self.calls.clear()
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
            step = Step(f"{path or type(module).__name__} ({type(module).__name__})", tuple(tensors[0].shape))
            self.calls.append(Ran(path, step, tensors[0].grad_fn))

    def trail(self, tensors: list[Tensor]) -> tuple[Step, ...]:
        """Return how the first of some tensors came about: through modules, and functions between them.

        Without a graph, as of frozen models, the modules that ran last.
        """
        node = next((tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None), None)
        if node is None:
            return tuple(ran.step for ran in self.calls[-TRAIL:])
        known = {ran.node: ran for ran in self.calls if ran.node is not None}
        steps: list[Step] = []
        while node is not None and len(steps) < TRAIL:
            between, node = _back(node, known)
            steps += between
            if node is not None:
                steps.append(known[node].step)
                node = _before(node, known)
        return tuple(reversed(steps[:TRAIL]))


def _before(node: Any, known: Mapping[Any, Ran]) -> Any:
    """Return the node before a module's result: its first input that leads to another module's."""
    for following, _ in node.next_functions:
        if following is not None and _back(following, known)[1] is not None:
            return following
    return None


def _back(start: Any, known: Mapping[Any, Ran]) -> tuple[list[Step], Any]:
    """Return the nearest module's result at or before a node, and the functions on the way; None without one."""
    queue, parents = deque([start]), {start: None}
    while queue:
        node = queue.popleft()
        if node in known:
            way: list[Step | None] = []
            at = parents[node]
            while at is not None:
                way.append(_function(at))
                at = parents[at]
            return [step for step in reversed(way) if step is not None], node
        for following, _ in node.next_functions:
            if following is not None and following not in parents:
                parents[following] = node
                queue.append(following)
    return [], None


def _function(node: Any) -> Step | None:
    """Return a function between modules, as autograd calls it."""
    shapes = [tuple(each.shape) for each in getattr(node, "_input_metadata", ())]
    return Step(re.sub(r"Backward\d*$", "", node.name()).lower(), shapes[0]) if shapes else None


class UnitWatch(OperatorMode):
    """What nonlinearities are given, whether modules or functions: `nn.ReLU`, `F.relu` and `x.relu_()` alike."""

    def __init__(self, running: Running) -> None:
        super().__init__()
        self._running = running
        self._calls: Counter[tuple[str, str]] = Counter()
        self.units: dict[tuple[str, str, int], Units] = {}
        """By the innermost module that runs, the function, and its number among its calls there."""

    def begin(self) -> None:
        """Forget how often each was called in the pass before."""
        self._calls.clear()

    def operator(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Note the input before an in-place function overwrites it."""
        function = _nonlinearity(func, args)
        if function is not None and args[0].ndim > 1 and args[0].numel():
            self._note(function, args[0])
        return run_operator(func, args, kwargs)

    def _note(self, function: str, values: Tensor) -> None:
        path = self._running.current
        key = path, function, self._calls[path, function]
        self._calls[path, function] += 1
        after = self._running.last
        axis = channel_axis(self._running.model.get_submodule(after), values.ndim)
        channels = values.movedim(axis, 0).flatten(1)
        low, high = torch.aminmax(channels.float(), dim=1)
        limit = LIMITS.get(function)
        flat = 0 if limit is None else int((values.abs() >= limit).sum())
        seen = Units(function, after, low.double().cpu().numpy(), high.double().cpu().numpy(), flat, values.numel())
        before = self.units.get(key)
        if before is None or before.low.shape == seen.low.shape:
            self.units[key] = seen if before is None else before.merge(seen)


def _nonlinearity(func: Any, args: Any) -> str | None:
    name: str = func.overloadpacket.__name__.removesuffix("_")
    if name in LIMITS:
        return name
    if name not in _RECTIFIERS:
        return None
    lower = args[1] if len(args) > 1 else None if name != "relu" else 0
    return "relu" if lower == 0 else None


class GradientWatch(HookOwner):
    """Norms of the gradients of modules' outputs as they come back.

    Attributes:
        squares: their squares by path, of the latest backward pass, all calls of a module together.
        not_finite: path of the first whose gradient was NaN or Inf.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._model = model
        self.squares: dict[str, float] = {}
        self.not_finite: str | None = None

    def register(self) -> None:
        for path, module in self._model.named_modules():
            own = any(True for _ in module.parameters(recurse=False))
            if never_called(module):
                continue
            if own or not path or not any(True for _ in module.children()):
                self.own_output_gradients(module, self._look(path))

    def _look(self, path: str) -> Callable[[Tensor, int], None]:
        def look(gradient: Tensor, index: int) -> None:
            square = float(gradient.detach().float().square().sum())
            self.squares[path] = self.squares.get(path, 0.0) + square
            if not math.isfinite(square) and self.not_finite is None and not bool(torch.isfinite(gradient).all()):
                self.not_finite = path

        return look

    def begin(self) -> None:
        """Forget the pass before."""
        self.squares.clear()

    @property
    def norms(self) -> dict[str, float]:
        """Norms of the latest backward pass, by path."""
        return {path: math.sqrt(square) for path, square in self.squares.items() if square >= 0}


def shapes_of(tensors: list[Tensor]) -> tuple[Shape, ...]:
    """Their shapes."""
    return tuple(tuple(tensor.shape) for tensor in tensors)


SHAPE_WORDS = re.compile(
    r"\b(shapes?|sizes?|dimensions?|channels?|expand|broadcast|numel|stack|split|view|batch_size|Expected \d-?D)\b",
    re.I,
)
"""What torch's messages about sizes that do not go together have in common: there is no exception of their own."""
_TORCH = f"{Path(torch.__file__).parent}/"
_PACKAGE = Path(__file__).parents[2]
_AROUND = (
    *(f"{_PACKAGE / room}/" for room in ("inspection", "statistics", "hooks", "masks")),
    f"{_PACKAGE / 'channels' / 'tracing' / 'dispatch_modes.py'}",
)


def failure_of(error: Exception, running: Running, stage: str = "the forward pass") -> Failure:
    """Return what happened, from an exception and from what was running."""
    text = str(error).strip().splitlines()
    line, operands = _own_line(error)
    received = running.received[-1] if running.received else []
    inside = running.paths[-1] != ""
    return Failure(
        module=running.current,
        received=shapes_of(received),
        operands={name: tuple(tensor.shape) for name, tensor in operands.items()},
        error=f"{type(error).__name__}: {text[0] if text else ''}",
        line=line,
        trail=running.trail([*(received if inside else []), *operands.values()]),
        of_shapes=not isinstance(error, (TypeError, AttributeError)) and bool(SHAPE_WORDS.search(str(error))),
        stage=stage,
    )


def _own_line(error: Exception) -> tuple[str, dict[str, Tensor]]:
    """Return the innermost line of the model's own code, and the tensors that it names; empty where all of it is
    torch's.
    """
    frames = zip(traceback.walk_tb(error.__traceback__), traceback.extract_tb(error.__traceback__), strict=True)
    for (frame, _), summary in reversed(list(frames)):
        if not summary.filename.startswith((_TORCH, *_AROUND)):
            text = summary.line or ""
            values = {name: frame.f_locals.get(name) for name in re.findall(r"[A-Za-z_]\w*", text)}
            tensors = {name: value for name, value in values.items() if isinstance(value, Tensor)}
            return f"{Path(summary.filename).name}:{summary.lineno}: {text}", tensors
    return "", {}


def shown(shapes: tuple[Shape, ...]) -> str:
    """Return shapes as text."""
    return ", ".join(map(str, shapes)) or "no tensor"
