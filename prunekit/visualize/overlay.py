"""Maps over the image that they are of, dense beside pruned, as one picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from prunekit.artifacts import atomic_file
from prunekit.visualize.images import Pixels

HEAT = "inferno"
"""Dark to bright in even steps, and its bright end is no color of most photographs."""
SIDE = 336
"""Pixels of a panel's longer side, about."""
OPACITY = 0.75
"""Of the largest value of a map that lies over its image."""
INK, FAINT = "#1f2937", "#6b7280"
STYLE: dict[Any, Any] = {
    "font.family": "sans-serif",
    "font.size": 10,
    "text.color": INK,
    "axes.titlesize": 10.5,
    "text.parse_math": False,
}


@dataclass(frozen=True, eq=False)
class Panel:
    """One image of a picture, (H, W, 3), with a line above it and one below."""

    title: str
    pixels: Pixels
    note: str = ""


def enlarged(pixels: Pixels) -> Pixels:
    """An image (H, W, 3) with its longer side about `SIDE`: pixels of a small one become squares."""
    height, width = pixels.shape[:2]
    times = max(1, SIDE // max(height, width))
    return pixels.repeat(times, 0).repeat(times, 1)


def overlaid(pixels: Pixels, values: Tensor) -> Pixels:
    """A map over its image: the more, the less is seen of the image, which is gray; nothing below zero.

    Args:
        pixels: (H, W, 3).
        values: (h, w); interpolated linearly.

    Returns:
        (H, W, 3), the image enlarged.
    """
    import matplotlib

    image = enlarged(pixels).astype(np.float64)
    gray = image @ (0.299, 0.587, 0.114)
    heat = _resized(values.clamp_min(0), image.shape[:2])
    heat = heat / max(float(heat.max()), 1e-300)
    colors = matplotlib.colormaps[HEAT](heat, bytes=True)[..., :3].astype(np.float64)
    opacity = OPACITY * np.sqrt(heat)[..., None]  # what lies in the middle is seen too
    return ((1 - opacity) * gray[..., None] + opacity * colors).round().clip(0, 255).astype(np.uint8)


def heated(values: Tensor) -> Pixels:
    """A map (H, W) as colors (H, W, 3), enlarged; what is beyond the 99.5th percentile is as bright as that.

    A few pixels have gradients far above all others (Smilkov et al. 2017, section 3).
    """
    import matplotlib

    array = values.detach().cpu().double().numpy()
    top = max(float(np.percentile(array, 99.5)), 1e-300)
    return enlarged(matplotlib.colormaps[HEAT](np.clip(array / top, 0, 1), bytes=True)[..., :3])


def _resized(values: Tensor, size: Sequence[int]) -> np.ndarray[Any, np.dtype[np.float64]]:
    given = values.detach().cpu().to(torch.float64)[None, None]
    resized = F.interpolate(given, tuple(size), mode="bilinear", align_corners=False)
    return np.asarray(resized[0, 0].numpy(), dtype=np.float64)


def write_picture(path: Path, panels: Sequence[Panel], title: str, scale: str) -> Path:
    """Writes panels beside each other as a PNG file, whole or not at all.

    Args:
        title: above all of them.
        scale: what the ends of the colors are.
    """
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize
    from matplotlib.figure import Figure

    height, width = panels[0].pixels.shape[:2]
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(3.5 * len(panels) + 0.2, 3.5 * height / width + 1.55), dpi=120, layout="constrained")
        canvas = FigureCanvasAgg(figure)
        axes = np.atleast_1d(figure.subplots(1, len(panels)))
        for place, panel in zip(axes, panels, strict=True):
            place.imshow(panel.pixels, interpolation="antialiased")
            place.set_title(panel.title, loc="left")
            place.set_xlabel(panel.note, loc="left", color=FAINT)
            place.set(xticks=[], yticks=[])
            place.spines[:].set_visible(False)
        figure.suptitle(title, x=0.01, ha="left", fontsize=12, fontweight="bold")
        bar = figure.colorbar(
            ScalarMappable(Normalize(0, 1), HEAT), ax=list(axes), location="bottom", shrink=0.5, aspect=40, pad=0.04
        )
        bar.set_ticks([0, 0.5, 1])
        bar.set_label(scale, color=FAINT)
        bar.outline.set_visible(False)
        with atomic_file(path) as temporary:
            canvas.print_png(temporary)  # type: ignore[no-untyped-call]
    return path
