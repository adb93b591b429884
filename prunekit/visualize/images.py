"""Image files as a model's input, inputs as images again, and values as colors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor
from torchvision.transforms.v2.functional import center_crop, pil_to_tensor, resize

from prunekit.artifacts import StrPath, atomic_file
from prunekit.data.rgb import in_rgb
from prunekit.errors import DataError, UsageError

Pixels = NDArray[np.uint8]
"""(H, W, 3) red, green and blue."""
Transform = Callable[[Image.Image], Tensor]
"""From an image in RGB to a model's input, (C, H, W)."""

COLORS = "viridis"
"""Steps that are equal in value look equal, in gray and to the color-blind too (Smith & van der Walt 2015)."""
MARGIN = 8 / 7
"""Images are cut out of one that is so much larger, as torchvision's presets do (256 and 224)."""


@dataclass(frozen=True)
class Preprocessing:
    """From an image to a model's input and back.

    Args:
        shape: (C, H, W) of the input, with C 1 or 3.
        mean, std: of a pixel in 0..1, per channel; subtracted, and divided by. For C 1 their average is taken.

    Raises:
        UsageError: the input is no image.
    """

    shape: tuple[int, ...]
    mean: tuple[float, ...] = (0.485, 0.456, 0.406)
    std: tuple[float, ...] = (0.229, 0.224, 0.225)

    def __post_init__(self) -> None:
        if len(self.shape) != 3 or self.shape[0] not in (1, 3):
            got = " x ".join(map(str, self.shape))
            raise UsageError(f"--image: expected a model that takes images of 1 or 3 channels, but it takes {got}")

    def __call__(self, image: Image.Image) -> Tensor:
        """(C, H, W) float32. An image of exactly H x W is taken as it is, of others the center."""
        channels, height, width = self.shape
        image = image.convert("L" if channels == 1 else "RGB")
        if image.size != (width, height):
            shorter = max(height / image.height, width / image.width) * min(image.size)
            image = center_crop(resize(image, [round(shorter * MARGIN)]), [height, width])
        mean, std = self._normalization()
        pixels: Tensor = pil_to_tensor(image)
        return (pixels.float() / 255 - mean) / std

    def shown(self, values: Tensor) -> Pixels:
        """An input (C, H, W) as the image that it was made of."""
        mean, std = self._normalization()
        pixels = (values.detach().cpu().float() * std + mean).clamp(0, 1).expand(3, -1, -1)
        return np.ascontiguousarray((pixels * 255).round().to(torch.uint8).permute(1, 2, 0).numpy())

    def _normalization(self) -> tuple[Tensor, Tensor]:
        both = torch.tensor([self.mean, self.std])[:, :, None, None]  # (2, 3, 1, 1)
        mean, std = both.mean(1, keepdim=True) if self.shape[0] == 1 else both
        return mean, std


def read_image(path: StrPath, transform: Transform) -> Tensor:
    """Reads an image file, turned as its EXIF data says, and makes it a model's input, (C, H, W).

    Raises:
        DataError: the file is not there, cannot be opened, is no image, or breaks off; says which and why.
    """
    path = Path(path)
    try:
        with Image.open(path) as file:
            image = in_rgb(ImageOps.exif_transpose(file))
    except UnidentifiedImageError as error:
        reason = "it is empty" if not path.stat().st_size else "it is of no format that Pillow reads"
        raise DataError(f"{path}: expected an image, such as a PNG or JPEG file, but {reason}") from error
    except FileNotFoundError as error:
        raise DataError(f"{path}: expected an image file, and there is none") from error
    except Exception as error:  # decoders raise OSError, SyntaxError, struct.error, EOFError and more
        reason = "it is a folder" if path.is_dir() else str(getattr(error, "strerror", None) or error)
        raise DataError(f"{path}: expected an image that can be read, but {reason}") from error
    return transform(image)


def colored(values: NDArray[np.floating] | Tensor, low: float, high: float) -> NDArray[np.uint8]:
    """Values (...) as colors (..., 3) from the darkest, for `low` and below, to the brightest, for `high` and above.

    NaN and Inf are red, which is none of these colors.
    """
    import matplotlib

    array = np.asarray(values.detach().cpu().numpy() if isinstance(values, Tensor) else values, dtype=np.float64)
    span = high - low if high > low else 1.0
    with np.errstate(invalid="ignore"):
        found = matplotlib.colormaps[COLORS](np.clip((array - low) / span, 0, 1), bytes=True)[..., :3]
    found[~np.isfinite(array)] = (214, 39, 40)
    return np.ascontiguousarray(found)


def write_png(path: StrPath, pixels: Pixels) -> Path:
    """Writes pixels (H, W, 3) as a PNG file, whole or not at all."""
    path = Path(path)
    with atomic_file(path) as temporary:
        Image.fromarray(pixels).save(temporary, format="PNG", optimize=True)
    return path
