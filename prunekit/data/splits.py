"""Training, validation and test images: stratified, and the same for the same seed."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from prunekit.data.datasets import ImageDataset, SampleDataset, Subset
from prunekit.errors import DataError
from prunekit.tasks import IMAGE_CLASSIFICATION, Task


@dataclass(frozen=True)
class Splits:
    """What training, model selection and the final measurement see; no image is in two of them.

    Attributes:
        train: for training and calibration.
        validation: for choosing the best epoch.
        test: for the final measurement and nothing else.
        classes: name of each label.
        sample_shape: (C, H, W) of one image; of other tasks, the shape of a sample's first input.
        fingerprint: SHA-256 of the images, their labels, their split and how they are fed; hexadecimal.
        task: what they are for: how they are trained on, and what is measured.
    """

    train: SampleDataset
    validation: SampleDataset
    test: SampleDataset
    classes: tuple[str, ...]
    sample_shape: tuple[int, ...]
    fingerprint: str
    task: Task = IMAGE_CLASSIFICATION

    @property
    def corrupt(self) -> dict[str, str]:
        """Images that could not be read so far, by name with the reason."""
        return self.train.corrupt.found | self.validation.corrupt.found | self.test.corrupt.found


def split_off(
    dataset: ImageDataset, share: float, *, classes: Sequence[str], seed: int, where: str
) -> tuple[Subset, Subset]:
    """Splits a data set in two, each class in the same proportion, the order of the images kept.

    Args:
        dataset: what to split.
        share: share of every class that goes into the second part, 0..1; at least one image stays in each part.
        classes: name of each label, for messages.
        seed: which images are drawn.
        where: what the data is, for messages.

    Returns:
        The larger rest, and the part drawn.

    Raises:
        DataError: a class has fewer than two images.
    """
    labels = dataset.labels.numpy()
    generator = np.random.default_rng(seed)
    drawn = np.zeros(len(labels), dtype=bool)
    for label, name in enumerate(classes):
        members = np.flatnonzero(labels == label)
        if len(members) < 2:
            left = f"{len(members)} image{'s'[: len(members) != 1]} left"
            raise DataError(
                f"{where}: class {name!r} has {left}, and a stratified split needs at least 2 of "
                "each class (3 where validation and test are both drawn); add images or remove the class"
            )
        count = min(max(round(len(members) * share), 1), len(members) - 1)
        drawn[generator.permutation(members)[:count]] = True
    return Subset(dataset, _indices(~drawn)), Subset(dataset, _indices(drawn))


def _indices(chosen: np.ndarray) -> Tensor:
    return torch.from_numpy(np.flatnonzero(chosen))


def fingerprint(parts: Iterable[bytes]) -> str:
    """SHA-256 over byte strings, each preceded by its length so that none runs into the next."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.hexdigest()
