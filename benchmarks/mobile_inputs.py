"""Inputs of networks on phones: photographs and faces that packages ship, and text drawn over them.

Photographs are those of two Debian packages, `gcompris-qt-data` (GPL-3+, its pictures CC or public domain) and
`tuxpaint-stamps-default` (GPL-2), unpacked into a folder by `apt-get download PACKAGE; dpkg-deb -x FILE FOLDER`. Stamps
are cut out; each is laid over a photograph. Pictures to calibrate on and held-out ones have no source in common.
"""

from __future__ import annotations

import io
import re
import struct
from collections.abc import Iterator, Sized
from importlib import import_module
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor
from torch.nn import functional as F

SIDE = 256
"""Pixels of a picture's side."""
FITTED = 5 / 8
"""Share of the pictures that methods may see."""
PHOTOS = re.compile("categorization|explore_.*|erase|details|paintings|clickgame")
"""Resources of GCompris that hold photographs and paintings."""
DRAWN = re.compile("cartoon|symbols|seasonal|space|roadsigns|flags")
"""Folders of Tux Paint without photographs."""
WORDS = "the quick brown fox jumps over a lazy dog while 27 boxing wizards measure 3.1415 liters of Quartz & Vinegar"

Split = tuple[Tensor, Tensor]
"""What methods may see, and what judges them."""


def square(image: Image.Image) -> Image.Image:
    """The middle of a picture."""
    width, height = image.size
    side = min(image.size)
    left, top = (width - side) // 2, (height - side) // 2
    return image.crop((left, top, left + side, top + side)).resize((SIDE, SIDE), Image.Resampling.BICUBIC)


def resources(folder: Path) -> Iterator[tuple[str, Image.Image]]:
    """WebP pictures in GCompris' resource files, with the name of their file."""
    for path in sorted(folder.rglob("*.rcc")):
        data = path.read_bytes()
        for found in re.finditer(rb"RIFF(....)WEBP", data, re.DOTALL):
            size = struct.unpack("<I", found.group(1))[0] + 8
            image = Image.open(io.BytesIO(data[found.start() : found.start() + size]))
            if min(image.size) >= 150:
                yield path.stem, image


def photographs(folder: Path) -> Split:
    """(N, 3, 256, 256) pixels, 0 to 255, of each side.

    Raises:
        FileNotFoundError: the folder has no pictures.
    """
    whole, cut = [], []
    for name, image in resources(folder):
        if image.mode == "RGB" and PHOTOS.fullmatch(name):
            whole.append(np.asarray(square(image)))
        elif image.mode == "RGBA" and name == "lang":
            cut.append(image)
    for path in sorted(folder.rglob("stamps/**/*.png")):
        if not DRAWN.search(str(path)) and min((stamp := Image.open(path)).size) >= 100:
            cut.append(stamp.convert("RGBA"))
    if not whole or not cut:
        raise FileNotFoundError(f"{folder}: expected gcompris-qt-data and tuxpaint-stamps-default, unpacked")
    random = np.random.default_rng(0)
    whole = [whole[i] for i in random.permutation(len(whole))]
    cut = [cut[i] for i in random.permutation(len(cut))]
    sides = []
    for some in (slice(0, FITTED), slice(FITTED, 1)):
        under = whole[_part(whole, some)]
        over = [stamped(stamp, under[i % len(under)], i // len(under)) for i, stamp in enumerate(cut[_part(cut, some)])]
        pixels = np.stack([*under, *over])[random.permutation(len(under) + len(over))]
        sides.append(torch.from_numpy(pixels).permute(0, 3, 1, 2).float())
    return sides[0], sides[1]


def _part(values: Sized, share: slice) -> slice:
    return slice(round(share.start * len(values)), round(share.stop * len(values)))


def stamped(stamp: Image.Image, under: np.ndarray, turns: int) -> np.ndarray:
    """A stamp over a photograph that is turned by right angles."""
    side = max(stamp.size)
    layer = Image.new("RGBA", (side, side))
    layer.paste(stamp, ((side - stamp.size[0]) // 2, (side - stamp.size[1]) // 2))
    layer = layer.resize((SIDE, SIDE), Image.Resampling.BICUBIC)
    return np.asarray(
        Image.alpha_composite(Image.fromarray(np.rot90(under, turns)).convert("RGBA"), layer).convert("RGB")
    )


def resized(pixels: Tensor, side: int) -> Tensor:
    """Pictures of another size."""
    return F.interpolate(pixels, (side, side), mode="bilinear", antialias=True)


def with_faces(photos: Split) -> Split:
    """Photographs with one to three faces each, from scikit-image's `lfw_subset`; no face is in both sides."""
    found = import_module("skimage.data").lfw_subset()[:100]  # others are no faces
    faces = torch.from_numpy(found).float()[:, None]  # (N, 1, 25, 25)
    faces = 255 * faces / faces.amax((1, 2, 3), keepdim=True)
    random, sides = np.random.default_rng(1), []
    for pixels, some in zip(photos, (faces[:60], faces[60:]), strict=True):
        made = pixels.clone()
        for image in made:
            for corner in random.permutation(4)[: random.integers(1, 4)]:
                side = int(random.integers(48, 110))
                face = F.interpolate(some[random.integers(len(some)), None], (side, side), mode="bicubic")[0]
                top, left = (int(corner // 2) * 128 + 9, int(corner % 2) * 128 + 9)
                image[:, top : top + side, left : left + side] = face.clamp(0, 255)
        sides.append(made)
    return sides[0], sides[1]


def with_text(photos: Split) -> Split:
    """Photographs with two to six lines of words."""
    random, sides = np.random.default_rng(2), []
    for pixels in photos:
        made = []
        for image in pixels:
            picture = Image.fromarray(image.byte().permute(1, 2, 0).numpy())
            pen = ImageDraw.Draw(picture)
            for top in random.permutation(6)[: random.integers(2, 7)]:
                font = ImageFont.load_default(float(random.integers(14, 34)))
                place = int(random.integers(0, 90)), 6 + 41 * int(top)
                pen.text(place, line(random), fill=tuple(int(c) for c in random.integers(0, 256, 3)), font=font)
            made.append(np.asarray(picture))
        sides.append(torch.from_numpy(np.stack(made)).permute(0, 3, 1, 2).float())
    return sides[0], sides[1]


def crops(photos: Split) -> Split:
    """(N, 3, 48, 48) six crops of each photograph with faces, 48 to 120 pixels wide: faces, parts of them, and none."""
    random, sides = np.random.default_rng(4), []
    for pixels in with_faces(photos):
        made = []
        for image in pixels:
            for corner in random.integers(0, 4, 6):
                side = int(random.integers(48, 121))
                top, left = (int(corner // 2) * 128 + 9, int(corner % 2) * 128 + 9)
                top, left = (int(np.clip(at + random.integers(-16, 17), 0, SIDE - side)) for at in (top, left))
                made.append(resized(image[None, :, top : top + side, left : left + side], 48))
        sides.append(torch.cat(made))
    return sides[0], sides[1]


def text_lines(count: int, *, upright: bool = False) -> Split:
    """(N, 3, 48, 192) lines of words on plain ground, every second one upside down where not all are upright."""
    random, made = np.random.default_rng(3), []
    for index in range(count):
        ground, ink = random.integers(0, 256, 3), random.integers(0, 256, 3)
        picture = Image.new("RGB", (192, 48), tuple(int(c) for c in ground))
        font = ImageFont.load_default(float(random.integers(18, 36)))
        ImageDraw.Draw(picture).text((4, 4), line(random), fill=tuple(int(c) for c in ink), font=font)
        pixels = np.asarray(picture.rotate(180 * (index % 2) * (not upright)), dtype=np.float32)
        made.append(pixels + random.normal(0, 8, pixels.shape).astype(np.float32))
    lines = torch.from_numpy(np.stack(made)).permute(0, 3, 1, 2)
    return lines[: round(FITTED * count)], lines[round(FITTED * count) :]


def line(random: np.random.Generator) -> str:
    """Some words."""
    return " ".join(random.choice(WORDS.split(), int(random.integers(1, 4))))
