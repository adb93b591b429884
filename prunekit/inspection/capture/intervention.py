"""Intervention: other values in place of what chosen layers read or return, or of their gradients."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from prunekit.errors import ModelError, UsageError, reraise_shortage
from prunekit.inspection.capture.layer_hooks import LayerHooks, Layers, TensorKey, What
from prunekit.utils.private_torch import without_torch_function

Change = float | Tensor | Callable[[Tensor], Tensor | None]
"""A number to scale a tensor by, a tensor that replaces it and may broadcast to it, or a function of it, which may
return None to leave it."""


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
    """Replace what layers read and return by other values, while the `with` lasts.

    Gradients flow through changes of inputs and outputs, as usual in autograd. A changed `grad_output` is where the
    backward pass of the layer begins, also for its parameters; a changed `grad_input` is what the layer returns there.
    Only floating-point tensors are changed.

    Args:
        model: see `capture`.
        layers: see `capture`.
        input: how inputs are changed, see `Change`; a function must not change its argument in place.
        output: how outputs are changed.
        grad_input: how gradients of inputs are changed.
        grad_output: how gradients of outputs are changed.
        position: number of the tensor to change in a nested value, see `TensorKey`; None: all.
        every: see `capture`.

    Raises:
        UsageError: as for `capture`, or no change is given.
        ModelError: in a forward or backward pass, a value does not broadcast to the tensor that it replaces.

    Example:
        >>> import prunekit as pk, torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))
        >>> images, labels = torch.randn(64, 4), torch.randint(2, (64,))
        >>> def loss():
        ...     return torch.nn.functional.cross_entropy(model(images), labels).item()
        >>> whole = loss()
        >>> with pk.intervene(model, "1", output=0.0):  # how much does the ReLU contribute?
        ...     without = loss()
        >>> without == whole, loss() == whole
        (False, True)
    """
    given: dict[What, Change | None] = {
        "input": input, "output": output, "grad_input": grad_input, "grad_output": grad_output
    }  # fmt: skip
    changes = {what: change for what, change in given.items() if change is not None}
    return Intervention(model, layers, changes, position=position, every=every)


class Intervention(LayerHooks):
    """The hooks that change tensors; see `intervene`."""

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
        self.count = 0  # tensors that were changed

    def on_tensor(self, key: TensorKey, values: Tensor, axis: int) -> Tensor | None:
        """Return the tensor that replaces one; None to leave it."""
        if self._position not in (None, key.position) or not (values.is_floating_point() or values.is_complex()):
            return None
        with without_torch_function():
            changed = _changed(self._changes[key.what], values)
        if changed is None:
            return None
        try:
            changed = changed.to(values).expand_as(values)
        except RuntimeError as error:
            reraise_shortage(error)
            expected, got = (" x ".join(map(str, tensor.shape)) for tensor in (values, changed))
            raise ModelError(
                f"intervene: {key} is {expected}; expected that, or what broadcasts to it, got {got}"
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
