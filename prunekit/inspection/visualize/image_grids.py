"""Pictures: values as colors, grids of feature maps with pruned channels crossed out, images with boxes, PNG files."""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageColor, ImageDraw, ImageFont
from torch import Tensor
from torch.nn import functional as F
from torchvision.utils import make_grid

from prunekit.inspection.visualize.feature_maps import LayerFeatures
from prunekit.models.preprocessing import Preprocessing
from prunekit.utils.files import StrPath, atomic_file

Pixels = NDArray[np.uint8]
"""(H, W, 3) red, green and blue."""
SCALE = "viridis"
"""Equal steps in value look equal, also in gray and to the color-blind (Smith & van der Walt 2015)."""


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


def colored(values: NDArray[np.floating] | Tensor, low: float, high: float) -> NDArray[np.uint8]:
    """Return values (...) as colors (..., 3) from dark, for `low` and below, to bright, for `high` and above.

    NaN and Inf are red, which is none of these colors.
    """
    import matplotlib

    array = np.asarray(values.detach().cpu().numpy() if isinstance(values, Tensor) else values, dtype=np.float64)
    span = high - low if high > low else 1.0
    with np.errstate(invalid="ignore"):
        found = matplotlib.colormaps[SCALE](np.clip((array - low) / span, 0, 1), bytes=True)[..., :3]
    found[~np.isfinite(array)] = (214, 39, 40)
    return np.ascontiguousarray(found)


SMALLEST, LARGEST = 56, 112
"""Pixels of a map's longer side: smaller maps are enlarged without blurring, larger ones are averaged."""
LABEL, GAP, MARGIN, NARROWEST = 15, 5, 14, 300
WHITE, INK, SOFT, GONE, CROSS = (255, 255, 255), (31, 41, 55), (107, 114, 128), (229, 231, 235), (190, 18, 60)
BARS, GONE_BAR = {"dense": "#64748b", "pruned": "#0f766e"}, "#e5a13d"
STYLE: dict[Any, Any] = {
    "font.size": 9.5,
    "text.color": "#1f2937",
    "axes.spines.top": False,
    "axes.spines.right": False,
}


def draw(features: LayerFeatures, title: str = "", most: int | None = 64) -> Pixels:
    """Return the picture of a layer, (H, W, 3): a panel for each model, with at most so many channels; None: all.

    Each channel has a scale of its own, the same in all models.
    """
    chosen = spread(features.channels, most)
    if features.view == "bars":
        return _bars(features, _heading(features, len(chosen), title))
    low, high = features.limits()
    panels = []
    for name, values in features.sides.items():
        own = len(values) == features.channels
        index = chosen if own else spread(len(values), most)
        bounds = (low, high) if own else (values.flatten(1).amin(1), values.flatten(1).amax(1))

        def painted(channel: int, values: Tensor = values, bounds: tuple[Tensor, Tensor] = bounds) -> Pixels:
            return colored(values[channel], *(float(bound[channel]) for bound in bounds))

        panels.append((name, tiles(values, index, features.kept, painted)))
    return page(panels, _heading(features, len(chosen), title))


def spread(channels: int, most: int | None) -> NDArray[np.int64]:
    """Return the numbers of at most so many channels, evenly spread."""
    if most is None or channels <= most:
        return np.arange(channels)
    return np.unique(np.linspace(0, channels - 1, most).round().astype(np.int64))


def tiles(
    values: Tensor, index: NDArray[np.int64], kept: NDArray[np.bool_] | None, painted: Callable[[int], Pixels]
) -> Pixels:
    """Return the chosen ones of values (N, ..., h, w) in a grid, painted, numbered, and crossed out if pruned."""
    found = []
    for number in index.tolist():
        gone = bool(values[number].isnan().all())
        pixels = np.full((*values.shape[-2:], 3), GONE, np.uint8) if gone else painted(number)
        found.append(tile(pixels, number, crossed=kept is not None and not kept[number], gone=gone))
    return grid(found)


def grid(tiles: Sequence[Pixels]) -> Pixels:
    """Return tiles of one size as one picture, about as wide as high."""
    stacked = torch.from_numpy(np.stack(tiles)).permute(0, 3, 1, 2)  # (N, 3, h, w)
    found = make_grid(stacked, nrow=columns(len(tiles), tiles[0].shape), padding=GAP, pad_value=255)
    return np.ascontiguousarray(found.permute(1, 2, 0).numpy())


def columns(count: int, shape: Sequence[int]) -> int:
    """Return how many tiles (h, w) to put in a row for a picture about as wide as high."""
    near = min(count, max(1, round(math.sqrt(count * shape[0] / shape[1]))))
    whole = [found for found in (near, near - 1, near + 1, near - 2) if found > 0 and count % found == 0]
    return whole[0] if whole else near  # avoids a last row that is nearly empty


def tile(pixels: Pixels, number: int, *, crossed: bool = False, gone: bool = False) -> Pixels:
    """Return a small picture with its number above it, crossed out if pruned, and faintly if it is gone."""
    image = Image.fromarray(_sized(pixels))
    made = Image.new("RGB", (image.width, image.height + LABEL), WHITE)
    made.paste(image, (0, LABEL))
    pen = ImageDraw.Draw(made)
    pen.text((0, 0), str(number), fill=CROSS if crossed else SOFT, font=_font(11))
    if crossed:
        box = (1, LABEL + 1, image.width - 2, made.height - 2)
        for line in (box, (box[0], box[3], box[2], box[1])):
            pen.line(line, fill=SOFT if gone else WHITE, width=1 if gone else 4)
            if not gone:
                pen.line(line, fill=CROSS, width=2)
    return np.asarray(made)


def _sized(pixels: Pixels) -> Pixels:
    longer = max(pixels.shape[:2])
    if longer > LARGEST:
        shape = [max(1, round(side * LARGEST / longer)) for side in pixels.shape[:2]]
        given = torch.from_numpy(pixels).permute(2, 0, 1)[None].float()
        made = F.interpolate(given, shape, mode="area")[0].permute(1, 2, 0)
        return np.asarray(made.round().to(torch.uint8).numpy())
    times = math.ceil(SMALLEST / longer)
    return pixels.repeat(times, 0).repeat(times, 1)


def _font(size: int) -> Any:
    return ImageFont.load_default(size)


def page(panels: Sequence[tuple[str, Pixels]], heading: tuple[str, str]) -> Pixels:
    """Return panels side by side under their names, and a heading of two parts, broken into lines where it is long."""
    sizes = [_font(16), _font(12), _font(13)]
    width = max(sum(panel.shape[1] + MARGIN for _, panel in panels) + MARGIN, NARROWEST)
    lines = [(line, size) for part, size in zip(heading, sizes, strict=False) for line in _lines(part, size, width)]
    head = 6 + sum(_height(size) for _, size in lines)
    tall = head + 24 + max(panel.shape[0] for _, panel in panels) + MARGIN
    made = Image.new("RGB", (width, tall), WHITE)
    pen, left, top = ImageDraw.Draw(made), MARGIN, 6
    for line, size in lines:
        pen.text((MARGIN, top), line, fill=INK if size is sizes[0] else SOFT, font=size)
        top += _height(size)
    for name, panel in panels:
        pen.text((left + GAP, head + 4), name, fill=INK, font=sizes[2])
        made.paste(Image.fromarray(panel), (left, head + 24))
        left += panel.shape[1] + MARGIN
    return np.asarray(made)


def _height(font: Any) -> int:
    return round(1.35 * float(font.size))


def _lines(text: str, font: Any, width: int) -> list[str]:
    """Return text in lines that fit between the margins of a picture; a word that is wider has a line of its own."""
    lines = [""]
    for word in text.split():
        longer = f"{lines[-1]} {word}".strip()
        if lines[-1] and font.getlength(longer) > width - 2 * MARGIN:
            lines.append(word)
        else:
            lines[-1] = longer
    return lines


def headed(name: str, title: str, parts: Sequence[str], note: str) -> tuple[str, str]:
    """Return the two lines of a heading."""
    return name + (f", {title}" if title else ""), "; ".join([*parts, *filter(None, [note])])


def kept_of(kept: NDArray[np.bool_] | None) -> list[str]:
    """Return how many are kept, for a heading; nothing if unknown."""
    if kept is None:
        return []
    left = int(kept.sum())
    return ["none pruned" if left == len(kept) else f"{left} of {len(kept)} kept"]


def _heading(features: LayerFeatures, count: int, title: str) -> tuple[str, str]:
    parts = [features.what, *kept_of(features.kept)]
    if features.view == "bars" and features.kept is not None and not features.kept.all():
        parts.append("pruned ones are orange and crossed out")
    if features.view != "bars":
        if count < features.channels:
            parts.append(f"{count} shown, evenly spread")
        parts.append("dark to bright: each channel from least to most")
    return headed(features.name, title, parts, features.note)


def _bars(features: LayerFeatures, heading: tuple[str, str]) -> Pixels:
    """Return values as bars, one panel below the other."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    count = len(features.sides)
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(9.6, 1.9 * count + 0.9), dpi=100, layout="constrained")
        canvas = FigureCanvasAgg(figure)
        panels = np.atleast_1d(figure.subplots(count, 1, sharex=True, sharey=True))
        for axes, (name, values) in zip(panels, features.sides.items(), strict=True):
            heights = np.nan_to_num(values.flatten().numpy())
            bars = axes.bar(np.arange(len(heights)), heights, width=0.85, color=BARS.get(name, BARS["pruned"]))
            if features.kept is not None:
                gone = np.flatnonzero(~features.kept)
                for index in gone:
                    bars[index].set_facecolor(GONE_BAR)
                size = min(6.0, max(1.5, 400 / features.channels))
                axes.plot(gone, np.zeros(len(gone)), "x", color="#be123c", markersize=size)
            axes.set_title(name, loc="left", fontsize=10)
            axes.set_xlim(-0.7, features.channels - 0.3)
        panels[-1].set_xlabel("channel")
        figure.suptitle(f"{heading[0]}\n{heading[1]}", x=0.01, ha="left", fontsize=10.5)
        canvas.draw()  # type: ignore[no-untyped-call]
        return np.ascontiguousarray(np.asarray(canvas.buffer_rgba())[..., :3])  # type: ignore[no-untyped-call]


CONFIDENCE = 0.25
"""Boxes of a lower score are not drawn, as by the commands of ultralytics."""
COLORS = ("#d55e00", "#0072b2", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
"""Colors of classes, in turn; the color-blind tell them apart (Okabe & Ito 2008)."""
SIDE = 320
"""Pixels of the longer side, about; smaller images are enlarged by a whole number."""
LINE, TEXT = 3, 15
"""Pixels: how wide lines are, and how high text is."""
Boxes = Mapping[str, Tensor]
"""`boxes` (n, 4) as left, top, right and bottom in pixels, `labels` (n,) from 0, and of detections `scores` (n,)."""


def with_boxes(image: Tensor, found: Boxes, classes: Sequence[str]) -> Pixels:
    """Return an image with its boxes, each with the name of its class and its score in percent."""
    factor = max(1, round(SIDE / max(image.shape[-2:])))
    pixels = _in_8_bits(image.detach().cpu().float())
    shown = Image.fromarray(pixels.repeat(factor, 0).repeat(factor, 1))
    rows = found["boxes"].detach().cpu().float() * factor
    rows[:, 0::2] = rows[:, 0::2].clamp(0, shown.width - 1)
    rows[:, 1::2] = rows[:, 1::2].clamp(0, shown.height - 1)
    scores = found["scores"].detach().cpu().tolist() if "scores" in found else [None] * len(rows)
    boxes = [
        (row, _name(label, score, classes), COLORS[label % len(COLORS)])
        for row, label, score in zip(rows.tolist(), found["labels"].tolist(), scores, strict=True)
        if score is None or score >= CONFIDENCE
    ]
    pen = ImageDraw.Draw(shown)
    for row, _, color in boxes:
        pen.rectangle([round(value) for value in row], outline=color, width=LINE)
    for row, name, color in boxes:  # above all lines
        _write(pen, shown.size, row, name, color)
    return np.asarray(shown)


def _name(label: int, score: float | None, classes: Sequence[str]) -> str:
    name = classes[label] if 0 <= label < len(classes) else str(label)
    return name if score is None else f"{name} {100 * score:.0f}"


def _write(pen: ImageDraw.ImageDraw, size: tuple[int, int], box: Sequence[float], name: str, color: str) -> None:
    """Write the name of a box on its color: above its top edge, or below that where the picture ends."""
    font = ImageFont.load_default(TEXT)
    width, height = round(pen.textlength(name, font)) + 2 * LINE, round(1.25 * TEXT)
    left, top = max(0, min(round(box[0]), size[0] - width)), round(box[1])
    top = top - height if top >= height else max(0, min(top, size[1] - height))
    pen.rectangle((left, top, left + width - 1, top + height - 1), fill=color)
    light = sum(part * share for part, share in zip(ImageColor.getrgb(color), (0.3, 0.59, 0.11), strict=False)) > 140
    pen.text((left + LINE, top + height / 2), name, fill="black" if light else "white", font=font, anchor="lm")


def boxes_side_by_side(
    image: Tensor, sides: Mapping[str, Boxes], classes: Sequence[str], heading: tuple[str, str]
) -> Pixels:
    """Return the picture of an image, (H, W, 3): a panel for its true boxes, and one for those of each model."""
    return page([(name, with_boxes(image, found, classes)) for name, found in sides.items()], heading)
