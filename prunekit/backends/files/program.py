"""Programs of `torch.export`: a model's operators with axes of any size, which every other format is made from.

Where an exporter fails, the error names the place in the model's own code: module path, file, line and its text.
"""

import functools
import linecache
import logging
import os
import re
import sys
import warnings
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, redirect_stderr, suppress
from dataclasses import dataclass, replace
from io import StringIO
from pathlib import Path
from traceback import walk_stack, walk_tb
from types import FrameType
from typing import Any
from unittest.mock import patch

import sympy
import torch
from torch import Tensor, nn
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from prunekit.backends.files.export_source import ExportOptions, ExportSource
from prunekit.errors import RunError, UsageError, nearest, raised_as, reraise_shortage
from prunekit.models.interface import BATCH, ModelInterface, TensorSpec
from prunekit.utils.context import forward_replaced
from prunekit.utils.inputs import call, split
from prunekit.utils.tensors import gather, map_tensors

LIBRARY = str(Path(torch.__file__).parent)
OWN = tuple(str(Path(__file__).parents[2] / room) for room in ("backends", "utils"))
LAYERS = str(Path(LIBRARY, "nn", "modules"))
FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<name>\S+)')
LONGEST = 200
"""Characters of a message of an exporter that are shown."""


def failure(error: BaseException, model: nn.Module) -> str:
    """Return why an exporter failed, and where in the model: `ValueError: ... at layer1.0 (net.py:12: x.item())`."""
    where = place_of_error(error, model)
    return reason(error) + (f" at {where}" if where else "")


def exporting(model: nn.Module, done: str, advice: str) -> AbstractContextManager[None]:
    """Raise what an exporter raises inside as an error that names the place in the model, with advice."""
    return raised_as(
        RunError, f"{type(model).__name__} cannot be {done}: ", f"; {advice}", lambda error: failure(error, model)
    )


def reason(error: BaseException) -> str:
    """Return the first line of the original error, which exporters wrap in advice."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
    text = f"{type(error).__name__}: {re.sub(r' +[(]unhinted: .*', '', lines[0])}"
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 3]}..."


def place_of_error(error: BaseException, model: nn.Module) -> str:
    """Return the innermost place in a model's code that an error was raised from; empty if none is known."""
    paths = {id(module): path for path, module in model.named_modules()}
    chain = list(_chain(error))
    for one in chain:
        for frame, _ in reversed(list(walk_tb(one.__traceback__))):
            node = frame.f_locals.get("node", frame.f_locals.get("n"))
            if isinstance(node, torch.fx.Node) and (found := place_of_node(node)):
                return found
    return next(filter(None, (_innermost(walk_tb(one.__traceback__), paths) for one in chain)), "")


def place_of_caller(model: nn.Module) -> str:
    """Return the innermost place in a model's code that runs now, further out in the stack; empty if none does."""
    frames = list(walk_stack(sys._getframe(1)))
    return _innermost(reversed(frames), {id(module): path for path, module in model.named_modules()})


def _innermost(frames: Iterable[tuple[FrameType, int]], paths: Mapping[int, str]) -> str:
    """Return the last place in a model's code that frames are at, from the outermost frame on."""
    path, place = None, ""
    for frame, line in frames:
        arguments = frame.f_code.co_varnames[:1]  # self, whatever it is called
        path = paths.get(id(frame.f_locals.get(*arguments)) if arguments else 0, path)
        if path is not None and not is_of_torch(frame.f_code.co_filename):
            place = _place(path, frame.f_code.co_filename, line)
    return place


def place_of_node(node: torch.fx.Node) -> str:
    """Return the place in a model's code that a node of an exported program comes from; empty if it is unknown."""
    stack = node.meta.get("nn_module_stack") or {}
    paths = [str(entry[0]) for entry in stack.values()]
    lines = list(FRAME.finditer(node.meta.get("stack_trace") or ""))
    own = [found for found in lines if not is_of_torch(found["file"])] or lines
    if not own:
        return ""
    return _place(paths[-1] if paths else "", own[-1]["file"], int(own[-1]["line"]))


def place_of_line(location: Any) -> str:
    """Return the place of a line that `torch.export` recorded a condition on shapes for; empty if it is unknown."""
    frame = getattr(location, "framework_loc", None)
    frame = getattr(location, "maybe_user_loc", None) or frame
    if frame is None or not hasattr(frame, "filename"):
        return "" if frame is None else str(frame)
    return _place("", frame.filename, frame.lineno)


def _place(path: str, file: str, line: int) -> str:
    text = linecache.getline(file, line).strip()
    shown = f"{Path(file).name}:{line}" + (f": {text}" if text else "")
    return f"{path} ({shown})" if path else shown


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield the original error first, then those that wrap it."""
    found: list[BaseException] = []
    current: BaseException | None = error
    while current is not None and current not in found:
        found.append(current)
        current = current.__cause__ or current.__context__
    return reversed(found)


def is_of_torch(file: str) -> bool:
    """Return whether a file is of torch's machinery or of the export, and not of a model or one of torch's layers."""
    if file == "<string>":  # code that torch made
        return True
    if file.startswith(LAYERS):
        return file == f"{LAYERS}{os.sep}module.py"
    return file.startswith((LIBRARY, *OWN))


PROBES = (*range(2, 10), 16, 17, 31, 64, 100)
"""Sizes of an axis that conditions of the model's code are tried with."""

SAMPLES = 8
"""The largest batch that memory is reserved for, unless the example has a larger one."""
LARGER = 2
"""How many times larger than in the example other axes of any size may be."""


@dataclass(frozen=True, eq=False)
class Program:
    """A model as `torch.export` gives it."""

    exported: torch.export.ExportedProgram  # the program
    interface: ModelInterface  # with the names of the axes that are of any size, in inputs and outputs
    example: tuple[Any, ...]  # that it was traced with
    symbols: Mapping[str, str]  # names of axes by torch's symbols
    notes: list[str]  # for the user, about sizes that the model's code treats differently

    def renamed(self, size: str) -> str:
        """Return an expression of torch's symbols with the names of the axes."""
        return _renamed(size, self.symbols)


def program_of(source: ExportSource, *, flat: bool, most: Mapping[str, int] | None = None) -> Program:
    """Trace a model with axes of any size where its interface names them.

    Args:
        flat: whether the program takes and returns plain tuples of tensors, in the order of the interface; otherwise
            its arguments are those of the model, and its output is that of the model, or a dictionary of the tensors by
            name where the output's class is none of Python's own.
    """
    interface = with_axes(source.interface, source.options)
    example = fitted(source.example, interface)
    axes = [{axis: one for axis, one in enumerate(spec.shape) if isinstance(one, str)} for spec in interface.inputs]
    names = None if flat else [spec.name for spec in interface.outputs]
    source = replace(source, interface=interface)
    exported = trace(source.model, example, axes, names=names, most=most)
    try:
        symbols, notes = _symbols_of(exported, source, example)
    except RunError:
        if not _forgets_batch(source.model, example, interface):
            raise
        exported = trace(source.model, example, axes, names=names, most=most)
        symbols, notes = _symbols_of(exported, source, example)
    values = [value for value in _values(exported, "output") if isinstance(value, Tensor)]
    if len(values) != len(interface.outputs):
        raise RunError(
            f"{type(source.model).__name__}: its interface has {len(interface.outputs)} outputs, and torch.export "
            f"found {len(values)}; its output must be the same nesting of tensors at each call"
        )
    outputs = tuple(
        replace(
            spec,
            shape=tuple(one if isinstance(one, int) else _renamed(str(one.node.expr), symbols) for one in value.shape),
        )
        for spec, value in zip(interface.outputs, values, strict=True)
    )
    return Program(exported, replace(interface, outputs=outputs), example, symbols, notes)


def _forgets_batch(model: nn.Module, example: tuple[Any, ...], interface: ModelInterface) -> bool:
    """Run a model on one sample, so that it forgets the shape of the last batch, and return whether it runs."""
    # some compare a batch with the shape of the last one (anchors of detectors), which fixes a trace to that batch;
    # one sample does not, because torch.export takes a batch of any size to be of more
    batches = {id(one) for one, spec in zip(gather(example), interface.inputs, strict=True) if BATCH in spec.shape[:1]}
    single = map_tensors(example, lambda one: one[:1] if id(one) in batches else one)
    try:
        with torch.no_grad():
            call(model, single)
    except Exception:  # of the model's code
        return False
    return bool(batches)


def with_axes(interface: ModelInterface, options: ExportOptions) -> ModelInterface:
    """Return an interface with the axes of any size that the options name."""
    names = [spec.name for spec in interface.inputs]
    for name, axes in options.dynamic.items():
        if name not in names:
            raise UsageError(f"dynamic: expected the name of an input, got {name!r}; {nearest(name, names)}")
        rank = len(interface.inputs[names.index(name)].shape)
        for axis in axes:
            if not 0 <= axis < rank:
                raise UsageError(f"dynamic: {name} has {rank} axes, counted from 0, got axis {axis}")
    inputs = tuple(
        replace(
            spec,
            shape=tuple(options.dynamic.get(spec.name, {}).get(axis, size) for axis, size in enumerate(spec.shape)),
        )
        for spec in interface.inputs
    )
    return replace(interface, inputs=inputs)


def largest_sizes(source: ExportSource) -> dict[str, int]:
    """Return the largest size of each named axis that memory is planned for."""
    interface = with_axes(source.interface, source.options)
    found: dict[str, int] = {}
    for spec, tensor in zip(interface.inputs, gather(source.example), strict=True):
        for name, size in zip(spec.shape, tensor.shape, strict=True):
            if isinstance(name, str):
                found[name] = max(found.get(name, 0), SAMPLES if name == BATCH else LARGER * size, size)
    return found


def fitted(example: tuple[Any, ...], interface: ModelInterface) -> tuple[Any, ...]:
    """Return an example with as many samples as a fixed batch has, or at least two; samples are repeated if need be."""
    tensors = gather(example)
    if len(tensors) != len(interface.inputs):
        wanted = ", ".join(map(str, interface.inputs)) or "none"
        raise UsageError(f"example: expected the tensors {wanted}; got {len(tensors)} tensors")
    specs = iter(interface.inputs)

    def fit(tensor: Tensor) -> Tensor:
        spec = next(specs)
        samples = spec.shape[0] if tensor.dim() and spec.shape else None
        if samples == BATCH and tensor.shape[0] == 1:
            samples = 2  # torch.export would take a batch of one sample to be of one always
        if isinstance(samples, int) and samples != tensor.shape[0]:
            tensor = tensor[torch.arange(samples) % tensor.shape[0]]
        fits = tensor.dim() == len(spec.shape) and all(
            isinstance(size, str) or size == found for size, found in zip(spec.shape, tensor.shape, strict=True)
        )
        if not fits:
            raise UsageError(f"example: expected {spec}, got {tuple(tensor.shape)}")
        for axis, (size, found) in enumerate(zip(spec.shape, tensor.shape, strict=True)):
            if isinstance(size, str) and found < 2:
                raise UsageError(
                    f"example: {size} (axis {axis} of {spec.name}) is {found} in it; expected 2 or more, because a "
                    "trace of a size of one is not of any size"
                )
        return tensor.detach().clone()  # one tensor may be given for two arguments

    fitting: tuple[Any, ...] = map_tensors(example, fit)
    return fitting


def trace(
    model: nn.Module,
    example: tuple[Any, ...],
    axes: Sequence[Mapping[int, str]] = (),
    *,
    names: Sequence[str] | None = None,
    most: Mapping[str, int] | None = None,
) -> torch.export.ExportedProgram:
    """Trace a model by `torch.export`.

    With `names` of the output's tensors, the program has the arguments and the output of the model; else it takes and
    returns tuples of tensors.
    """
    named = sorted({name for one in axes for name in one.values()})
    try:
        return _traced(model, example, axes, names, most)
    except Exception as error:  # of the exporter, or of the model's code
        reraise_shortage(error)
        problem, fixed = failure(error, model), None
        with suppress(Exception):
            fixed = _traced(model, example, (), names) if named else None
        if fixed is not None:
            raise RunError(
                f"{type(model).__name__} cannot be exported with {' and '.join(named)} of any size: {problem}; export "
                f"it with a fixed {' and '.join(named)}, or take the size from the tensors' shapes there"
            ) from error
        raise RunError(
            f"{type(model).__name__} cannot be exported: {problem}; torch.export follows no code that depends on the "
            "values of tensors: make that line independent of them, or leave it out of forward"
        ) from error


def _traced(
    model: nn.Module,
    example: tuple[Any, ...],
    axes: Sequence[Mapping[int, str]],
    names: Sequence[str] | None = None,
    most: Mapping[str, int] | None = None,
) -> torch.export.ExportedProgram:
    example = map_tensors(example, torch.clone)  # torch.export marks tensors with what it found, one trace for the next
    tensors = gather(example)
    shapes = torch.export.ShapesCollection()  # type: ignore[no-untyped-call]
    hint = torch.export.Dim.AUTO
    for tensor, called in zip(tensors, axes or [{}] * len(tensors), strict=True):
        if called:
            shapes[tensor] = {axis: hint(max=most[name]) if most else hint for axis, name in called.items()}
    positional, named = split(example) if names is not None else (tuple(tensors), {})
    given = positional, dict(named)  # a plain one, for torch.export
    with tracing(), forward_of_tensors(model, example, names):
        wanted = shapes.dynamic_shapes(model, *given) if any(axes) else None  # type: ignore[no-untyped-call]
        try:
            return torch.export.export(model, *given, dynamic_shapes=wanted, strict=False)
        except Exception as error:
            try:  # its other way of following Python, by bytecode
                return torch.export.export(model, *given, dynamic_shapes=wanted, strict=True)
            except Exception:
                raise error from error.__cause__


@contextmanager
def tracing() -> Iterator[None]:
    """Let exporters run without gradients, warnings of their own and messages in the log."""
    before = logging.root.manager.disable
    try:
        logging.disable(logging.CRITICAL)
        with warnings.catch_warnings(), redirect_stderr(StringIO()):  # where torch.export prints half of a graph
            warnings.simplefilter("ignore")
            with torch.inference_mode(False), torch.no_grad():  # tracing needs version counters
                yield
    finally:
        logging.disable(before)


def forward_of_tensors(
    model: nn.Module, example: tuple[Any, ...], names: Sequence[str] | None = None
) -> AbstractContextManager[None]:
    """Let a model take an example's tensors one by one and return a tuple, or return one of Python's own classes."""
    forward = model.forward

    def flat(*tensors: Tensor) -> tuple[Tensor, ...]:
        each = iter(tensors)
        output = call(forward, map_tensors(example, lambda _: next(each)))
        return tuple(gather(output))

    @functools.wraps(forward)
    def plain(*args: Any, **kwargs: Any) -> Any:
        output = forward(*args, **kwargs)  # a process that runs the program may not know its class
        return output if _is_plain(output) else dict(zip(names or (), gather(output), strict=True))

    return forward_replaced(model, flat if names is None else plain)


def _is_plain(value: Any) -> bool:
    """Return whether an output is tensors in containers of Python's own classes, and nothing else."""
    if type(value) in (dict, OrderedDict):
        return all(map(_is_plain, value.values()))
    if type(value) in (tuple, list):
        return all(map(_is_plain, value))
    return isinstance(value, Tensor)


def _values(exported: torch.export.ExportedProgram, kind: str) -> list[Any]:
    """Return what stands for the user's inputs or the outputs of a program: tensors, and constants as they are."""
    nodes = {node.name: node for node in exported.graph.nodes}
    signature = exported.graph_signature
    names = signature.user_inputs if kind == "input" else signature.user_outputs
    return [nodes[name].meta["val"] if isinstance(name, str) and name in nodes else name for name in names]


def _symbols_of(
    exported: torch.export.ExportedProgram, source: ExportSource, example: tuple[Any, ...]
) -> tuple[dict[str, str], list[str]]:
    """Return the names of axes by torch's symbols, and notes; raise if the model's code fixes one."""
    called = type(source.model).__name__
    symbols: dict[str, str] = {}
    notes: list[str] = []
    values = [value for value in _values(exported, "input") if isinstance(value, Tensor)]
    for spec, value in zip(source.interface.inputs, values, strict=True):
        for axis, name in enumerate(spec.shape):
            if isinstance(name, int):
                continue
            size = value.shape[axis]
            expression = str(size if isinstance(size, int) else size.node.expr)
            if not expression.isidentifier():  # a number, or a multiple of another symbol
                place = _place_of_fixing(source, example, spec, axis)
                raise RunError(
                    f"{called}: the {name} (axis {axis} of {spec.name}) cannot be of any size, because the model's "
                    f"code fixes it to {expression}{f' at {place}' if place else ''}; export it with a fixed {name}, "
                    "or take the size from the tensor's shape there"
                )
            if symbols.setdefault(expression, name) != name:
                notes.append(f"{name} must be the same as {symbols[expression]}: the model's code makes them equal")
    notes += _conditions(exported, symbols, called)
    return symbols, list(dict.fromkeys(notes))


def _shape_env(exported: torch.export.ExportedProgram) -> Any:
    """Return what torch knows about the symbols of a program; None if all its sizes are fixed."""
    for node in exported.graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, Tensor) and getattr(value, "fake_mode", None) is not None:
            return value.fake_mode.shape_env  # type: ignore[attr-defined]
    return None


def _place_of_fixing(source: ExportSource, example: tuple[Any, ...], spec: TensorSpec, axis: int) -> str:
    """Return the place of the line that fixes the size of an axis, from another trace; empty if torch does not tell."""
    axes = [{axis: str(one.shape[axis])} if one.name == spec.name else {} for one in source.interface.inputs]
    places: list[str] = []
    replace_symbol = ShapeEnv._set_replacement

    def recorded(env: ShapeEnv, symbol: Any, target: Any, *others: Any) -> None:
        if target.is_Integer and (place := place_of_caller(source.model)):
            places.append(place)
        replace_symbol(env, symbol, target, *others)

    with patch.object(ShapeEnv, "_set_replacement", recorded), suppress(Exception):
        _traced(source.model, example, axes)
    return next(iter(places), "")


def _conditions(exported: torch.export.ExportedProgram, symbols: Mapping[str, str], called: str) -> list[str]:
    """Return notes on conditions that the model's code has on sizes; raise if one is on the batch."""
    env, notes = _shape_env(exported), []  # a program takes the example's branch for every input
    for guard in getattr(env, "guards", ()):
        place = getattr(guard.sloc, "framework_loc", None)
        if is_of_torch(getattr(place, "filename", LIBRARY)) and not isinstance(guard.expr, sympy.Eq):
            continue  # what torch asks about layouts in memory
        condition = env.replace(guard.expr)
        free = {symbol for symbol in condition.free_symbols if str(symbol) in symbols}
        names = sorted({symbols[str(symbol)] for symbol in free})
        if len(names) != 1 or len(free) != len(condition.free_symbols):
            continue
        wrong = [size for size in PROBES if not condition.subs(dict.fromkeys(free, size))]
        if not wrong:
            continue
        shown = f"{_renamed(str(condition), symbols)} at {place_of_line(guard.sloc)}"
        if names == [BATCH]:
            raise RunError(
                f"{called}: the batch cannot be of any size, because the model's code depends on it: {shown}; export "
                "it with a fixed batch, or make that line independent of the number of samples"
            )
        notes.append(
            f"holds where {shown}; for other sizes the model's code takes another way, which is not in the file"
        )
    return notes


def _renamed(expression: str, symbols: Mapping[str, str]) -> str:
    return re.sub(r"[a-zA-Z_]\w*", lambda found: symbols.get(found[0], found[0]), expression)
