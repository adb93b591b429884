"""Batches in an order that depends on nothing but the seed and the epoch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader
from torch.utils.data import Dataset as TorchDataset

from prunekit.data.augment import Draw
from prunekit.data.datasets import ImageDataset
from prunekit.distributed.exchange import everyone
from prunekit.errors import DataError, UsageError

Batch = tuple[Tensor, Tensor]
T = TypeVar("T")


@dataclass(frozen=True)
class Share:
    """Which share of the batches a process has.

    Attributes:
        rank: its number, from 0.
        of: how many processes share them.
        split: whether each has some images of every batch; else it has some batches, whole.
    """

    rank: int = 0
    of: int = 1
    split: bool = False


@dataclass(frozen=True)
class Batches:
    """Sized, and the same batches every time it is iterated; made by `batches`."""

    dataset: ImageDataset
    batch_size: int
    shuffle_seed: int | None
    workers: int
    drop_last: bool
    indices: Tensor  # (N,) int64, which images
    augment: bool = False
    epoch: int = 0
    share: Share = Share()

    def at_epoch(self, epoch: int) -> Batches:
        """The batches of another epoch: other order, same images."""
        return replace(self, epoch=epoch)

    def split(self, rank: int, of: int) -> Batches:
        """A process's part of the images of every batch; they are as many, give or take one, for each process.

        Where images cannot be read, a batch of which one process has too few left is left out by all of them: the
        processes exchange that, so all must go through their shares together.
        """
        return replace(self, share=Share(rank, of, split=True))

    def dealt(self, rank: int, of: int) -> Batches:
        """Every `of`-th batch, whole, from the one of number `rank`: each batch is in exactly one process's share."""
        return replace(self, share=Share(rank, of))

    def order(self) -> Tensor:
        """The images of this epoch in the order they come: (N,) int64."""
        if self.shuffle_seed is None:
            return self.indices
        generator = np.random.default_rng((self.shuffle_seed, self.epoch))
        return self.indices[torch.from_numpy(generator.permutation(len(self.indices)))]

    def __len__(self) -> int:
        return len(self._shared(range(self._all)))

    @property
    def _all(self) -> int:
        """How many batches all processes have together."""
        whole, rest = divmod(len(self.indices), self.batch_size)
        return whole if self.drop_last or not rest else whole + 1

    def _shared(self, batches: Sequence[T]) -> Sequence[T]:
        """Those of which this process has a share."""
        return batches if self.share.split else batches[self.share.rank :: self.share.of]

    @property
    def images(self) -> int:
        """How many images one pass gives, over all processes, when all can be read."""
        return min(self._all * self.batch_size, len(self.indices))

    def __iter__(self) -> Iterator[Batch]:
        chunks = self._shared(torch.split(self.order(), self.batch_size)[: self._all])
        if self.share.split:
            chunks = [torch.tensor_split(chunk, self.share.of)[self.share.rank] for chunk in chunks]
        # Corrupt images drop out of their batch; a training batch of which one is left has no variance for BatchNorm.
        fewest = 2 if self.drop_last and self.batch_size > 1 else 1
        given = 0
        for images, labels in self._in_workers(chunks) if self.workers else self._here(chunks):
            enough = len(labels) >= fewest
            if everyone(enough) if self.share.split else enough:
                given += 1
                yield images, labels
        if chunks and not given:
            raise DataError(f"expected a batch with at least {fewest} images that can be read, got none")

    def _here(self, chunks: Sequence[Tensor]) -> Iterator[Batch]:
        return (self.dataset.fetch(chunk, self._draw) for chunk in chunks)

    def _in_workers(self, chunks: Sequence[Tensor]) -> Iterator[Batch]:
        # An own generator, or the loader would draw from the global one and the workers would change the training. It
        # seeds the workers, and with them what a user's data set draws itself: something else in each epoch.
        seed = int(np.random.default_rng((self.shuffle_seed or 0, self.epoch)).integers(2**63))
        loader = DataLoader(
            _Chunks(self.dataset, chunks, self._draw),
            batch_size=None,
            num_workers=self.workers,
            generator=torch.Generator().manual_seed(seed),
        )
        for batch, corrupt in loader:
            self.dataset.corrupt.merge(corrupt)
            if isinstance(batch, DataError):
                raise batch
            yield batch[0], batch[1]

    @property
    def _draw(self) -> Draw | None:
        return (self.shuffle_seed or 0, self.epoch) if self.augment else None


@dataclass(frozen=True)
class _Chunks(TorchDataset[tuple[Batch | DataError, dict[str, str]]]):
    """What a worker process sees: item i is batch i, and all images that this worker could not read so far."""

    dataset: ImageDataset
    chunks: Sequence[Tensor]
    draw: Draw | None

    def __len__(self) -> int:
        return len(self.chunks)

    def __getitem__(self, index: int) -> tuple[Batch | DataError, dict[str, str]]:
        batch: Batch | DataError
        try:
            batch = self.dataset.fetch(self.chunks[index], self.draw)
        except DataError as error:
            batch = DataError(str(error))  # raised in the parent: the loader would bury the message in a traceback
        return batch, dict(self.dataset.corrupt.found)  # the loader pickles it later, in a thread of its own


def batches(
    dataset: ImageDataset,
    batch_size: int,
    *,
    shuffle_seed: int | None,
    workers: int = 0,
    drop_last: bool = False,
    indices: Sequence[int] | Tensor | None = None,
    augment: bool = False,
) -> Batches:
    """Batches of a data set: images (B, C, H, W) float32 and labels (B,) int64.

    Args:
        dataset: where the images come from.
        batch_size: images in a batch; the last may have fewer.
        shuffle_seed: with the epoch (see `Batches.at_epoch`) decides the order; None keeps the data set's order.
        workers: processes that read ahead; 0 reads in this one. The batches are the same.
        drop_last: leaves a last batch out that is not full.
        indices: the images to use, in this order when not shuffled; None means all.
        augment: changes images at random as the data set's settings say, the same for the same `shuffle_seed`, epoch
            and image whatever `workers` is; for training alone.

    Raises:
        UsageError: `batch_size` is not positive or `workers` negative.
        DataError: there is no image, or no full batch when `drop_last` is set.
    """
    if batch_size < 1 or workers < 0:
        raise UsageError(f"expected batch_size >= 1 and workers >= 0, got {batch_size} and {workers}")
    chosen = torch.arange(len(dataset)) if indices is None else torch.as_tensor(indices, dtype=torch.int64)
    result = Batches(dataset, batch_size, shuffle_seed, workers, drop_last, chosen, augment)
    if not len(result):
        raise DataError(f"expected at least one batch of {batch_size} images, but there are {len(chosen)} images")
    return result
