"""Images with the boxes of their objects: what readers of a format return, and the data set that makes inputs of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F
from torchvision import tv_tensors
from torchvision.ops import clip_boxes_to_image
from torchvision.transforms import v2
from torchvision.transforms.v2.functional import horizontal_flip, pil_to_tensor

from prunekit.data.augmentation import NAMED, Draw, drawn_from
from prunekit.data.datasets import CorruptImages, Indexable
from prunekit.errors import DataError, UsageError
from prunekit.models.preprocessing import Preprocessing
from prunekit.settings.inputs import Augment, AugmentSettings

Target = dict[str, Tensor]


@dataclass(frozen=True, eq=False)
class Objects:
    """The objects in an image."""

    boxes: Tensor  # (n, 4) float32, left, top, right and bottom in pixels
    labels: Tensor  # (n,) int64, from 0
    crowds: Tensor  # (n,) int64, 1 for a group of objects that are not told apart
    masks: Tensor | None = None  # (n, H, W) uint8, 1 within an object; None: not read
    # (n, K, 3) float32, x and y in pixels, and 0 for unknown, 1 for hidden, 2 for visible; None: not read
    keypoints: Tensor | None = None

    def __len__(self) -> int:
        return len(self.labels)

    def parts(self) -> dict[str, Tensor]:
        """Return the tensors that are there, by name; each has the objects on its first axis."""
        return {name: value for name, value in vars(self).items() if value is not None}

    def changed(self, change: Callable[[Tensor], Tensor]) -> Objects:
        """Return the objects with a function applied to each tensor."""
        return replace(self, **{name: change(value) for name, value in self.parts().items()})

    def inside(self, width: int, height: int, least: float = 0.0) -> Objects:
        """Return the objects whose boxes, clipped to an image's size, are larger than `least` in both directions.

        Keypoints outside of the image become unknown.
        """
        boxes = clip_boxes_to_image(self.boxes, (height, width))
        points = self.keypoints
        if points is not None:
            there = (points[..., 0] >= 0) & (points[..., 0] < width) & (points[..., 1] >= 0) & (points[..., 1] < height)
            points = points * (there & (points[..., 2] > 0))[..., None]
        large = ((boxes[:, 2:] - boxes[:, :2]) > least).all(1)
        found = replace(self, boxes=boxes, keypoints=points)
        return found if bool(large.all()) else found.changed(lambda values: values[large])

    def target(self) -> Target:
        """Return the target of a detector, see `prunekit.tasks.detection.Targets`."""
        named = {"crowds": "iscrowd"}
        return {named.get(name, name): value for name, value in self.parts().items()}


class AnnotatedImages(Protocol):
    """Images with their objects, as a reader of a format has them."""

    @property
    def classes(self) -> tuple[str, ...]:
        """Name of each class."""

    @property
    def flipped_points(self) -> tuple[int, ...]:
        """For each keypoint the one that takes its place in a mirrored image, as left for right; empty: itself."""

    def __len__(self) -> int: ...

    def name(self, index: int) -> str:
        """Return the name of an image for messages."""

    def read(self, index: int) -> tuple[Image.Image, Objects]:
        """Return an image in RGB and its objects; any error but `DataError` marks a corrupt image."""


class ImageFiles:
    """Base of annotated images that are files."""

    paths: tuple[Path, ...]

    def __len__(self) -> int:
        return len(self.paths)

    def name(self, index: int) -> str:
        """Return the path of an image."""
        return str(self.paths[index])


@dataclass(frozen=True, eq=False)
class BoxedImages(Indexable):
    """A data set of images with boxes: every image is resized to fit, and padded to one size."""

    images: AnnotatedImages
    preprocessing: Preprocessing  # with padding
    augmentation: BoxAugmentation  # of training images
    indices: Tensor  # (N,) int64, which of the images
    corrupt: CorruptImages = field(default_factory=CorruptImages)

    def __len__(self) -> int:
        return len(self.indices)

    def fetch(self, indices: Tensor, draw: Draw | None = None) -> tuple[Tensor, list[Target]]:
        """Return a batch: images (B, 3, H, W) float32 of values 0..1, and their targets, without corrupt images."""
        read = [found for index in self.indices[indices].tolist() if (found := self._try(index, draw)) is not None]
        if not read:
            return torch.empty(0, 3, self.preprocessing.height, self.preprocessing.width), []
        return torch.stack([image for image, _ in read]), [objects.target() for _, objects in read]

    def _try(self, index: int, draw: Draw | None) -> tuple[Tensor, Objects] | None:
        found = None
        with self.corrupt.noting(self.images.name(index)):
            found = self.images.read(index)
        if found is None or draw is None:
            return None if found is None else self._fitted(*found)
        (image, objects), change = found, self.augmentation
        with drawn_from(*draw, index):
            image, parts = change.of_image(image, objects.parts(), self.images.flipped_points)
            objects = Objects(**parts).inside(*image.size, least=1.0)
            pixels, objects = self._fitted(image, objects)
            pixels, parts = change.of_input(pixels, objects.parts())
        return pixels, Objects(**parts).inside(self.preprocessing.width, self.preprocessing.height, least=0.5)

    def _fitted(self, image: Image.Image, objects: Objects) -> tuple[Tensor, Objects]:
        feed = self.preprocessing
        pixels = feed.normalized(pil_to_tensor(feed.cropped(image)).float() / feed.white)
        return pixels, placed(objects, image.size, feed)


def placed(objects: Objects, size: tuple[int, int], feed: Preprocessing) -> Objects:
    """Return the objects of an image of a size (width, height) as they are in the padded input."""
    if size == (feed.width, feed.height):
        return objects
    left, top, width, height = feed.placement(*size)
    scale = torch.tensor([width / size[0], height / size[1]])
    offset = torch.tensor([float(left), float(top)])
    boxes = objects.boxes * scale.repeat(2) + offset.repeat(2)
    points, masks = objects.keypoints, objects.masks
    if points is not None:
        points = torch.cat([points[..., :2] * scale + offset, points[..., 2:]], -1)
        points = points * (points[..., 2:] > 0)
    if masks is not None:
        smaller = masks.new_zeros(0, height, width)
        if len(masks):
            smaller = F.interpolate(masks[None].float(), (height, width), mode="nearest-exact")[0].to(masks.dtype)
        masks = F.pad(smaller, (left, feed.width - left - width, top, feed.height - top - height))
    return replace(objects, boxes=boxes, keypoints=points, masks=masks)


def checked_boxes(
    boxes: np.ndarray[Any, Any], sizes: np.ndarray[Any, Any], where: str
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any], list[str]]:
    """Clip boxes (M, 4) to their images, of sizes (M, 2), and find those without area.

    Returns the clipped boxes, which of them stay, (M,) bool, and notes on what was changed.
    """
    finite = np.isfinite(boxes).all(1)
    limits = np.concatenate([sizes, sizes], 1)
    clipped = np.clip(np.where(finite[:, None], boxes, 0), 0, limits)
    stays: np.ndarray[Any, Any] = np.all(clipped[:, 2:] > clipped[:, :2], axis=1)
    beyond = int(((np.abs(clipped - np.where(finite[:, None], boxes, 0)) > 0.01 * limits).any(1) & stays).sum())
    lost, notes = int((~stays).sum()), []
    if lost:
        notes.append(f"{where}: {lost} of {len(boxes)} boxes are empty or outside of their image, and left out")
    if beyond:
        notes.append(f"{where}: {beyond} of {len(boxes)} boxes reach beyond their image, and are clipped to it")
    return clipped, stays, notes


def require_boxes(count: int, images: int, where: str, hint: str) -> None:
    """Raise a `DataError` if a data set has no box at all."""
    if not count:
        raise DataError(f"{where}: expected boxes, and none of {images} images has any; {hint}")


def mirrored_points(names: Mapping[int, str] | tuple[str, ...]) -> tuple[int, ...]:
    """Return for each keypoint the number of that on the other side, by their names: `left_eye` for `right_eye`."""
    known = list(names.values() if isinstance(names, Mapping) else names)
    other = {name: name.replace("left", "\0").replace("right", "left").replace("\0", "right") for name in known}
    return tuple(known.index(other[name]) if other[name] in known else index for index, name in enumerate(known))


SIDES = (0.3, 1.0)
"""Shortest and longest side of a random crop as shares of the image's, as in SSD (Liu et al. 2016)."""
Parts = dict[str, Tensor]
"""Objects of an image, see `prunekit.data.annotated_images.Objects.parts`."""


@dataclass(frozen=True)
class BoxAugmentation:
    """Random changes of images with boxes.

    A `resized` crop is that of SSD (Liu et al. 2016): half of the images are made part of a larger, gray one, and then
    a part that overlaps some box is cut out.
    """

    settings: AugmentSettings  # of the changes
    gray: float  # value of padding, 0..1

    @classmethod
    def of(cls, augment: Augment, gray: float) -> BoxAugmentation:
        """Return the changes of a named augmentation or of settings."""
        settings = augment if isinstance(augment, AugmentSettings) else NAMED[augment]
        for name in ("rand_augment", "trivial_augment"):
            if getattr(settings, name):
                raise UsageError(
                    f"data.augment.{name}: expected none for images with boxes, because its operations would move "
                    "objects and leave their boxes; set crop, flip, color_jitter or erase"
                )
        return cls(settings, gray)

    def of_image(self, image: Image.Image, objects: Parts, flipped: tuple[int, ...]) -> tuple[Image.Image, Parts]:
        """Return an image of any size and its objects after random colors, crop and flip.

        Objects have at least `boxes` (n, 4); those without area are outside of the image now.
        """
        if (jitter := self.settings.color_jitter) is not None:
            image = v2.ColorJitter(jitter.brightness, jitter.contrast, jitter.saturation, jitter.hue)(image)
        if self.settings.crop == "resized":
            shares = self.settings.scale
            least, most = SIDES if shares is None else (math.sqrt(shares[0]), math.sqrt(shares[1]))
            fill = {Image.Image: [round(255 * self.gray)] * 3, tv_tensors.Mask: 0}
            crop = v2.Compose([v2.RandomZoomOut(fill, p=0.5), v2.RandomIoUCrop(least, most)])
            image, objects = _moved(crop, image, objects)
        if self.settings.flip and float(torch.rand(())) < self.settings.flip:
            image, objects = _moved(horizontal_flip, image, objects)
            if "keypoints" in objects and flipped:
                objects = {**objects, "keypoints": objects["keypoints"][:, list(flipped)]}
        return image, objects

    def of_input(self, pixels: Tensor, objects: Parts) -> tuple[Tensor, Parts]:
        """Return an input (3, H, W) of its final size and its objects after a random shift and erasing."""
        size, crop = tuple(pixels.shape[-2:]), self.settings.crop
        if crop in ("shift", "padded"):
            by = size[0] // 10 if crop == "shift" else 4
            fill = {tv_tensors.Image: self.gray, tv_tensors.Mask: 0}
            moved, objects = _moved(v2.RandomCrop(size, padding=by, fill=fill), tv_tensors.Image(pixels), objects)
            pixels = moved.as_subclass(Tensor)
        if self.settings.erase:
            pixels = v2.RandomErasing(p=self.settings.erase, value=self.gray)(pixels)
        return pixels, objects


def _moved(transform: Any, image: Any, objects: Parts) -> tuple[Any, Parts]:
    """Return an image and its objects after a transform of both."""
    size = (image.height, image.width) if isinstance(image, Image.Image) else tuple(image.shape[-2:])
    known: dict[str, Any] = {"boxes": tv_tensors.BoundingBoxes(objects["boxes"], format="XYXY", canvas_size=size)}
    if "masks" in objects:
        known["masks"] = tv_tensors.Mask(objects["masks"])
    if "keypoints" in objects:
        known["keypoints"] = tv_tensors.KeyPoints(objects["keypoints"][..., :2], canvas_size=size)
    if isinstance(transform, v2.Transform):
        image, known = transform(image, known)
    else:
        image, known = transform(image), {name: transform(value) for name, value in known.items()}
    plain = {name: value.as_subclass(Tensor) for name, value in known.items()}
    if "keypoints" in plain:
        plain["keypoints"] = torch.cat([plain["keypoints"], objects["keypoints"][..., 2:]], -1)
    return image, objects | plain
