"""Batches in an order that depends on nothing but the seed and the epoch.

Processes that read batches ahead.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Sampler
from torch.utils.data import Dataset as TorchDataset

from prunekit.data.augmentation import Mixing
from prunekit.data.datasets import SampleDataset
from prunekit.distributed.process_group import everyone
from prunekit.errors import DataError, UsageError
from prunekit.settings.inputs import Workers
from prunekit.utils.context import seed_all, seeded

Task = TypeVar("Task")


class WorkerPool(Generic[Task]):
    """Worker processes that are given tasks; they end when this object and what it reads are no longer used.

    Args:
        dataset: item `task` is what a task gives; every worker has a copy of it.
        workers: at least one.
        pin: whether tensors go to page-locked memory; needs CUDA.
    """

    def __init__(self, dataset: TorchDataset[Any], workers: Workers, pin: bool) -> None:
        self._dataset = dataset
        self._workers = workers
        self._pin = pin
        self._kept: tuple[DataLoader[Any], _Tasks[Task]] | None = None
        self._busy = False

    def read(self, tasks: Sequence[Task]) -> Iterator[Any]:
        """Yield what the tasks give, in their order."""
        if self._busy or not self._workers.persistent:  # workers that are kept make one pass at a time
            yield from self._loader(_Tasks(tasks), persistent=False)
            return
        if self._kept is None:
            order: _Tasks[Task] = _Tasks(())
            self._kept = self._loader(order, persistent=True), order
        loader, order = self._kept
        order.tasks, self._busy = tasks, True
        try:
            yield from loader
        except Exception:  # a worker died or raised what nobody expects: begin anew
            self._kept = None
            raise
        finally:
            self._busy = False

    def _loader(self, tasks: _Tasks[Task], *, persistent: bool) -> DataLoader[Any]:
        return DataLoader(
            self._dataset,
            sampler=tasks,  # an index is a whole task: so workers that stay learn of another epoch
            batch_size=None,
            num_workers=self._workers.count,
            prefetch_factor=self._workers.prefetch,
            persistent_workers=persistent,
            pin_memory=self._pin,
            generator=torch.Generator(),  # its own, or the loader would draw from the global one
        )


class _Tasks(Sampler[Task]):
    """The tasks of the next pass."""

    def __init__(self, tasks: Sequence[Task]) -> None:
        self.tasks = tasks

    def __iter__(self) -> Iterator[Task]:
        return iter(self.tasks)

    def __len__(self) -> int:
        return len(self.tasks)


Batch = tuple[Any, Any]
"""Inputs and targets: of images (B, C, H, W) float32 and (B,) int64; else whatever the task makes of them."""
T = TypeVar("T")


@dataclass(frozen=True)
class BatchShare:
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
class BatchRequest:
    """What one batch is made of.

    Attributes:
        indices: (B,) int64, which images.
        draw: seed, epoch and the batch's number in it.
        augment: whether images are changed at random.
        mixing: how they are mixed with each other.
        before: (0 or 1,) int64: of a share of a batch, the image that comes before it in the batch, which is a ring.
    """

    indices: Tensor
    draw: tuple[int, int, int]
    augment: bool
    mixing: Mixing | None
    before: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))

    @property
    def seed(self) -> int:
        """For what a user's data set draws itself: another one for each batch."""
        return int(np.random.default_rng(self.draw).integers(2**63))

    def fetch(self, dataset: SampleDataset) -> Batch:
        """Reads, augments and mixes; the labels of mixed images are (B, classes) float32."""
        draw = self.draw[:2] if self.augment else None
        images, labels = dataset.fetch(self.indices, draw)
        if self.mixing is None or not len(labels):
            return images, labels
        if not len(self.before):
            return self.mixing(images, labels, self.draw)
        other, label = dataset.fetch(self.before, draw)
        images, labels = self.mixing(torch.cat([other, images]), torch.cat([label, labels]), self.draw)
        return images[len(label) :], labels[len(label) :]


@dataclass(frozen=True)
class Batches:
    """Sized, and the same batches every time it is iterated; made by `batches`."""

    dataset: SampleDataset
    batch_size: int
    shuffle_seed: int | None
    drop_last: bool
    indices: Tensor  # (N,) int64, which images
    augment: bool = False
    mixing: Mixing | None = None
    readers: WorkerPool[BatchRequest] | None = None  # shared by the batches of all epochs
    epoch: int = 0
    start: int = 0  # batches that are left out, and their images not read
    share: BatchShare = BatchShare()

    def at_epoch(self, epoch: int, start: int = 0) -> Batches:
        """Return the batches of another epoch, other order, same images; those from number `start` on, counted from
        0.
        """
        return replace(self, epoch=epoch, start=start)

    def split(self, rank: int, of: int) -> Batches:
        """Return a process's part of the images of every batch; they are as many, give or take one, for each process.

        Where images cannot be read, a batch of which one process has too few left is left out by all of them: the
        processes exchange that, so all must go through their shares together.
        """
        return replace(self, share=BatchShare(rank, of, split=True))

    def dealt(self, rank: int, of: int) -> Batches:
        """Return every `of`-th batch, whole, from the one of number `rank`: each batch is in exactly one process's
        share.
        """
        return replace(self, share=BatchShare(rank, of))

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
        """Return those of which this process has a share."""
        return batches if self.share.split else batches[self.share.rank :: self.share.of]

    @property
    def images(self) -> int:
        """How many images one pass gives, over all processes, when all can be read."""
        return min(self._all * self.batch_size, len(self.indices))

    def __iter__(self) -> Iterator[Batch]:
        return (batch for _, batch in self.numbered())

    def numbered(self) -> Iterator[tuple[int, Batch]]:
        """Yield the batches with their numbers in the epoch, counted from 0; one that cannot be read leaves a gap."""
        numbers, chunks = self._shared(range(self.start, self._all)), list(self._chunks())
        # Corrupt images drop out of their batch; a training batch of which one is left has no variance for BatchNorm.
        fewest = 2 if self.drop_last and self.batch_size > 1 else 1
        given = 0
        read = self._here(chunks) if self.readers is None else self._in_workers(self.readers, chunks)
        for number, (images, labels) in zip(numbers, read, strict=True):
            enough = len(labels) >= fewest
            if everyone(enough) if self.share.split else enough:
                given += 1
                yield number, (images, labels)
        if chunks and not given and not self.start:
            raise DataError(f"expected a batch with at least {fewest} images that can be read, got none")

    def _chunks(self) -> Iterator[BatchRequest]:
        indices = torch.split(self.order(), self.batch_size)
        for number in self._shared(range(self.start, self._all)):
            part, before = indices[number], indices[number][:0]
            if self.share.split and self.share.of > 1:
                parts = torch.tensor_split(part, self.share.of)
                part, before = parts[self.share.rank], parts[self.share.rank - 1][-1:]
            yield BatchRequest(part, (self.shuffle_seed or 0, self.epoch, number), self.augment, self.mixing, before)

    def _here(self, chunks: Sequence[BatchRequest]) -> Iterator[Batch]:
        for chunk in chunks:
            with seeded(chunk.seed):
                batch = chunk.fetch(self.dataset)
            yield batch

    def _in_workers(self, readers: WorkerPool[BatchRequest], chunks: Sequence[BatchRequest]) -> Iterator[Batch]:
        for batch, corrupt in readers.read(chunks):
            self.dataset.corrupt.merge(corrupt)
            if isinstance(batch, DataError):
                raise batch
            yield batch[0], batch[1]


@dataclass(frozen=True)
class _RequestReader(TorchDataset[tuple[Batch | DataError, dict[str, str]]]):
    """What a worker process sees: a chunk gives its batch, and all images that this worker could not read so far."""

    dataset: SampleDataset

    def __getitem__(self, chunk: BatchRequest) -> tuple[Batch | DataError, dict[str, str]]:
        batch: Batch | DataError
        seed_all(chunk.seed)
        try:
            batch = chunk.fetch(self.dataset)
        except DataError as error:
            batch = DataError(str(error))  # raised in the parent: the loader would bury the message in a traceback
        return batch, dict(self.dataset.corrupt.found)  # the loader pickles it later, in a thread of its own


def batches(
    dataset: SampleDataset,
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
    """Return the batches of a data set: images (B, C, H, W) float32 and labels (B,) int64.

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
    readers: WorkerPool[BatchRequest] | None = WorkerPool(_RequestReader(dataset), how, pin) if how.count else None
    result = Batches(dataset, batch_size, shuffle_seed, drop_last, chosen, augment, mixing, readers)
    if not len(result):
        raise DataError(f"expected at least one batch of {batch_size} images, but there are {len(chosen)} images")
    return result
