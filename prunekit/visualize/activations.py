"""What a layer returns as an image, copied at once, and the gradient of a score with respect to that."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from prunekit.context import is_reentrant, own_gradients
from prunekit.errors import ModelError, nearest
from prunekit.hooks import HookOwner, never_called, recomputing, refuse_compiled
from prunekit.hooks.gradients import at
from prunekit.hooks.reading import catch
from prunekit.visualize.spatial import Layout, spatial_output, why_not

HINT = "prunekit inspect shows the names of layers"


@dataclass(eq=False)
class Call:
    """One call of a layer whose output is an image.

    Attributes:
        layer: its path; of layers that hand the same tensor on, the outermost one's.
        output: what it returned, which may be overwritten later.
        values: a copy of that as it was, (B, C, h, w).
        stop: where a backward pass has seen the output's gradient; None where none comes here.
        gradient: like `values`; None until a backward pass has come here.
    """

    layer: str
    output: Tensor
    layout: Layout
    values: Tensor
    version: int
    stop: GradientEdge | None = None
    gradient: Tensor | None = None

    def note(self, gradient: Tensor, index: int) -> None:
        """Takes the gradient of the output."""
        self.gradient = self.layout.maps(gradient.detach().clone())


@dataclass(frozen=True)
class Read:
    """What the last linear layer of a forward pass was given, and returned."""

    linear: nn.Linear
    given: Tensor
    returned: Tensor


class SpatialActivations(HookOwner):
    """Keeps what a layer returned in the last of its calls, as an image, and the gradient that comes back.

    The copy is made before anything can overwrite the output, and the gradient is that of the values copied, also where
    a later operation works in place. Where no layer is named, all are candidates: of those that return channels with
    a height and width the last one, and what comes after it as tokens.

    Args:
        model: in the mode in which it is to run.
        layer: path of a module, or None.
        image: (B, C, H, W) of the input.

    Raises:
        ModelError: on enter, when the model has no such layer or is compiled; in the forward pass, when the layer named
            returns no image.
    """

    def __init__(self, model: nn.Module, layer: str | None, image: Sequence[int]) -> None:
        super().__init__()
        self._model, self._layer, self._image = model, layer, tuple(image)
        self.calls: list[Call] = []
        self.last_linear: Read | None = None

    def register(self) -> None:
        """Hooks the layer, or all of them, and linear layers."""
        refuse_compiled(self._model, type(self).__name__)
        modules = {path: module for path, module in self._model.named_modules() if path and not never_called(module)}
        if self._layer is not None and self._layer not in modules:
            raise ModelError(f"layer {self._layer!r}: {nearest(self._layer, modules)}; {HINT}")
        for path, module in modules.items():
            if self._layer is None:
                self.own_forward(module, partial(self._candidate, path), again=True)
            elif path == self._layer:
                self.own_forward(module, partial(self._named, path), again=True)
            if isinstance(module, nn.Linear):
                self.own_forward(module, self._linear, again=True)

    def _named(self, path: str, module: nn.Module, arguments: Any, named: Any, result: Any) -> None:
        if recomputing():
            return
        found = spatial_output(result, self._image)
        if found is None:
            raise ModelError(f"layer {why_not(path, result, self._image)}")
        self.calls = [self._call(path, *found)]

    def _candidate(self, path: str, module: nn.Module, arguments: Any, named: Any, result: Any) -> None:
        found = None if recomputing() else spatial_output(result, self._image)
        if found is None:
            return
        output, layout = found
        last = self.calls[-1] if self.calls else None
        if last is not None and last.output is output and last.version == output._version:
            last.layer = path
            return
        tokens = last is not None and last.layout.order == "tokens"
        if (tokens and not layout.fits) or (tokens and layout.order == "tokens" and isinstance(module, nn.Linear)):
            return  # heads of attention, or its projections of what the layer before returned
        if layout.order != "tokens":
            self.calls.clear()
        self.calls.append(self._call(path, output, layout))

    def _call(self, path: str, output: Tensor, layout: Layout) -> Call:
        call = Call(path, output, layout, layout.maps(output.detach().clone()), output._version)
        if output.grad_fn is not None:
            call.stop = _below(output)
            catch(output, at(self, call.note, 0))
        return call

    def _linear(self, module: nn.Module, arguments: Any, named: Any, result: Any) -> None:
        if isinstance(module, nn.Linear) and arguments:
            self.last_linear = Read(module, arguments[0].detach(), result.detach())

    def found(self) -> Call:
        """The last call.

        Raises:
            ModelError: the layer did not run, or there is none whose output is an image.
        """
        if self.calls:
            return self.calls[-1]
        if self._layer is None:
            raise ModelError(
                f"{type(self._model).__name__}: no layer returns an image for an input of {self._image}; see which "
                "pixels matter: prunekit visualize saliency"
            )
        raise ModelError(
            f"layer {self._layer!r} does not run in a forward pass of {type(self._model).__name__}; name the module "
            "that uses it"
        )

    def backward(self, score: Tensor) -> Call:
        """Sends the gradient of a score back to the calls; those of parameters stay as they are.

        Args:
            score: one number.

        Returns:
            The last call that it reaches, of tokens the last of whose patches any has a gradient.

        Raises:
            ModelError: there is none.
        """
        call = self.found()
        stops = [one.stop for one in self.calls if one.stop is not None]
        if stops and is_reentrant(score):
            with own_gradients(self._model.parameters()):
                score.backward()  # type: ignore[no-untyped-call]
        elif stops and score.requires_grad:
            torch.autograd.grad(score, stops, allow_unused=True)
        reached = [one for one in self.calls if one.gradient is not None]
        if not reached:
            raise ModelError(
                f"layer {call.layer!r}: the score does not depend on what it returns, or the model detaches that; name "
                "another layer, or use eigen_cam, which needs no gradient"
            )
        for one in reversed(reached):
            alone = one.layout.order != "tokens" and one is reached[-1]
            if alone or (one.gradient is not None and bool(one.gradient.any())):
                return one
        raise ModelError(
            f"layer {call.layer!r}: the gradient is zero at all of its patches, as it is where only the class token is "
            "read afterwards; name the norm before the last attention, or leave the layer out. Where it is zero "
            "everywhere the score does not depend on the image, as with a classifier of zeros that was not trained yet"
        )


def _below(output: Tensor) -> GradientEdge:
    """Just below the operation that made an output, or the tensor that it is a view of.

    A backward pass that is asked for the gradient there runs every hook on the output, and little more.
    """
    base = output._base
    node = output.grad_fn if base is None or base.grad_fn is None else base.grad_fn
    assert node is not None
    return next(GradientEdge(below, index) for below, index in node.next_functions if below is not None)
