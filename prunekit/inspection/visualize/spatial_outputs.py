"""Outputs of layers that are images: their layout, copies of them, and the gradient of a score for them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from prunekit.errors import ModelError, nearest
from prunekit.hooks.gradient_hooks import hook_gradient, tensor_hook
from prunekit.hooks.hook import never_called, recomputing, refuse_compiled
from prunekit.hooks.owner import HookOwner
from prunekit.utils.context import is_reentrant, own_gradients
from prunekit.utils.tensors import gather

MOST_PREFIXES = 16
"""Limit of tokens without a place: a class token, one for distillation, registers (Darcet et al. 2024)."""
HINT = "prunekit inspect shows the names of layers"
_BARS = "see them as bars: prunekit visualize features"
_ELSE = "name a layer before it, or see which pixels matter: prunekit visualize saliency"


@dataclass(frozen=True)
class Layout:
    """The layout of a layer's output that is an image."""

    # `channels_first` (B, C, h, w), `channels_last` (B, h, w, C), or `tokens` (B, prefix + h w, C)
    order: Literal["channels_first", "channels_last", "tokens"]
    # height, width: h and w
    height: int
    width: int
    prefix: int = 0  # tokens before those of the image
    fits: bool = True  # whether h and w are those of the image over a stride; else they are only assumed to be

    def maps(self, values: Tensor) -> Tensor:
        """Return an output in this layout, or its gradient, as (B, C, h, w)."""
        if self.order == "channels_first":
            return values
        if self.order == "tokens":
            values = values[:, self.prefix :].reshape(len(values), self.height, self.width, -1)
        return values.movedim(-1, 1)


def layout_of(shape: Sequence[int], image: Sequence[int]) -> Layout | None:
    """Return the layout of an output by its shape, for a model that reads an image (B, C, H, W).

    Its height and width are those of the image over a stride. Four axes that fit no stride are taken for (B, C, h, w),
    as convolutions without padding return them.
    """
    if shape[:1] != image[:1]:
        return None
    size = image[2], image[3]
    if len(shape) == 4:
        first, last = _fits(shape[2:], size), _fits(shape[1:3], size)
        if last and not first:
            return Layout("channels_last", shape[1], shape[2])
        return Layout("channels_first", shape[2], shape[3], fits=first) if shape[2] * shape[3] > 1 else None
    grid = _grid(shape[1], size) if len(shape) == 3 else None
    return None if grid is None else Layout("tokens", *grid, prefix=shape[1] - grid[0] * grid[1])


def spatial_output(result: Any, image: Sequence[int]) -> tuple[Tensor, Layout] | None:
    """Return the first tensor of a module's output that is an image, with its layout."""
    for tensor in gather(result):
        if tensor.is_floating_point() and (layout := layout_of(tensor.shape, image)) is not None:
            return tensor, layout
    return None


@lru_cache(maxsize=8)
def _sizes(size: tuple[int, int]) -> frozenset[tuple[int, int]]:
    """Return all heights and widths of an image over a stride, with patches at its edges dropped or padded."""
    found = {(size[0] // stride, size[1] // stride) for stride in range(1, max(size) + 1)}
    found |= {(math.ceil(size[0] / stride), math.ceil(size[1] / stride)) for stride in range(1, max(size) + 1)}
    return frozenset((height, width) for height, width in found if height * width > 1)


def _fits(shape: Sequence[int], size: tuple[int, int]) -> bool:
    return (shape[0], shape[1]) in _sizes(size)


def _grid(tokens: int, size: tuple[int, int]) -> tuple[int, int] | None:
    """Return the height and width that so many tokens have, with as few as possible left over."""
    found = [grid for grid in _sizes(size) if 0 <= tokens - grid[0] * grid[1] <= MOST_PREFIXES]
    # A handful of tokens would fit nearly any grid.
    found = [grid for grid in found if grid[0] * grid[1] > tokens - grid[0] * grid[1]]
    return max(found, key=lambda grid: (grid[0] * grid[1], -abs(grid[0] * size[1] - grid[1] * size[0])), default=None)


def why_not(layer: str, result: Any, image: Sequence[int]) -> str:
    """Return why a layer's output is no image, and which view fits it."""
    tensors = [tensor for tensor in gather(result) if tensor.is_floating_point()]
    if not tensors:
        return f"{layer} returns {type(result).__name__}, which holds no tensor of floating-point numbers; {_ELSE}"
    shape = tuple(tensors[0].shape)
    if shape[:1] != tuple(image[:1]):
        what = (
            f"whose first axis is not the batch of {image[0]}: windows of an image, or its batch on another axis; name "
            "the block around it"
        )
    elif len(shape) == 2:
        what = f"a vector of {shape[1]} values for each image, without places in it; {_BARS}, or {_ELSE}"
    elif math.prod(shape[2:]) == 1:
        what = f"{shape[1]} values at a single place, because all others are pooled already; {_BARS}, or {_ELSE}"
    elif len(shape) == 5:
        what = "a clip and no image; show its frames one by one to a model of images"
    else:
        what = f"in which no axes are the height and width of the image over a stride; {_ELSE}"
    return f"{layer} returns {shape}, {what}"


class SpatialActivations(HookOwner):
    """The output of a layer in its last call as an image, and its gradient.

    The copy is made before anything can overwrite the output, and the gradient is that of the values copied, also where
    a later operation works in place. If no layer is named, all are candidates: the last one that returns channels with
    a height and width, and those that return tokens after it; layers of fewer than `least` rows or columns count only
    where none before has as many.
    """

    def __init__(self, model: nn.Module, layer: str | None, image: Sequence[int], least: int = 1) -> None:
        super().__init__()
        self._model, self._layer, self._image, self._least = model, layer, tuple(image), least
        self.calls: list[SpatialCall] = []
        self._before: SpatialCall | None = None

    def register(self) -> None:
        """Register hooks on the layer, or on all of them."""
        refuse_compiled(self._model, type(self).__name__)
        modules = {path: module for path, module in self._model.named_modules() if path and not never_called(module)}
        if self._layer is not None and self._layer not in modules:
            raise ModelError(f"layer {self._layer!r}: {nearest(self._layer, modules)}; {HINT}")
        for path, module in modules.items():
            if self._layer is None:
                self.own_forward(module, partial(self._candidate, path))
            elif path == self._layer:
                self.own_forward(module, partial(self._named, path))

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
        if last is not None and self._fine(last.layout) and not self._fine(layout):
            return
        call = self._call(path, output, layout)
        if last is not None and last.values.shape[1] != call.values.shape[1]:
            self._before = last
        if layout.order != "tokens":
            self.calls.clear()
        self.calls.append(call)

    def _fine(self, layout: Layout) -> bool:
        """Return whether a layer has places enough; tokens all have the same."""
        return layout.order == "tokens" or min(layout.height, layout.width) >= self._least

    def step_back(self, classes: int) -> None:
        """Take the last call before the scores of pixels, (B, classes, h, w), if no layer is named."""
        if self._layer is None and self._before is not None and self.calls[-1].values.shape[1] == classes:
            self.calls = [self._before]

    def _call(self, path: str, output: Tensor, layout: Layout) -> SpatialCall:
        call = SpatialCall(path, output, layout, layout.maps(output.detach().clone()), output._version)
        if output.grad_fn is not None:
            call.stop = _below(output)
            hook_gradient(output, tensor_hook(self, call.note, 0))
        return call

    def found(self) -> SpatialCall:
        """Return the last call."""
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

    def backward(self, score: Tensor) -> SpatialCall:
        """Run the backward pass of a score to the calls, without changing gradients of parameters."""
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
                "another layer"
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
    """Return the edge just below the operation of an output: a backward pass to it runs all hooks, and little more."""
    base = output._base  # the tensor that it is a view of
    node = output.grad_fn if base is None or base.grad_fn is None else base.grad_fn
    assert node is not None
    return next(GradientEdge(below, index) for below, index in node.next_functions if below is not None)


@dataclass(eq=False)
class SpatialCall:
    """One call of a layer whose output is an image."""

    layer: str  # path of the layer; of several that pass on the same tensor, of the outermost one
    output: Tensor  # the output, which may be overwritten later
    layout: Layout
    values: Tensor  # a copy of the output, (B, C, h, w)
    version: int
    stop: GradientEdge | None = None  # the edge where the output's gradient is known; None if it has none
    gradient: Tensor | None = None  # the gradient, like `values`; None before the backward pass

    def note(self, gradient: Tensor, index: int) -> None:
        """Take the gradient of the output."""
        self.gradient = self.layout.maps(gradient.detach().clone())
