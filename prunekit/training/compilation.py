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

from prunekit.training.history import Compilation

Forward = Callable[..., Any]
Backend = str | Callable[..., Any]
SEVERAL = "several processes train together, and their replicas are not compiled"
_TORCH = os.path.join(os.path.dirname(torch.__file__), "")


class CompiledForward:
    """Calls a model for a training step, with its forward and backward passes compiled as one graph each.

    Hooks on the model itself run around the graph, in Python; hooks on its modules become part of it. They are among
    what the graph is guarded by, which `torch.compile` leaves out otherwise: where one comes or goes, the next step is
    compiled anew. What cannot be compiled as a whole, a hook for one, makes this and all later steps run in eager, with
    the reason: nothing is left out, and nothing is compiled in pieces. Calls in eval mode and without gradients are
    eager.

    Args:
        model: called in its place; enter masks and other hooks before the first call, or it is compiled twice.
        backend: as for `torch.compile`.
    """

    def __init__(self, model: nn.Module, backend: Backend = "inductor") -> None:
        self._model, self._backend = model, backend
        self._graphs, self._seconds = 0, 0.0
        self._reason: str | None = None
        self._missed = False
        self._forward: Forward = model.forward
        self._compiled = torch.compile(_of_its_own(self._forward), backend=self._compile, fullgraph=True)

    @property
    def compilation(self) -> Compilation:
        """What came of it so far."""
        return Compilation(self._graphs, self._seconds, self._reason)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """Return the model's result."""
        model = self._model
        if self._reason is None and nn_module._has_any_global_hook():  # type: ignore[no-untyped-call]
            self._reason = "hooks on all modules (register_module_forward_hook and its like) are left out of graphs"
        if self._reason is not None or not (model.training and torch.is_grad_enabled()):
            return model(*arguments, **named)
        with _forward_of(model, self._step):
            return model(*arguments, **named)

    def _step(self, *arguments: Any, **named: Any) -> Any:
        if self._reason is None:
            graphs, start = self._graphs, time.perf_counter()
            try:
                return self._through_graph(arguments, named)
            except Exception as error:  # whatever a compiler does not like; what is wrong in eager too is raised there
                self._reason = _said_by(error)
            finally:
                if self._graphs > graphs or self._reason is not None:
                    self._seconds += time.perf_counter() - start
        return self._forward(*arguments, **named)

    def _through_graph(self, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        # Configured for guards on hooks only where there is something to be compiled: to change torch's configuration
        # takes a millisecond of every call.
        self._missed = False
        if self._graphs:
            try:
                return self._compiled(*arguments, **named)
            except Exception:
                if not self._missed:
                    raise
        with (
            torch._dynamo.config.patch(skip_nnmodule_hook_guards=False),
            torch._functorch.config.patch(force_non_lazy_backward_lowering=True),
        ):
            return self._compiled(*arguments, **named)

    def _compile(self, graph: torch.fx.GraphModule, examples: list[Any]) -> Forward:
        if torch._dynamo.config.skip_nnmodule_hook_guards:
            self._missed = True
            raise RuntimeError("no graph that was compiled is of these hooks, shapes and modes")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of torch to itself
            backend = self._backend if callable(self._backend) else torch._dynamo.lookup_backend(self._backend)
            compiled: Forward = backend(graph, examples)
        self._graphs += 1
        return compiled


def _of_its_own(forward: Forward) -> Forward:
    """Return a function with code of its own, because `torch.compile` finds what it has compiled by code.

    What was compiled of another model of the class, or of this one before it was hooked, is not used here.
    """

    def step(*arguments: Any, **named: Any) -> Any:
        return forward(*arguments, **named)

    return FunctionType(step.__code__.replace(), step.__globals__, step.__name__, None, step.__closure__)


@contextmanager
def _forward_of(model: nn.Module, forward: Forward) -> Iterator[None]:
    """Has a model call something in the place of its forward; its hooks stay around that."""
    own = vars(model)
    before = {name: own[name] for name in ("forward",) if name in own}
    own["forward"] = forward
    try:
        yield
    finally:
        del own["forward"]
        own.update(before)


def _said_by(error: Exception) -> str:
    """Return what a compiler says in a line: ours, or its own with the last place that it speaks of outside of
    torch.
    """
    error = getattr(error, "inner_exception", error)  # what a backend raised
    text = str(error)
    if (ours := re.search(r"User-inserted graph break\. Message: (.+)", text)) is not None:
        return ours[1]
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    explained = [line.removeprefix("Explanation: ") for line in lines if line.startswith("Explanation: ")]
    places = [line for line in lines if line.startswith("File ") and f'"{_TORCH}' not in line]
    said = ": ".join([type(error).__name__, *lines[:1], *explained[:1]])
    return f"{said} ({places[-1]})" if places else said
