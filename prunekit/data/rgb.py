"""Images of every mode as the red, green and blue of 8 bits that models are given."""

from __future__ import annotations

import numpy as np
from PIL import Image

WHITE = 0xFFFF
"""Of 16 bits."""


def in_rgb(image: Image.Image) -> Image.Image:
    """An image in RGB; 16 bits of gray are scaled to 8, where Pillow alone cuts off all that is brighter than 255.

    Args:
        image: may only have been opened; this decodes it.

    Raises:
        ValueError: its pixels are floating-point numbers, or beyond 16 bits: nobody says which of them is white.
    """
    if image.mode == "F":
        raise ValueError("its pixels are floating-point numbers; expected 8 or 16 bits")
    if image.mode.startswith("I"):  # I;16, its byte orders, and I, as which some 16-bit files are opened
        gray = np.asarray(image).astype(np.int64)
        if gray.size and (gray.min() < 0 or gray.max() > WHITE):
            raise ValueError(f"its pixels are from {gray.min()} to {gray.max()}; expected 8 or 16 bits")
        image = Image.fromarray(((gray * 255 + WHITE // 2) // WHITE).astype(np.uint8))
    return image.convert("RGB")
