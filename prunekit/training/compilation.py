"""Training steps through `torch.compile`, or in eager with the reason why."""

from __future__ import annotations

import os
import re
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as nn_module

from prunekit.training.callbacks.history import Compilation
from prunekit.utils.private_torch import backward_compiled_at_once

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
    without gradients are eager.

    Args:
        model: enter masks and other hooks before the first call, or it is compiled twice.
        backend: as for `torch.compile`.
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
        with _forward_replaced(model, self._step):
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
        with (
            torch._dynamo.config.patch(skip_nnmodule_hook_guards=False),
            backward_compiled_at_once(),
        ):
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
    """Return a function with a code object of its own, by which `torch.compile` finds its graphs.

    Graphs of another model of the class, or of this one before it was hooked, are so not used.
    """

    def step(*arguments: Any, **named: Any) -> Any:
        return forward(*arguments, **named)

    return FunctionType(step.__code__.replace(), step.__globals__, step.__name__, None, step.__closure__)


@contextmanager
def _forward_replaced(model: nn.Module, forward: Forward) -> Iterator[None]:
    """Replace a model's forward for a while; its hooks still run around it."""
    own = vars(model)
    before = {name: own[name] for name in ("forward",) if name in own}
    try:
        own["forward"] = forward
        yield
    finally:
        own.pop("forward", None)
        own.update(before)


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
