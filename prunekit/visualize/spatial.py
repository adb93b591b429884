"""Which outputs of a layer are images, and which of their axes are the places in it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

from torch import Tensor

from prunekit.nested import gather

MOST_PREFIXES = 16
"""Tokens that stand for no place: a class token, one for distillation, registers (Darcet et al. 2024)."""


@dataclass(frozen=True)
class Layout:
    """How the output of a layer shows an image.

    Attributes:
        order: `channels_first` (B, C, h, w), `channels_last` (B, h, w, C), or `tokens` (B, prefix + h w, C).
        height, width: h and w.
        prefix: tokens before those of the image.
        fits: whether h and w are the image's over a stride; else they are only taken for such.
    """

    order: Literal["channels_first", "channels_last", "tokens"]
    height: int
    width: int
    prefix: int = 0
    fits: bool = True

    def maps(self, values: Tensor) -> Tensor:
        """An output in this layout, or its gradient, as (B, C, h, w)."""
        if self.order == "channels_first":
            return values
        if self.order == "tokens":
            values = values[:, self.prefix :].reshape(len(values), self.height, self.width, -1)
        return values.movedim(-1, 1)


def layout_of(shape: Sequence[int], image: Sequence[int]) -> Layout | None:
    """The layout of an output, as far as its shape tells: one row of it is one image, and h x w is the image's height
    and width over a stride.

    Four axes that fit no stride are taken as (B, C, h, w), as convolutions without padding give them.

    Args:
        shape: of the output.
        image: (B, C, H, W) of the model's input.

    Returns:
        None where the output has no places: a vector for each image, a single place, windows, a clip, or text.
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
    """The first tensor of what a module returned that is an image, with its layout."""
    for tensor in gather(result):
        if tensor.is_floating_point() and (layout := layout_of(tensor.shape, image)) is not None:
            return tensor, layout
    return None


@lru_cache(maxsize=8)
def _sizes(size: tuple[int, int]) -> frozenset[tuple[int, int]]:
    """Heights and widths that strides make of an image, patches at its edges dropped or padded; no single place."""
    found = {(size[0] // stride, size[1] // stride) for stride in range(1, max(size) + 1)}
    found |= {(math.ceil(size[0] / stride), math.ceil(size[1] / stride)) for stride in range(1, max(size) + 1)}
    return frozenset((height, width) for height, width in found if height * width > 1)


def _fits(shape: Sequence[int], size: tuple[int, int]) -> bool:
    return (shape[0], shape[1]) in _sizes(size)


def _grid(tokens: int, size: tuple[int, int]) -> tuple[int, int] | None:
    """The height and width of so many tokens, as few as may be left over."""
    found = [grid for grid in _sizes(size) if 0 <= tokens - grid[0] * grid[1] <= MOST_PREFIXES]
    # A handful of tokens would fit nearly any grid.
    found = [grid for grid in found if grid[0] * grid[1] > tokens - grid[0] * grid[1]]
    return max(found, key=lambda grid: (grid[0] * grid[1], -abs(grid[0] * size[1] - grid[1] * size[0])), default=None)


def why_not(layer: str, result: Any, image: Sequence[int]) -> str:
    """What a layer returned that is no image, and which view fits it."""
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


_BARS = "see them as bars: prunekit visualize features"
_ELSE = "name a layer before it, or see which pixels matter: prunekit visualize saliency"
