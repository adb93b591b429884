"""Too little memory: errors that name the batch that does not fit, and activations that are computed again instead."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from prunekit.distributed.process_group import size
from prunekit.errors import MemoryShortageError, UsageError, is_shortage
from prunekit.training.run_state import Position


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
            f"{'x'.join(map(str, shape))}{each} does not fit ({said}); `prunekit finetune RECIPE --find-batch-size` "
            "names the largest data.batch that does; `accumulate: 2` with half of data.batch makes the same steps in "
            "less memory, and so does `gradient_checkpointing: true` where the model offers it"
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
            if _is_on(module):
                continue
            try:
                switch(module, True)
            except ValueError as error:
                name = type(module).__name__
                raise UsageError(f"gradient_checkpointing: {name} does not support it: {error}") from error
            stack.callback(switch, module, False)
        yield


def _is_on(module: nn.Module) -> bool:
    known = next((name for name in IS_ON if hasattr(type(module), name) or name in vars(module)), None)
    return known is not None and bool(getattr(module, known))


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
