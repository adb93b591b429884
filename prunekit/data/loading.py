"""Batches in an order that depends on nothing but the seed and the epoch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader
from torch.utils.data import Dataset as TorchDataset

from prunekit.data.datasets import ImageDataset
from prunekit.errors import DataError, UsageError

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Batches:
    """Sized, and the same batches every time it is iterated; made by `batches`."""

    dataset: ImageDataset
    batch_size: int
    shuffle_seed: int | None
    workers: int
    drop_last: bool
    indices: Tensor  # (N,) int64, which images
    epoch: int = 0

    def at_epoch(self, epoch: int) -> Batches:
        """The batches of another epoch: other order, same images."""
        return replace(self, epoch=epoch)

    def order(self) -> Tensor:
        """The images of this epoch in the order they come: (N,) int64."""
        if self.shuffle_seed is None:
            return self.indices
        generator = np.random.default_rng((self.shuffle_seed, self.epoch))
        return self.indices[torch.from_numpy(generator.permutation(len(self.indices)))]

    def __len__(self) -> int:
        whole, rest = divmod(len(self.indices), self.batch_size)
        return whole if self.drop_last or not rest else whole + 1

    @property
    def images(self) -> int:
        """How many images one pass gives."""
        return min(len(self) * self.batch_size, len(self.indices))

    def __iter__(self) -> Iterator[Batch]:
        chunks = torch.split(self.order(), self.batch_size)[: len(self)]
        if not self.workers:
            return map(self.dataset.fetch, chunks)
        return self._in_workers(chunks)

    def _in_workers(self, chunks: Sequence[Tensor]) -> Iterator[Batch]:
        # An own generator, or the loader would draw from the global one and the workers would change the training.
        loader = DataLoader(
            _Chunks(self.dataset, chunks),
            batch_size=None,
            num_workers=self.workers,
            generator=torch.Generator().manual_seed(0),
        )
        for item in loader:
            if isinstance(item, DataError):
                raise item
            yield item[0], item[1]


@dataclass(frozen=True)
class _Chunks(TorchDataset[Batch | DataError]):
    """What a worker process sees: item i is batch i."""

    dataset: ImageDataset
    chunks: Sequence[Tensor]

    def __len__(self) -> int:
        return len(self.chunks)

    def __getitem__(self, index: int) -> Batch | DataError:
        try:
            return self.dataset.fetch(self.chunks[index])
        except DataError as error:
            return DataError(str(error))  # raised in the parent: the loader would bury the message in a traceback


def batches(
    dataset: ImageDataset,
    batch_size: int,
    *,
    shuffle_seed: int | None,
    workers: int = 0,
    drop_last: bool = False,
    indices: Sequence[int] | Tensor | None = None,
) -> Batches:
    """Batches of a data set: images (B, C, H, W) float32 and labels (B,) int64.

    Args:
        dataset: where the images come from.
        batch_size: images in a batch; the last may have fewer.
        shuffle_seed: with the epoch (see `Batches.at_epoch`) decides the order; None keeps the data set's order.
        workers: processes that read ahead; 0 reads in this one. The batches are the same.
        drop_last: leaves a last batch out that is not full.
        indices: the images to use, in this order when not shuffled; None means all.

    Raises:
        UsageError: `batch_size` is not positive or `workers` negative.
        DataError: there is no image, or no full batch when `drop_last` is set.
    """
    if batch_size < 1 or workers < 0:
        raise UsageError(f"expected batch_size >= 1 and workers >= 0, got {batch_size} and {workers}")
    chosen = torch.arange(len(dataset)) if indices is None else torch.as_tensor(indices, dtype=torch.int64)
    result = Batches(dataset, batch_size, shuffle_seed, workers, drop_last, chosen)
    if not len(result):
        raise DataError(f"expected at least one batch of {batch_size} images, but there are {len(chosen)} images")
    return result
