"""Intervening: other values in the place of what chosen layers read or make, or of gradients on their way."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from prunekit.errors import ModelError, UsageError
from prunekit.inspection.capture.layer_hooks import LayerHooks, What, Where
from prunekit.inspection.capture.layer_selection import Layers

Change = float | Tensor | Callable[[Tensor], Tensor | None]
"""A number that scales, a tensor that takes the place of another and may broadcast to it, or a function of it, which
may return None to leave it."""


class Intervention(LayerHooks):
    """Changes in force; see `intervene`."""

    purpose = "intervene"

    def __init__(
        self, model: nn.Module, layers: Layers, changes: dict[What, Change], *, position: int | None, every: int
    ) -> None:
        if not changes:
            raise UsageError("intervene: expected a change of input, output, grad_input or grad_output, got none")
        for what, change in changes.items():
            if not (isinstance(change, int | float | Tensor) or callable(change)):
                got = type(change).__name__
                raise UsageError(f"intervene: {what}: expected a number, a tensor or a function of one, got {got}")
        super().__init__(model, layers, tuple(changes), every)
        self._changes, self._position = changes, position
        self.count = 0
        """How many tensors were changed."""

    def seen(self, where: Where, values: Tensor, axis: int) -> Tensor | None:
        """Return what takes the place of a tensor."""
        if self._position not in (None, where.position) or not (values.is_floating_point() or values.is_complex()):
            return None
        with torch._C.DisableTorchFunction():
            changed = _changed(self._changes[where.what], values)
        if changed is None:
            return None
        try:
            changed = changed.to(values).expand_as(values)
        except RuntimeError as error:
            expected, got = (" x ".join(map(str, tensor.shape)) for tensor in (values, changed))
            raise ModelError(
                f"intervene: {where} is {expected}; expected that, or what broadcasts to it, got {got}"
            ) from error
        self.count += 1
        return changed


def _changed(change: Change, values: Tensor) -> Tensor | None:
    if isinstance(change, Tensor):
        return change
    if isinstance(change, int | float):
        return values * change
    made = change(values)
    if made is not None and not isinstance(made, Tensor):
        raise ModelError(f"intervene: expected the function to return a tensor or None, got {type(made).__name__}")
    return made


def intervene(
    model: nn.Module,
    layers: Layers,
    *,
    input: Change | None = None,
    output: Change | None = None,
    grad_input: Change | None = None,
    grad_output: Change | None = None,
    position: int | None = None,
    every: int = 1,
) -> Intervention:
    """Put other values in the place of what layers read and make, for as long as the `with` lasts.

    Gradients flow through changes of inputs and outputs, as autograd has it. A changed `grad_output` is what the layer
    itself goes backward from, also for its parameters; a changed `grad_input` is what it sends back.

    Args:
        model, layers, every: as for `capture`.
        input, output, grad_input, grad_output: what becomes of them, see `Change`; of the floating-point tensors alone.
            A function must not change its argument in place.
        position: of the one that is meant among those of a nested value, see `Where`; None: all.

    Raises:
        UsageError: as for `capture`, or nothing is changed.
        ModelError: in a forward or backward pass: a value is of a shape that does not broadcast to the one it replaces.

    Example:
        >>> import prunekit as pk, torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))
        >>> images, labels = torch.randn(64, 4), torch.randint(2, (64,))
        >>> def loss():
        ...     return torch.nn.functional.cross_entropy(model(images), labels).item()
        >>> whole = loss()
        >>> with pk.intervene(model, "1", output=0.0):  # what is the ReLU worth?
        ...     without = loss()
        >>> without == whole, loss() == whole
        (False, True)
    """
    given: dict[What, Change | None] = {
        "input": input, "output": output, "grad_input": grad_input, "grad_output": grad_output
    }  # fmt: skip
    changes = {what: change for what, change in given.items() if change is not None}
    return Intervention(model, layers, changes, position=position, every=every)
