"""Batches in an order that depends on nothing but the seed and the epoch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset as TorchDataset

from prunekit.context import seed_all, seeded
from prunekit.data.datasets import ImageDataset
from prunekit.data.mixing import Mixing
from prunekit.data.settings import Workers
from prunekit.data.workers import Readers
from prunekit.errors import DataError, UsageError

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Chunk:
    """What one batch is made of.

    Attributes:
        indices: (B,) int64, which images.
        draw: seed, epoch and the batch's number in it.
        augment: whether images are changed at random.
        mixing: how they are mixed with each other.
    """

    indices: Tensor
    draw: tuple[int, int, int]
    augment: bool
    mixing: Mixing | None

    @property
    def seed(self) -> int:
        """For what a user's data set draws itself: another one for each batch."""
        return int(np.random.default_rng(self.draw).integers(2**63))

    def fetch(self, dataset: ImageDataset) -> Batch:
        """Reads, augments and mixes; the labels of mixed images are (B, classes) float32."""
        images, labels = dataset.fetch(self.indices, self.draw[:2] if self.augment else None)
        return (images, labels) if self.mixing is None or not len(labels) else self.mixing(images, labels, self.draw)


@dataclass(frozen=True)
class Batches:
    """Sized, and the same batches every time it is iterated; made by `batches`."""

    dataset: ImageDataset
    batch_size: int
    shuffle_seed: int | None
    drop_last: bool
    indices: Tensor  # (N,) int64, which images
    augment: bool = False
    mixing: Mixing | None = None
    readers: Readers[Chunk] | None = None  # shared by the batches of all epochs
    epoch: int = 0
    start: int = 0  # batches that are left out, and their images not read

    def at_epoch(self, epoch: int, start: int = 0) -> Batches:
        """The batches of another epoch, other order, same images; those from number `start` on, counted from 0."""
        return replace(self, epoch=epoch, start=start)

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
        """How many images one pass gives when all can be read."""
        return min(len(self) * self.batch_size, len(self.indices))

    def __iter__(self) -> Iterator[Batch]:
        return (batch for _, batch in self.numbered())

    def numbered(self) -> Iterator[tuple[int, Batch]]:
        """The batches with their numbers in the epoch, counted from 0; one that cannot be read leaves a gap."""
        chunks = list(self._chunks())
        # Corrupt images drop out of their batch; a training batch of which one is left has no variance for BatchNorm.
        fewest = 2 if self.drop_last and self.batch_size > 1 else 1
        given = 0
        read = self._here(chunks) if self.readers is None else self._in_workers(self.readers, chunks)
        for number, (images, labels) in enumerate(read, self.start):
            if len(labels) >= fewest:
                given += 1
                yield number, (images, labels)
        if not given and not self.start:
            raise DataError(f"expected a batch with at least {fewest} images that can be read, got none")

    def _chunks(self) -> Iterator[Chunk]:
        indices = torch.split(self.order(), self.batch_size)[self.start : len(self)]
        for number, part in enumerate(indices, self.start):
            yield Chunk(part, (self.shuffle_seed or 0, self.epoch, number), self.augment, self.mixing)

    def _here(self, chunks: Sequence[Chunk]) -> Iterator[Batch]:
        for chunk in chunks:
            with seeded(chunk.seed):
                batch = chunk.fetch(self.dataset)
            yield batch

    def _in_workers(self, readers: Readers[Chunk], chunks: Sequence[Chunk]) -> Iterator[Batch]:
        for batch, corrupt in readers.read(chunks):
            self.dataset.corrupt.merge(corrupt)
            if isinstance(batch, DataError):
                raise batch
            yield batch[0], batch[1]


@dataclass(frozen=True)
class _Read(TorchDataset[tuple[Batch | DataError, dict[str, str]]]):
    """What a worker process sees: a chunk gives its batch, and all images that this worker could not read so far."""

    dataset: ImageDataset

    def __getitem__(self, chunk: Chunk) -> tuple[Batch | DataError, dict[str, str]]:
        batch: Batch | DataError
        seed_all(chunk.seed)
        try:
            batch = chunk.fetch(self.dataset)
        except DataError as error:
            batch = DataError(str(error))  # raised in the parent: the loader would bury the message in a traceback
        return batch, dict(self.dataset.corrupt.found)  # the loader pickles it later, in a thread of its own


def batches(
    dataset: ImageDataset,
    batch_size: int,
    *,
    shuffle_seed: int | None,
    workers: int | Workers = 0,
    drop_last: bool = False,
    indices: Sequence[int] | Tensor | None = None,
    augment: bool = False,
    mixing: Mixing | None = None,
    device: torch.device | None = None,
) -> Batches:
    """Batches of a data set: images (B, C, H, W) float32 and labels (B,) int64.

    Args:
        dataset: where the images come from.
        batch_size: images in a batch; the last may have fewer.
        shuffle_seed: with the epoch (see `Batches.at_epoch`) decides the order; None keeps the data set's order.
        workers: processes that read ahead, their number or how; 0 reads in this one. The batches are the same.
        drop_last: leaves a last batch out that is not full.
        indices: the images to use, in this order when not shuffled; None means all.
        augment: changes images at random as the data set's settings say, the same for the same `shuffle_seed`, epoch
            and image whatever `workers` is; for training alone.
        mixing: mixes the images of each batch, the same for the same `shuffle_seed`, epoch and number of the batch;
            labels are then the share of each class, (B, classes) float32.
        device: where the batches will go; they stay on the CPU, for CUDA in page-locked memory when workers read.

    Raises:
        UsageError: `batch_size` is not positive or `workers` negative.
        DataError: there is no image, or no full batch when `drop_last` is set.
    """
    how = workers if isinstance(workers, Workers) else Workers(workers)
    if batch_size < 1 or how.count < 0:
        raise UsageError(f"expected batch_size >= 1 and workers >= 0, got {batch_size} and {how.count}")
    chosen = torch.arange(len(dataset)) if indices is None else torch.as_tensor(indices, dtype=torch.int64)
    pin = how.pin_memory and device is not None and device.type == "cuda"
    readers: Readers[Chunk] | None = Readers(_Read(dataset), how, pin) if how.count else None
    result = Batches(dataset, batch_size, shuffle_seed, drop_last, chosen, augment, mixing, readers)
    if not len(result):
        raise DataError(f"expected at least one batch of {batch_size} images, but there are {len(chosen)} images")
    return result
