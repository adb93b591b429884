"""Augmentation of single images by torchvision's transforms, the same for the same seed, epoch and image."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import TypeVar

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torchvision.transforms import v2

from prunekit.data.settings import Augment

Draw = tuple[int, int]
"""Seed and epoch that random augmentation depends on, besides the image's index."""

Pixels = TypeVar("Pixels", Tensor, Image.Image)
TRANSFORMS: dict[str, Callable[[int], Sequence[v2.Transform]]] = {
    "none": lambda size: [v2.Identity()],
    "shift": lambda size: [v2.RandomCrop(size, padding=size // 10, padding_mode="edge")],
    "flip": lambda size: [v2.RandomHorizontalFlip()],
    "crop_flip": lambda size: [v2.RandomCrop(size, padding=4), v2.RandomHorizontalFlip()],
    "resized_crop_flip": lambda size: [v2.RandomResizedCrop(size, antialias=True), v2.RandomHorizontalFlip()],
}
RESIZING = frozenset({"resized_crop_flip"})
"""Those that take an image of any size; the others take one of the final size."""


def augmented(image: Pixels, augment: Augment, size: int, draw: Draw, index: int) -> Pixels:
    """One image changed at random; torch's random state is afterwards what it was.

    Args:
        image: (C, H, W) or a Pillow image.
        augment: which change.
        size: height and width of the result.
        draw: seed and epoch.
        index: of the image in its data set.
    """
    seed = _seed(draw, index)
    with torch.random.fork_rng(devices=[]):  # the transforms draw from the CPU's generator alone
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would start CUDA's anew as well
        return _transform(augment, size)(image)  # type: ignore[no-any-return]


@contextmanager
def drawing(draw: Draw | None) -> Iterator[Callable[[int], None]]:
    """Makes what a data set of the user's draws at random for an image depend on seed, epoch and index alone.

    So it is the same for any number of workers, and in a run that goes on in the middle of an epoch. Yields what is
    called with an image's index before it is read; afterwards the states of Python's, NumPy's and torch's generators
    (CPU) are what they were.

    Args:
        draw: seed and epoch; None changes nothing.
    """
    if draw is None:
        yield lambda index: None
        return

    def begin(index: int) -> None:
        seed = _seed(draw, index)
        random.seed(seed)
        np.random.seed(seed % 2**32)
        torch.default_generator.manual_seed(seed)

    python, numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        try:
            yield begin
        finally:
            random.setstate(python)
            np.random.set_state(numpy)


def _seed(draw: Draw, index: int) -> int:
    return int(np.random.SeedSequence((*draw, index)).generate_state(1, np.uint64)[0])


@cache
def _transform(augment: Augment, size: int) -> v2.Transform:
    return v2.Compose(list(TRANSFORMS[augment](size)))
