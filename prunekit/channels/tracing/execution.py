"""Execution of a forward pass in a trace or a trial: in which modes, and which module runs at each moment."""

import inspect
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from prunekit.channels.labels.branch import is_inside
from prunekit.channels.labels.code_places import ModuleCall
from prunekit.channels.labels.constraints import around
from prunekit.channels.labels.label_union import Labels, LabelUnion
from prunekit.hooks.model_copy import named_tensors, with_tensors
from prunekit.hooks.owner import HookOwner, after_forward, before_forward
from prunekit.utils.context import restored, same_draws, without_gradients
from prunekit.utils.inputs import call
from prunekit.utils.tensors import gather


class ModuleStack(HookOwner):
    """The stack of modules that are running, with callbacks for when one begins and ends.

    `on_enter` gets path, module, and a pair of its positional and named arguments, `on_exit` the result besides.
    `run_alternative` runs a module where another does (see `alternatives_of`), given the module, the arguments of the
    other, positional and named, and its result.
    """

    def __init__(
        self,
        model: nn.Module,
        on_enter: Callable[[str, nn.Module, Any], None] | None = None,
        on_exit: Callable[[str, nn.Module, Any, Any], None] | None = None,
        alternatives: Mapping[str, tuple[str, ...]] | None = None,
        run_alternative: Callable[[nn.Module, Any, Any, Any], None] = lambda module, args, named, _: module(
            *args, **named
        ),
    ) -> None:
        super().__init__()
        self.model, self.on_enter, self.on_exit = model, on_enter, on_exit
        self._alternatives, self._run_alternative = dict(alternatives or {}), run_alternative
        self._seen: set[tuple[str, ...]] = set()
        self.paths, self.current = [""], ""  # of the modules that run now, and of the innermost; empty for the root
        self.call: ModuleCall | None = None  # the call of the innermost; None in the top-level forward
        self._around: list[ModuleCall | None] = []  # the calls around it
        self.counts: dict[str, int] = {}  # how often each module was called, or a copy of it that took its hooks along
        self.ran: set[str] = set()  # paths of the modules that were called themselves
        self._path_of: dict[int, str] = {id(module): path for path, module in model.named_modules()}

    def path_of(self, module: Any) -> str:
        """Return the path of a module of the model; empty for anything else."""
        return self._path_of.get(id(module), "")

    def register(self) -> None:
        """Add a forward-pre and a forward hook to every module."""
        self.paths, self.current, self.call, self._around = [""], "", None, []
        for path, module in self.model.named_modules():
            self.own(before_forward(module, self._enter(path), with_kwargs=True))
            self.own(after_forward(module, self._leave(path), with_kwargs=True))

    def _enter(self, path: str) -> Callable[[nn.Module, Any, Any], None]:
        def hook(module: nn.Module, args: Any, named: Any) -> None:
            self.paths.append(path)
            self._around.append(self.call)
            self.counts[path] = self.counts.get(path, 0) + 1
            if id(module) in self._path_of:
                self.ran.add(path)
            self.current, self.call = path, _call(self.counts[path], sys._getframe(1)) if path else None
            if self.on_enter is not None:
                self.on_enter(path, module, (args, named))

        return hook

    def _leave(self, path: str) -> Callable[[nn.Module, Any, Any, Any], None]:
        def hook(module: nn.Module, args: Any, named: Any, output: Any) -> None:
            if self.on_exit is not None:
                self.on_exit(path, module, (args, named), output)
            self.paths.pop()
            self.current, self.call = self.paths[-1], self._around.pop()
            others = self._alternatives.get(path, ())
            if others not in self._seen:
                self._seen.add(others)
                for other in others:
                    self._run_alternative(self.model.get_submodule(other), args, named, output)

        return hook


def first_outputs(model: nn.Module, example: tuple[Any, ...]) -> dict[str, torch.Tensor]:
    """Return the first tensor that each module returns in its first call, by path, in the order of the run."""
    found: dict[str, torch.Tensor] = {}

    def keep(path: str, module: nn.Module, given: Any, result: Any) -> None:
        tensors = gather(result)
        if tensors and path not in found:
            found[path] = tensors[0].detach().clone()

    with ModuleStack(model, on_exit=keep):
        without_gradients(lambda: call(model, example))
    return found


def channel_axis(module: nn.Module, ndim: int) -> int:
    """Return the axis of an activation that holds a module's channels: the last one of linear layers, else axis 1."""
    last = (nn.Linear, nn.LayerNorm, nn.RMSNorm, nn.Embedding, nn.MultiheadAttention)
    return ndim - 1 if isinstance(module, last) or ndim < 2 else 1


def is_layer_of_torch(module: nn.Module) -> bool:
    """Return whether a module has no children and runs torch's own forward, whose train mode is known."""
    if next(module.children(), None) is not None or "forward" in vars(module):
        return False
    owner = next((cls for cls in type(module).__mro__ if "forward" in vars(cls)), nn.Module)
    return owner.__module__.partition(".")[0] == "torch"


@contextmanager
def mode_for_trace(model: nn.Module, training: bool) -> Iterator[None]:
    """Set train or eval mode on modules with Python of the model's own, and eval mode on torch's norms and dropout."""
    with restored(model.modules(), "training"):
        for module in model.modules():
            module.training = training and not is_layer_of_torch(module)
        yield


@dataclass
class ModeReads:
    """Modules of a model, torch's own layers aside, that read whether they are in train mode."""

    some: bool  # whether one did, or may have, as a scripted one may
    paths: set[str] = field(default_factory=set)  # of those that did


@contextmanager
def train_mode_watch(model: nn.Module) -> Iterator[ModeReads]:
    """Detect whether the forward pass of a model depends on the train mode of any module but torch's own layers.

    A module's own Python can only behave differently in train mode if it reads `self.training`. During the watch each
    such module has a subclass of its class, on which `training` is a property that takes note.
    """
    own = {one: path for path, one in model.named_modules() if not is_layer_of_torch(one)}
    classes = {one: type(one) for one in own if not isinstance(one, torch.jit.ScriptModule)}
    reads, twins = ModeReads(len(classes) < len(own)), dict[type, type]()

    def read(module: nn.Module) -> bool:
        reads.some = True
        reads.paths.add(own.get(module, ""))
        return bool(module.__dict__["training"])

    def write(module: nn.Module, value: bool) -> None:
        module.__dict__["training"] = value

    try:
        for module, cls in classes.items():
            names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__}
            try:
                if cls not in twins:
                    twins[cls] = type(cls.__name__, (cls,), {"training": property(read, write), **names})
                module.__class__ = twins[cls]
            except TypeError:  # instances of this class cannot change it
                reads.some = True
        yield reads
    finally:
        for module, cls in classes.items():
            module.__class__ = cls


@contextmanager
def plain_attention() -> Iterator[None]:
    """Turn off attention's fast path and fused kernels, which would hide its projections and scores from the trace."""
    with without_fast_path(), sdpa_kernel(SDPBackend.MATH):
        yield


@contextmanager
def without_fast_path() -> Iterator[None]:
    """Turn off attention's fast path, so that the operators run that it replaces, fused kernels among them."""
    before = torch.backends.mha.get_fastpath_enabled()
    try:
        torch.backends.mha.set_fastpath_enabled(False)
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


@contextmanager
def as_in_trace(model: nn.Module, training: bool) -> Iterator[None]:
    """Run a model as a trace does: in its modes, with plain attention, no gradients and draws that it makes again."""
    with mode_for_trace(model, training), torch.no_grad(), plain_attention(), same_draws(model):
        yield


@contextmanager
def plain_operators(model: nn.Module) -> Iterator[None]:
    """Turn off what `plain_attention` does, and oneDNN for a model with an LSTM, whose products and gates it hides."""
    backend: Any = torch.backends.mkldnn
    kept = {"deterministic": backend.deterministic, "allow_tf32": backend.allow_tf32}
    recurrent = any(isinstance(module, nn.LSTM) for module in model.modules())
    with plain_attention(), backend.flags(enabled=False, **kept) if recurrent else nullcontext():
        yield


_TORCH = f"{Path(torch.__file__).parent}/"
_AROUND_MODELS = tuple(
    f"{_TORCH}{part}" for part in ("utils", "_dynamo", "_ops.py", "_compile.py", "nn/modules/module.py")
)


def _call(number: int, frame: FrameType | None) -> ModuleCall | None:
    """Return the call of a module with the line, outside of torch's own code, that makes it."""
    while frame is not None and frame.f_code.co_filename.startswith(_TORCH):
        frame = frame.f_back
    return None if frame is None else ModuleCall(number, frame.f_code.co_filename, frame.f_lineno)


def has_fixed_code(model: nn.Module, path: str = "") -> bool:
    """Return whether torch made the code of a module, or of one around it, in which no sizes can be set."""
    modules = [model.get_submodule(one) for one in (*around(path), "")]
    return any(isinstance(module, (torch.jit.ScriptModule, torch.fx.GraphModule)) for module in modules)


FIXED_CODE = "the sizes in scripted, traced or exported code are fixed: prune the model before torch.jit or torch.fx"


def line_of(error: BaseException) -> str:
    """Return the innermost line of a model's own code that raised an error, else that of torch's modules."""
    frames = traceback.extract_tb((error.__cause__ or error).__traceback__)
    outside = [frame for frame in frames if not frame.filename.startswith(str(Path(__file__).parents[1]))]
    models = [frame for frame in outside if not frame.filename.startswith(_TORCH)]
    for frame in reversed(models or [frame for frame in outside if not frame.filename.startswith(_AROUND_MODELS)]):
        return f"{Path(frame.filename).name}:{frame.lineno}: {frame.line}"
    return ""


def hint_at_child(model: nn.Module) -> str:
    """Return advice to give the child that has all parameters of a model, for messages; empty without one."""
    own = {id(parameter) for parameter in model.parameters()}
    for name, child in model.named_children() if own else ():
        if own == {id(parameter) for parameter in child.parameters()}:
            return f"; its .{name} ({type(child).__name__}) has them all: give that"
    return ""


def innermost_module(error: BaseException) -> nn.Module | None:
    """Return the module in whose method an error was raised; None if it was in none."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return next((module for module in map(module_of, reversed(frames)) if module is not None), None)


def module_of(frame: FrameType) -> nn.Module | None:
    """Return the module that is the first argument of a running function, as `self` is; None if it is anything else."""
    first = frame.f_locals.get(frame.f_code.co_varnames[0]) if frame.f_code.co_argcount else None
    return first if isinstance(first, nn.Module) else None


ActivationKey = tuple[str, str, int]
"""A module path, "input" or "output", and which call of the module it is, from 0."""
Alternatives = Mapping[str, tuple[str, ...]]
"""Path of a module that runs -> paths of others that did not, which run after the first of those that have them."""


def alternatives_of(
    model: nn.Module, ran: set[str], activations: Mapping[ActivationKey, Labels], union: LabelUnion
) -> Alternatives:
    """Return the members of lists that did not run, for those that did and are built like them.

    Members such as experts that no token of the example takes run on what another one is given: so their channels are
    known, and both models compute with them in the trial. Several must have run, all from the same channels to the same
    channels: then so would the others.
    """
    found: dict[str, tuple[str, ...]] = {}
    for alike in _built_alike(model):
        taken = [path for path in alike if path in ran]
        others = tuple(path for path in alike if not any(is_inside(one, [path]) for one in ran))
        if others and len(taken) > 1 and _on_same_channels(taken, activations, union):
            found.update(dict.fromkeys(taken, others))
    return found


def _built_alike(model: nn.Module) -> Iterator[list[str]]:
    """Yield paths of the members of each list or dictionary of modules with one class and tensors of the same sizes."""
    for path, container in model.named_modules():
        if isinstance(container, (nn.ModuleList, nn.ModuleDict)):
            kinds: dict[object, list[str]] = {}
            for name, member in container.named_children():
                sizes = tuple((key, tuple(tensor.shape)) for key, tensor in named_tensors(member))
                kinds.setdefault((type(member), sizes), []).append(f"{path}.{name}" if path else name)
            yield from (paths for paths in kinds.values() if len(paths) > 1)


def _on_same_channels(paths: Iterable[str], activations: Mapping[ActivationKey, Labels], union: LabelUnion) -> bool:
    """Return whether modules have the same labels on their inputs, and the same on their outputs."""
    none = np.zeros(0, dtype=np.int64)
    sides = [[activations.get((path, side, 0), none) for path in paths] for side in ("input", "output")]
    return all(union.equal(labels[0], other) for labels in sides for other in labels[1:])


def fused_away(model: nn.Module) -> tuple[str, ...]:
    """Return the paths of the modules that `model.fuse()` removes from a copy without a replacement.

    A module whose class or children change was merged, not removed. There are none if the model has no such method, or
    it does not work on a copy.
    """
    fuse = getattr(model, "fuse", None)
    if not inspect.ismethod(fuse):
        return ()
    signature = inspect.signature(fuse)
    try:
        signature.bind()  # without arguments
        fused = with_tensors(model, {})
        fused.fuse(**({"verbose": False} if "verbose" in signature.parameters else {}))  # type: ignore[operator]
    except Exception:  # a method of that name that is something else, or not for copies
        return ()
    before, after = dict(model.named_modules()), dict(fused.named_modules())
    found = []
    for path, module in before.items():
        parent = path.rpartition(".")[0]
        outer, other = before[parent], after.get(parent)
        merged = other is None or type(other) is not type(outer) or set(other._modules) - set(outer._modules)
        if path and path not in after and not merged and any(True for _ in module.parameters()):
            found.append(path)
    return tuple(found)


PRUNE_FIRST = "prune the model before it is prepared for quantization or quantized: observers and scales know its sizes"
_QUANTIZING = (
    "torch.ao.quantization.observer", "torch.ao.quantization.fake_quantize", "torch.ao.nn.quantized",
    "torch.ao.nn.intrinsic.quantized", "torch.ao.nn.quantizable",
)  # fmt: skip
"""Modules of Python whose classes quantize; stubs and fused layers of floats are elsewhere."""
_OPERATORS = ("quantize", "_obs_fq_helper", "quantized.")
"""Parts of names of operators that quantize, and of those that run on quantized tensors."""


def quantized_parts(model: nn.Module) -> frozenset[str]:
    """Return the paths of modules that observe or quantize, by the classes of `torch.ao` that they are made from."""
    return frozenset(
        path
        for path, module in model.named_modules()
        if any(base.__module__.startswith(_QUANTIZING) for base in type(module).__mro__)
    )


def is_quantizing(operator: str, tensors: Iterable[torch.Tensor]) -> bool:
    """Return whether an operator quantizes, or runs on quantized tensors."""
    return any(part in operator for part in _OPERATORS) or any(tensor.is_quantized for tensor in tensors)
