"""Inputs of models as images, values as colors, and PNG files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

from prunekit.models.preprocessing import Preprocessing
from prunekit.utils.files import StrPath, atomic_file

Pixels = NDArray[np.uint8]
"""(H, W, 3) red, green and blue."""
COLORS = "viridis"
"""Equal steps in value look equal, also in gray and to the color-blind (Smith & van der Walt 2015)."""
HEAT = "inferno"
"""Dark to bright in even steps, with a bright end that few photographs contain."""
SIDE = 336
"""Approximate pixels of a panel's longer side."""
OPACITY = 0.75
"""Opacity of the largest value of a map over its image."""


def as_picture(values: Tensor, feed: Preprocessing) -> Pixels:
    """Return an input (C, H, W) as the image that a preprocessing has made it of."""
    mean, std = (torch.tensor(part)[:, None, None] for part in (feed.mean, feed.std))
    return _in_8_bits(values.detach().cpu().float() * std + mean)


def _in_8_bits(values: Tensor) -> Pixels:
    """Return values of 0..1, (1, H, W) or (3, H, W), as pixels."""
    pixels = values.clamp(0, 1).expand(3, -1, -1)
    return np.ascontiguousarray((pixels * 255).round().to(torch.uint8).permute(1, 2, 0).numpy())


def stretched(values: Tensor) -> Pixels:
    """Return any values (C, H, W) as an image from their least, black, to their largest; C other than 3 is averaged."""
    shown = values.detach().cpu().float().nan_to_num()
    shown = shown if len(shown) == 3 else shown.mean(0, keepdim=True)
    low, high = shown.min(), shown.max()
    return _in_8_bits((shown - low) / (high - low).clamp_min(1e-12))


def write_png(path: StrPath, pixels: Pixels) -> Path:
    """Write pixels (H, W, 3) as a PNG file, atomically."""
    path = Path(path)
    with atomic_file(path) as temporary:
        Image.fromarray(pixels).save(temporary, format="PNG", optimize=True)
    return path


def overlaid(pixels: Pixels, values: Tensor) -> Pixels:
    """Return a map (h, w) over its image (H, W, 3), enlarged: larger values cover more of it."""
    import matplotlib

    image = enlarged(pixels).astype(np.float64)
    gray = image @ (0.299, 0.587, 0.114)
    heat = _resized(values, image.shape[:2])
    heat = heat / max(float(heat.max()), 1e-300)
    colors = matplotlib.colormaps[HEAT](heat, bytes=True)[..., :3].astype(np.float64)
    opacity = OPACITY * np.sqrt(heat)[..., None]  # values in the middle are visible too
    return ((1 - opacity) * gray[..., None] + opacity * colors).round().clip(0, 255).astype(np.uint8)


def _resized(values: Tensor, size: Sequence[int]) -> np.ndarray[Any, np.dtype[np.float64]]:
    given = values.detach().cpu().to(torch.float64)[None, None]
    resized = F.interpolate(given, tuple(size), mode="bilinear", align_corners=False)
    return np.asarray(resized[0, 0].numpy(), dtype=np.float64)


def heated(values: Tensor) -> Pixels:
    """Return a map (H, W) as colors (H, W, 3), enlarged; colors end at the 99.5th percentile.

    A few pixels have gradients far above all others (Smilkov et al. 2017, section 3).
    """
    import matplotlib

    array = values.detach().cpu().double().numpy()
    top = max(float(np.percentile(array, 99.5)), 1e-300)
    return enlarged(matplotlib.colormaps[HEAT](np.clip(array / top, 0, 1), bytes=True)[..., :3])


def enlarged(pixels: Pixels) -> Pixels:
    """Return an image (H, W, 3) whose longer side is about `SIDE`; pixels of a small one become squares."""
    height, width = pixels.shape[:2]
    times = max(1, SIDE // max(height, width))
    return pixels.repeat(times, 0).repeat(times, 1)


def colored(values: NDArray[np.floating] | Tensor, low: float, high: float) -> NDArray[np.uint8]:
    """Return values (...) as colors (..., 3) from dark, for `low` and below, to bright, for `high` and above.

    NaN and Inf are red, which is none of these colors.
    """
    import matplotlib

    array = np.asarray(values.detach().cpu().numpy() if isinstance(values, Tensor) else values, dtype=np.float64)
    span = high - low if high > low else 1.0
    with np.errstate(invalid="ignore"):
        found = matplotlib.colormaps[COLORS](np.clip((array - low) / span, 0, 1), bytes=True)[..., :3]
    found[~np.isfinite(array)] = (214, 39, 40)
    return np.ascontiguousarray(found)
