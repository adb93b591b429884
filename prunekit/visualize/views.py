"""How the output of a layer is shown: as maps, as bars, or with its tokens back in their places."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from prunekit.errors import UsageError
from prunekit.visualize.spatial import layout_of

View = Literal["maps", "tokens", "bars"]
NAMES = {"maps": "maps", "tokens": "tokens in their places", "bars": "bars"}


@dataclass(frozen=True, eq=False)
class Shown:
    """The output of a layer for one image.

    Attributes:
        view: how it is shown.
        values: (C, h, w); (C, 1, 1) as bars.
        what: what the output is, in words.
    """

    view: View
    values: Tensor
    what: str


def shown(values: Tensor, image: Sequence[int], layer: str, view: View | None = None) -> Shown:
    """The view that fits an output, or the one that is asked for.

    Args:
        values: the output of a layer for one image.
        image: (1, C, H, W) of the model's input.
        layer: its path, for messages.
        view: None: the one that fits.

    Raises:
        UsageError: the output is none that can be shown, or not in this view; says what it is, and which view fits.
    """
    found = _fitting(values, image)
    if found is None:
        sizes = " x ".join(map(str, values.shape)) or "a single number"
        raise UsageError(
            f"{layer}: its output, {sizes}, is neither maps of an image, nor tokens that fill one, nor a vector: no "
            "view fits; choose the module around it, or one before or after it"
        )
    if view in (None, found.view):
        return found
    raise UsageError(
        f"{layer}: its output is {found.what}, which cannot be shown as {NAMES[str(view)]}; the view that fits is "
        f"{found.view}"
    )


def _fitting(values: Tensor, image: Sequence[int]) -> Shown | None:
    values = values.float() if not values.is_complex() else values.abs()
    layout = layout_of(values.shape, image)
    if layout is not None:
        maps = layout.maps(values)[0]
        if layout.order != "tokens":
            return Shown("maps", maps, f"{_count(len(maps), 'map')} of {_sizes(maps)}")
        more = f" and {layout.prefix} more" if layout.prefix else ""
        return Shown("tokens", maps, f"{values.shape[1]} tokens of {len(maps)} channels ({_sizes(maps)}{more})")
    one = values[0] if values.dim() and values.shape[0] == 1 else values
    if one.dim() >= 1 and one.shape[0] > 0 and math.prod(one.shape[1:]) == 1:
        return Shown("bars", one.reshape(-1, 1, 1), f"a vector of {_count(len(one), 'value')}")
    return None


def _sizes(maps: Tensor) -> str:
    return f"{maps.shape[1]} x {maps.shape[2]}"


def _count(count: int, name: str) -> str:
    return f"{count} {name}{'s'[: count != 1]}"


def in_dense_places(values: Tensor, kept: Tensor) -> Tensor:
    """Channels of a pruned model (K, h, w) where the dense one has them: (C, h, w), NaN where they are gone.

    Args:
        kept: bool (C,), with K True.
    """
    placed = torch.full((len(kept), *values.shape[1:]), math.nan, dtype=values.dtype)
    placed[kept] = values
    return placed
