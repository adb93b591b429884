"""Execution of training steps: mixed precision, `torch.compile`, activations computed again, and too little memory."""

import os
import re
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as nn_module
from torch.nn.modules.conv import _ConvNd

from prunekit.distributed.process_group import size
from prunekit.errors import MemoryShortageError, UsageError, is_shortage
from prunekit.hooks.hook import not_traced
from prunekit.hooks.owner import HookOwner
from prunekit.known_names import FloatName
from prunekit.training.callbacks.callback import Compilation
from prunekit.training.run_state import Position
from prunekit.utils.context import forward_replaced
from prunekit.utils.private_torch import backward_compiled_at_once
from prunekit.utils.tensors import map_tensors

HALF: dict[FloatName, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16}


def autocast(precision: FloatName, device: torch.device) -> AbstractContextManager[None]:
    """Run what PyTorch deems safe in half precision; nothing for `fp32`."""
    return torch.autocast(device.type, dtype=HALF.get(precision), enabled=precision in HALF)


def loss_scaler(precision: FloatName, device: torch.device) -> torch.amp.GradScaler | None:
    """Return what keeps small gradients from vanishing in float16, and skips steps whose gradients overflow."""
    return torch.amp.GradScaler(device.type) if precision == "fp16" else None


class LongStrides(HookOwner):
    """A context manager that runs convolutions whose stride is longer than their input without autocast.

    The last 3x3 convolution of stride 2 in a network on small images may read a single pixel. Under bfloat16 on the CPU
    its weight gradient holds what was in memory at the taps that only see padding, in most calls (torch 2.14.1 with
    AVX-512 BF16: `aten.convolution_backward` on inputs 1x1 with stride 2, 2x2 with stride 4; all others tried, and
    float16, are right). Such layers are small, so that float32 costs nothing.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._model = model
        self._open: list[AbstractContextManager[Any]] = []

    def register(self) -> None:
        """Register hooks on every convolution that has a stride."""
        for module in self._model.modules():
            if isinstance(module, _ConvNd) and max(module.stride) > 1:
                self.own_forward_pre(module, self._before)
                self.own_forward(module, self._after, always=True)

    def remove(self) -> None:
        """Remove the hooks, and leave what a pass that was interrupted has entered."""
        super().remove()
        while self._open:
            self._open.pop().__exit__(None, None, None)

    def _before(self, module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, Any] | None:
        assert isinstance(module, _ConvNd)
        values: Tensor = arguments[0] if arguments else named["input"]
        sizes = values.shape[-len(module.stride) :]
        long = any(size < stride for size, stride in zip(sizes, module.stride, strict=True))
        if long:
            not_traced(f"LongStrides: a convolution of stride {module.stride} on input {tuple(sizes)} runs in float32")
        context = torch.autocast(values.device.type, enabled=False) if long else nullcontext()
        context.__enter__()
        self._open.append(context)
        return map_tensors((arguments, named), lambda tensor: tensor.to(module.weight.dtype)) if long else None

    def _after(self, *_: Any) -> None:
        if self._open:  # the owner may have been entered while the module ran
            self._open.pop().__exit__(None, None, None)


Forward = Callable[..., Any]
Backend = str | Callable[..., Any]
SEVERAL = "several processes train together, and their replicas are not compiled"
_TORCH = os.path.join(os.path.dirname(torch.__file__), "")


class CompiledForward:
    """A model's forward for training steps, with forward and backward pass compiled as one graph each.

    Hooks on the model itself run around the graph, in Python; hooks on its modules become part of it. The graph is
    guarded by these hooks too, which `torch.compile` does not do by default: if one is added or removed, the next step
    is compiled again. If the model cannot be compiled as a whole, because of a hook for example, this and all later
    steps run in eager, and the reason is kept: nothing is left out or compiled in pieces. Calls in eval mode and
    without gradients are eager. Enter masks and other hooks before the first call, or the model is compiled twice.
    """

    def __init__(self, model: nn.Module, backend: Backend = "inductor") -> None:
        self._model, self._backend = model, backend
        self._graphs, self._seconds = 0, 0.0
        self._reason: str | None = None
        self._missed = False
        self._forward: Forward = model.forward
        self._compiled = torch.compile(_own_code(self._forward), backend=self._compile, fullgraph=True)

    @property
    def compilation(self) -> Compilation:
        """Result of compiling so far."""
        return Compilation(self._graphs, self._seconds, self._reason)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """Return the model's result."""
        model = self._model
        if self._reason is None and nn_module._has_any_global_hook():  # type: ignore[no-untyped-call]
            self._reason = "hooks on all modules (register_module_forward_hook and its like) are left out of graphs"
        if self._reason is not None or not (model.training and torch.is_grad_enabled()):
            return model(*arguments, **named)
        with forward_replaced(model, self._step):
            return model(*arguments, **named)

    def _step(self, *arguments: Any, **named: Any) -> Any:
        if self._reason is None:
            graphs, start = self._graphs, time.perf_counter()
            try:
                return self._through_graph(arguments, named)
            except Exception as error:  # whatever a compiler does not like; what is wrong in eager too is raised there
                self._reason = _error_line(error)
            finally:
                if self._graphs > graphs or self._reason is not None:
                    self._seconds += time.perf_counter() - start
        return self._forward(*arguments, **named)

    def _through_graph(self, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        # Guards on hooks are configured only for compiling, because changing torch's configuration takes a millisecond.
        self._missed = False
        if self._graphs:
            try:
                return self._compiled(*arguments, **named)
            except Exception:
                if not self._missed:
                    raise
        with torch._dynamo.config.patch(skip_nnmodule_hook_guards=False), backward_compiled_at_once():
            return self._compiled(*arguments, **named)

    def _compile(self, graph: torch.fx.GraphModule, examples: list[Any]) -> Forward:
        if torch._dynamo.config.skip_nnmodule_hook_guards:
            self._missed = True
            raise RuntimeError("no graph was compiled for these hooks, shapes and modes")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of torch to itself
            backend = self._backend if callable(self._backend) else torch._dynamo.lookup_backend(self._backend)
            compiled: Forward = backend(graph, examples)
        self._graphs += 1
        return compiled


def _own_code(forward: Forward) -> Forward:
    """Return a function with a code object of its own, by which `torch.compile` finds its graphs."""

    def step(*arguments: Any, **named: Any) -> Any:
        return forward(*arguments, **named)

    # so that graphs of other models of the class, or of this one before it was hooked, are not used
    return FunctionType(step.__code__.replace(), step.__globals__, step.__name__, None, step.__closure__)


def _error_line(error: Exception) -> str:
    """Return a compiler's error in a line: our own message, or torch's with the last place outside of torch."""
    error = getattr(error, "inner_exception", error)  # what a backend raised
    text = str(error)
    if (ours := re.search(r"User-inserted graph break\. Message: (.+)", text)) is not None:
        return ours[1]
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    explained = [line.removeprefix("Explanation: ") for line in lines if line.startswith("Explanation: ")]
    places = [line for line in lines if line.startswith("File ") and f'"{_TORCH}' not in line]
    said = ": ".join([type(error).__name__, *lines[:1], *explained[:1]])
    return f"{said} ({places[-1]})" if places else said


@contextmanager
def naming_batch(batch: int, shape: Sequence[int], device: torch.device, at: Position) -> Iterator[None]:
    """Add to errors for want of memory how large the batch was, and what helps."""
    try:
        yield
    except Exception as error:
        if not is_shortage(error):
            raise
        each = "" if size() == 1 else f", {-(-batch // size())} of them in each of {size()} processes"
        said = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no more is said'}"
        raise MemoryShortageError(
            f"out of memory on {device} in epoch {at.epoch}, step {at.trained or 1}: a batch of {batch} images of "
            f"{'x'.join(map(str, shape))}{each} does not fit ({said}); `accumulate: 2` with half of data.batch "
            "makes the same steps in less memory, and so does `gradient_checkpointing: true` where the model offers it"
        ) from error


Switch = Callable[[Any, bool], Any]


def _switch_library(module: Any, on: bool) -> None:
    """Switch a model of transformers, whose own switch leaves hooks at its embeddings behind."""
    word = "activation" if hasattr(module, "activation_checkpointing_enable") else "gradient"
    if on:
        getattr(module, f"{word}_checkpointing_enable")()
        return
    getattr(module, f"{word}_checkpointing_disable")()
    for hook in vars(module).pop("_require_grads_hooks", ()):
        hook.remove()


SWITCHES: dict[str, Switch] = {
    "activation_checkpointing_enable": _switch_library,
    "gradient_checkpointing_enable": _switch_library,
    "set_grad_checkpointing": lambda module, on: module.set_grad_checkpointing(on),
}
"""Method of a model -> how it switches gradient checkpointing: transformers since 5.24, transformers, timm."""
IS_ON = ("is_activation_checkpointing", "is_gradient_checkpointing", "grad_checkpointing")
"""Attributes of models that say whether it is on, of which the first that there is counts."""


@contextmanager
def gradient_checkpointing(model: nn.Module) -> Iterator[None]:
    """Compute activations inside a model's blocks again for the backward pass, in place of storing them.

    The switch is the model's own, or that of models inside it, see `SWITCHES` (Chen et al. 2016). Gradients are the
    same, dropout included. What was on before stays on.
    """
    with ExitStack() as stack:
        for module, switch in _switches(model):
            known = next((name for name in IS_ON if hasattr(type(module), name) or name in vars(module)), None)
            if known is not None and getattr(module, known):
                continue
            try:
                switch(module, True)
            except ValueError as error:
                name = type(module).__name__
                raise UsageError(f"gradient_checkpointing: {name} does not support it: {error}") from error
            stack.callback(switch, module, False)
        yield


def _switches(model: nn.Module) -> list[tuple[nn.Module, Switch]]:
    """Return the outermost modules that can compute activations again, each with its switch."""
    found: dict[str, tuple[nn.Module, Switch]] = {}
    for path, module in model.named_modules():
        switch = next((switch for name, switch in SWITCHES.items() if hasattr(module, name)), None)
        if switch is not None and not any(path.startswith(f"{outer}." if outer else "") for outer in found):
            found[path] = module, switch
    if not found:
        raise UsageError(
            f"gradient_checkpointing: expected a model with one of the methods {', '.join(SWITCHES)}, as those of "
            f"transformers and timm have, got {type(model).__name__}; leave it out, and give smaller batches and "
            "`accumulate`"
        )
    return [*found.values()]
