"""Preprocessing: the way from an image file to a model's input, as plain data that model folders and exports carry."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from os import PathLike
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
from annotated_types import Ge, Gt, Le, MinLen
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor
from torch.nn import functional as F

from prunekit.errors import ArtifactError, DataError, SettingsError, reraise_shortage
from prunekit.known_names import PositiveInt
from prunekit.settings.validation import Checked

Pixels = str | PathLike[str] | Image.Image | np.ndarray[Any, Any]
MOST_PIXELS = 2**27
"""Pixels of an input, and of an image on its way there: 1.5 GiB of float32 in three channels."""
MOST_SIDE = 2**16
"""Pixels of a side of an input."""
WHITE = 0xFFFF
"""The largest value of 16 bits."""


@dataclass(frozen=True)
class Preprocessing(Checked):
    """The way from an image to an input: decoded, resized, cropped, scaled to 0..1 and normalized.

    Calling it with the path of an image file, a Pillow image, uint8 pixels (H, W) or (H, W, 3), or a list of these,
    returns the input, (N, channels, height, width) float32.

    Example:
        >>> import numpy as np
        >>> import prunekit as pk
        >>> photo = np.zeros((480, 640, 3), dtype=np.uint8)
        >>> pk.Preprocessing(height=224, width=224, shorter_side=256)(photo).shape
        torch.Size([1, 3, 224, 224])
        >>> pk.Preprocessing(height=0, width=224)
        Traceback (most recent call last):
        prunekit.errors.SettingsError: Preprocessing: height: ...
    """

    height: PositiveInt
    """Height of the input, in pixels."""
    width: PositiveInt
    """Width of the input, in pixels."""
    shorter_side: PositiveInt | None = None
    """An image of another size is first resized, with its proportions, to this length of its shorter side, and its
    center is taken; null: it is resized as a whole to height and width."""
    interpolation: Literal["nearest", "bilinear", "bicubic", "lanczos"] = "bilinear"
    """How an image is resized; antialiased where it shrinks."""
    mean: Annotated[tuple[float, ...], MinLen(1)] = (0.485, 0.456, 0.406)
    """Mean of a pixel in 0..1 for each channel, which is subtracted."""
    std: Annotated[tuple[Annotated[float, Gt(0)], ...], MinLen(1)] = (0.229, 0.224, 0.225)
    """Standard deviation of a pixel in 0..1 for each channel, which divides."""
    white: Annotated[float, Gt(0)] = 255.0
    """Value of a pixel of 8 bits that becomes 1 before mean and deviation."""
    channel_order: Literal["rgb", "bgr"] = "rgb"
    """Order of the channels of the input."""
    padding: Annotated[float, Ge(0), Le(1)] | None = None
    """For detectors: an image is resized, with its proportions, to fit into height and width, and centered; the rest
    gets this gray, 0 black and 1 white. Null: no padding, see `shorter_side`."""

    def __post_init__(self) -> None:
        """Check every field."""
        super().__post_init__()
        side = self.shorter_side or 1
        large = max(self.height, self.width) > MOST_SIDE
        if large or max(self.height * self.width, side * side) > MOST_PIXELS:
            shorter = "" if self.shorter_side is None else f", shorter_side {self.shorter_side:,}"
            raise SettingsError(
                f"Preprocessing: height, width: expected at most {MOST_PIXELS:,} pixels, {MOST_SIDE:,} in a "
                f"side, got {self.height:,} x {self.width:,}{shorter}"
            )
        if len(self.mean) != len(self.std) or len(self.mean) not in (1, 3):
            got = f"{len(self.mean)} and {len(self.std)}"
            raise SettingsError(f"Preprocessing: mean, std: expected one number each, or three each, got {got}")
        if self.padding is not None and self.shorter_side is not None:
            raise SettingsError(
                f"Preprocessing: expected padding or shorter_side, got {self.padding} and {self.shorter_side}: an "
                "image that is padded is not cropped"
            )

    def __call__(self, images: Pixels | Sequence[Pixels]) -> Tensor:
        """Return the input of one image, or of several in one batch, (N, channels, height, width) float32."""
        several: Sequence[Pixels] = images if isinstance(images, (list, tuple)) else [images]  # type: ignore[list-item]
        if not several:
            raise DataError("preprocessing: expected at least one image, got none")
        return torch.stack([self.pixels(in_rgb(opened(image))) for image in several])

    def pixels(self, image: Image.Image) -> Tensor:
        """Return the input (channels, height, width) of a Pillow image in RGB."""
        from torchvision.transforms.v2.functional import pil_to_tensor

        image = self.cropped(image)
        values = pil_to_tensor(image).float() / self.white
        if image.size != (self.width, self.height):
            values = self.resized(values[None])[0]
        return self.normalized(values)

    def cropped(self, image: Image.Image) -> Image.Image:
        """Return an image with its shorter side resized, and its center cut out, or resized to fit and padded.

        It stays as it is if its size fits, or if it is resized as a whole.
        """
        if image.size == (self.width, self.height):
            return image
        if self.padding is not None:
            return self._padded(image, self.padding)
        if self.shorter_side is None:
            return image
        if self.shorter_side**2 * max(image.size) / min(image.size) > MOST_PIXELS:
            raise DataError(
                f"preprocessing: an image of {image.width:,} x {image.height:,} pixels would have more than "
                f"{MOST_PIXELS:,} with a shorter side of {self.shorter_side:,}"
            )
        from torchvision.transforms.v2.functional import center_crop

        smaller = _resize(image, [self.shorter_side], self.interpolation)
        return center_crop(smaller, [self.height, self.width])  # type: ignore[no-any-return]

    def placement(self, width: int, height: int) -> tuple[int, int, int, int]:
        """Return where an image of a size lies in a padded input: its left and top edge, width and height there."""
        scale = min(self.width / width, self.height / height)
        inside = max(1, round(width * scale)), max(1, round(height * scale))
        return (self.width - inside[0]) // 2, (self.height - inside[1]) // 2, *inside

    def in_image(self, boxes: Tensor, size: tuple[int, int]) -> Tensor:
        """Return boxes (n, 4) of a padded input as they are in the image, of a size (width, height), in its pixels."""
        left, top, width, height = self.placement(*size)
        scale = boxes.new_tensor([size[0] / width, size[1] / height] * 2)
        limits = boxes.new_tensor([*size, *size])
        return ((boxes - boxes.new_tensor([left, top, left, top])) * scale).clamp_min(0).minimum(limits)

    def _padded(self, image: Image.Image, padding: float) -> Image.Image:
        left, top, width, height = self.placement(*image.size)
        canvas = Image.new("RGB", (self.width, self.height), (round(255 * padding),) * 3)
        canvas.paste(_resize(image, [height, width], self.interpolation), (left, top))
        return canvas

    def resized(self, images: Tensor) -> Tensor:
        """Return images (B, C, H, W) of floating-point values resized as a whole."""
        if images.shape[-2:] == (self.height, self.width):
            return images
        if self.interpolation in ("bilinear", "bicubic"):
            shrinks = images.shape[-2] > self.height and images.shape[-1] > self.width
            return F.interpolate(
                images, (self.height, self.width), mode=self.interpolation, align_corners=False, antialias=shrinks
            )
        return _resize(images, [self.height, self.width], self.interpolation)  # type: ignore[no-any-return]

    def normalized(self, images: Tensor) -> Tensor:
        """Return images (..., C, H, W) of values in 0..1, in RGB or one channel, normalized: (..., channels, H, W)."""
        if self.channel_order == "bgr" and images.shape[-3] == 3:
            images = images.flip(-3)
        mean, std = torch.tensor(self.mean), torch.tensor(self.std)
        if len(self.mean) == 1 and images.shape[-3] == 3:
            weights = torch.tensor([0.299, 0.587, 0.114])  # ITU-R 601-2, as Pillow's mode L
            order = weights.flip(0) if self.channel_order == "bgr" else weights
            images = (images * order[:, None, None]).sum(-3, keepdim=True)
        return (images - mean[:, None, None]) / std[:, None, None]

    def as_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}

    @classmethod
    def from_dict(cls, given: Any, where: str) -> Preprocessing:
        """Return the preprocessing of plain data; an `ArtifactError` says `where` it is damaged."""
        try:
            if not isinstance(given, Mapping):
                raise TypeError(f"expected a mapping, got {type(given).__name__}")
            known: dict[str, Any] = {k: tuple(one) if isinstance(one, list) else one for k, one in given.items()}
            return cls(**known)
        except (TypeError, SettingsError) as error:
            raise ArtifactError(f"{where}: preprocessing: {error}") from error


class AttachedPreprocessing(Preprocessing):
    """The preprocessing that is an attribute of a loaded model.

    Where the model is pickled it becomes plain data, so that the pickle can be read where prunekit is not installed.
    """

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Preprocessing) and self.as_dict() == other.as_dict()

    __hash__ = Preprocessing.__hash__

    def __deepcopy__(self, memo: Any) -> AttachedPreprocessing:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (self.as_dict(),)


def _resize(image: Any, size: list[int], interpolation: str) -> Any:
    # not above: torchvision imports torch's compiler, longer than all that loads or times a model
    from torchvision.transforms.v2.functional import InterpolationMode, resize

    return resize(image, size, InterpolationMode(interpolation))


def in_rgb(image: Image.Image) -> Image.Image:
    """Return an image in RGB; it is decoded if it was only opened.

    Gray images of 16 bits are scaled to 8, where Pillow would clip values above 255.
    """
    if image.mode == "F":
        raise ValueError("its pixels are floating-point numbers; expected 8 or 16 bits")
    if image.mode.startswith("I"):  # I;16, its byte orders, and I, as which some 16-bit files are opened
        gray = np.asarray(image).astype(np.int64)
        if gray.size and (gray.min() < 0 or gray.max() > WHITE):
            raise ValueError(f"its pixels are from {gray.min()} to {gray.max()}; expected 8 or 16 bits")
        image = Image.fromarray(((gray * 255 + WHITE // 2) // WHITE).astype(np.uint8))
    return image.convert("RGB")


def opened(image: Pixels) -> Image.Image:
    """Return an image as a Pillow image, upright."""
    if isinstance(image, Image.Image):
        return image
    if isinstance(image, np.ndarray):
        if image.dtype != np.uint8 or image.ndim not in (2, 3) or (image.ndim == 3 and image.shape[2] != 3):
            raise DataError(
                f"preprocessing: expected uint8 pixels (H, W) or (H, W, 3), got {image.dtype} {image.shape}"
            )
        return Image.fromarray(image)
    path = Path(image)
    if not path.is_file():
        raise DataError(f"{path}: expected an image file, and {'it is a folder' if path.is_dir() else 'there is none'}")
    try:
        with Image.open(path) as file:
            return in_rgb(ImageOps.exif_transpose(file))
    except Exception as error:  # decoders raise OSError, SyntaxError, struct.error, EOFError and more
        reraise_shortage(error)
        reason = decoding_reason(error)
        if isinstance(decoding_error(error), UnidentifiedImageError):
            reason = "it is empty" if not path.stat().st_size else "it is of no format that Pillow reads"
        raise DataError(f"{path}: expected an image, such as a PNG or JPEG file, but {reason}") from error


def decoding_error(error: Exception) -> BaseException:
    """Return the error by which an image could not be decoded.

    Some packages wrap Pillow's `open`, such as ultralytics, which tries a decoder of its own where Pillow gives up.
    """
    return error.__context__ if isinstance(error, ModuleNotFoundError) and error.__context__ is not None else error


def decoding_reason(error: Exception) -> str:
    """Return why an image cannot be decoded, in one line."""
    first = decoding_error(error)
    return f"{type(first).__name__}: {first}"
