"""Public calls: each runs in torch's usual modes, and one that fails leaves process and models as they were."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial, wraps
from typing import ParamSpec, TypeVar

import torch
from torch import nn

from prunekit.modes.process_state import GradientState, ModuleState, ProcessState, finished, interruption_in
from prunekit.modes.usual_modes import require_real_tensors, usual_modes
from prunekit.utils.tensors import leaves

P = ParamSpec("P")
R = TypeVar("R")

_INSIDE: ContextVar[bool] = ContextVar("prunekit public call", default=False)


def public_call(function: Callable[P, R]) -> Callable[P, R]:
    """Make a function one that users call: it computes the same in whatever modes of torch it is called.

    Where it raises, or is interrupted, the state of the process and of the modules among its arguments is what it was
    before. A public function that another one calls, or that code calls which it runs, is part of that one's call.
    """

    @wraps(function)
    def call(*args: P.args, **named: P.kwargs) -> R:
        if _INSIDE.get():
            return function(*args, **named)
        require_real_tensors(function.__qualname__)
        models = [value for value in leaves([*args, named]) if isinstance(value, nn.Module)]
        undo = [undo for model in models for undo in (ModuleState(model).restore, GradientState(model).restore)]
        handled = sys.exc_info()[1]
        try:
            with own_part():
                _INSIDE.set(True)
                return function(*args, **named)
        except BaseException as error:
            for one in undo:
                finished(one)
            interruption = interruption_in(error, handled)
            if interruption not in (None, error):
                raise KeyboardInterrupt(*interruption.args) from error
            raise
        finally:
            _INSIDE.set(False)

    return call


@contextmanager
def own_part() -> Iterator[None]:
    """Run our own part of what the caller's code runs, in torch's usual modes; on an error the process is as before."""
    if _INSIDE.get():
        yield
        return
    process = ProcessState()
    with torch.inference_mode(False):  # the state before it comes back last, whatever is closed in which order
        try:
            with usual_modes():
                yield
        except BaseException as error:
            finished(partial(process.restore, error))
            raise
