"""Filters of the first layer as images: what a network looks for in its input."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from prunekit.errors import UsageError, nearest
from prunekit.inspection.visualize.feature_maps import KeptChannels, aligned
from prunekit.inspection.visualize.image_grids import Pixels, headed, kept_of, page, spread, tiles


@dataclass(frozen=True, eq=False)
class LayerFilters:
    """The filters of one layer."""

    path: str  # path of the layer
    sides: Mapping[str, Tensor]  # name of a model -> weights (N, in, height, width), with NaN for pruned filters
    kept: NDArray[np.bool_] | None  # which filters are kept, (N,); None if unknown, or if nothing was pruned
    note: str = ""  # a remark for the reader


def first_filters(
    models: Mapping[str, nn.Module],
    image: tuple[int, ...],
    layer: str | None = None,
    *,
    kept: KeptChannels | None = None,
) -> LayerFilters:
    """Return the filters of the first layer, a convolution or a linear one, that reads an image of shape (C, H, W)."""
    first = next(iter(models.values()))
    modules = dict(first.named_modules())
    if layer is not None and layer not in modules:
        raise UsageError(f"layer {layer!r}: {nearest(layer, modules)}; prunekit inspect shows the names of layers")
    found = (path for path, module in modules.items() if _images(module, image) is not None)
    path = layer if layer is not None else next(found, None)
    if path is None or _images(modules[path], image) is None:
        what = "the model" if path is None else f"layer {path!r}, a {type(modules[path]).__name__},"
        raise UsageError(
            f"{what} has no filters that are images: expected a convolution in two dimensions, or a linear layer that "
            f"reads all pixels of {' x '.join(map(str, image))}; see what layers return: prunekit visualize features"
        )
    return LayerFilters(
        path, *aligned(_weights(models, path, image), None if kept is None else kept(path, 0), "filters")
    )


def _images(module: nn.Module, image: tuple[int, ...]) -> Tensor | None:
    """Return the filters (N, in, height, width) of a layer; None if it has none."""
    weight = getattr(module, "weight", None)
    if isinstance(module, nn.Conv2d) and isinstance(weight, Tensor):
        return weight.detach().float().cpu()
    if isinstance(module, nn.Linear) and len(image) == 3 and module.in_features == math.prod(image):
        return module.weight.detach().float().cpu().reshape(-1, *image)
    return None


def _weights(models: Mapping[str, nn.Module], path: str, image: tuple[int, ...]) -> dict[str, Tensor]:
    sides = {}
    for name, model in models.items():
        module = dict(model.named_modules()).get(path)  # the pruned model may have folded it
        found = None if module is None else _images(module, image)
        if found is not None:
            sides[name] = found
    return sides


def draw_filters(filters: LayerFilters, title: str = "", most: int | None = 256) -> Pixels:
    """Return the picture of a layer's filters, (H, W, 3): a panel for each model, numbered, pruned ones crossed out.

    All have one scale with zero as mid-gray, which ends at the 99.5th percentile of the absolute weights, as a few
    large ones would leave all others gray. Filters of more than 3 input channels are shown as the mean over these.
    """
    scale = _scale(torch.cat([values.flatten() for values in map(_colors, filters.sides.values())]).abs())
    panels = []
    for name, values in filters.sides.items():
        shown = (_colors(values) / max(scale, torch.finfo(torch.float32).tiny)).clamp(-1, 1)
        pixels = (127.5 + 127.5 * shown.nan_to_num()).round().to(torch.uint8).permute(0, 2, 3, 1).numpy()
        panels.append((name, tiles(shown, spread(len(values), most), filters.kept, pixels.__getitem__)))
    return page(panels, _heading(filters, title, most))


def _scale(sizes: Tensor) -> float:
    finite = sizes[sizes.isfinite()].numpy()
    return float(np.percentile(finite, 99.5) or finite.max()) if len(finite) else 0.0


def _colors(weights: Tensor) -> Tensor:
    """Return weights as red, green and blue, (N, 3, height, width)."""
    mean = weights if weights.shape[1] in (1, 3) else weights.mean(1, keepdim=True)
    return mean.expand(-1, 3, -1, -1)


def _heading(filters: LayerFilters, title: str, most: int | None) -> tuple[str, str]:
    weights = next(iter(filters.sides.values()))
    count, channels, height, width = weights.shape
    parts = [f"{count} filters of {channels} x {height} x {width}", *kept_of(filters.kept)]
    if most is not None and count > most:
        parts.append(f"{most} shown, evenly spread")
    parts.append("zero is gray, all on one scale" if channels in (1, 3) else "means over the channels, zero is gray")
    return headed(filters.path, title, parts, filters.note)
