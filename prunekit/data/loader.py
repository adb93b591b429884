"""Batches in an order that depends on seed and epoch alone, read ahead by worker processes if asked."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader
from torch.utils.data import Dataset as TorchDataset

from prunekit.data.augmentation import Mixing
from prunekit.data.datasets import AnsweredImages, SampleDataset
from prunekit.distributed.process_group import everyone
from prunekit.errors import DataError, UsageError
from prunekit.settings.inputs import Workers
from prunekit.utils.context import seed_all, seeded

Task = TypeVar("Task")
T = TypeVar("T")
Batch = tuple[Any, Any]
"""Inputs and targets; of images (B, C, H, W) float32 and (B,) int64."""


@dataclass(frozen=True)
class BatchShare:
    """The share of the batches that a process has."""

    rank: int = 0  # of the process, from 0
    of: int = 1  # number of processes
    split: bool = False  # whether each process has some images of every batch; else it has some whole batches


@dataclass(frozen=True)
class BatchRequest:
    """A request for one batch, as worker processes get it."""

    indices: Tensor  # (B,) int64, which images
    draw: tuple[int, int, int]  # seed, epoch and the batch's number in it
    augment: bool  # whether images are augmented
    mixing: Mixing | None  # how they are mixed with each other
    # (0 or 1,) int64, for a share of a batch the image before it in the batch, cyclically, to mix with
    before: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    place: int = 0  # of the first image in the batch, for a share of one
    numbered: bool = False  # whether images come with their numbers in place of `AnsweredImages`' answers

    @property
    def seed(self) -> int:
        """Seed for what a user's data set draws itself; different for each batch."""
        return int(np.random.default_rng(self.draw).integers(2**63))

    def fetch(self, dataset: SampleDataset) -> Batch:
        """Return the batch, augmented and mixed; labels of mixed images are (B, classes) float32."""
        draw = self.draw[:2] if self.augment else None
        if self.numbered and isinstance(dataset, AnsweredImages):
            dataset = dataset.images
        images, labels = dataset.fetch(self.indices, draw)
        if self.mixing is None or not len(labels):
            return images, labels
        if not len(self.before):
            return self.mixing(images, labels, self.draw)
        other, label = dataset.fetch(self.before, draw)
        both = torch.cat([other, images]), torch.cat([label, labels])
        images, labels = self.mixing(*both, self.draw, self.place - len(label))
        return images[len(label) :], labels[len(label) :]


@dataclass(frozen=True)
class Batches:
    """Batches of a data set, the same at every iteration; made by `batches`."""

    dataset: SampleDataset
    batch_size: int
    shuffle_seed: int | None
    drop_last: bool
    indices: Tensor  # (N,) int64, which images
    augment: bool = False
    mixing: Mixing | None = None
    pool: WorkerPool[BatchRequest] | None = None  # shared by the batches of all epochs
    epoch: int = 0
    start: int = 0  # number of batches that are skipped without reading their images
    share: BatchShare = BatchShare()

    def at_epoch(self, epoch: int, start: int = 0) -> Batches:
        """Return the batches of another epoch, in another order, from number `start` on."""
        return replace(self, epoch=epoch, start=start)

    def split(self, rank: int, of: int) -> Batches:
        """Return a process's share of the images of every batch; shares differ by at most one image.

        If too few images of a share can be read, all processes leave the batch out: they tell each other, so all must
        iterate over their shares at the same time.
        """
        return replace(self, share=BatchShare(rank, of, split=True))

    def dealt(self, rank: int, of: int) -> Batches:
        """Return every `of`-th batch from number `rank` on, so that each batch is in the share of one process."""
        return replace(self, share=BatchShare(rank, of))

    def order(self) -> Tensor:
        """Return the images of this epoch in their order, (N,) int64."""
        if self.shuffle_seed is None:
            return self.indices
        generator = np.random.default_rng((self.shuffle_seed, self.epoch))
        return self.indices[torch.from_numpy(generator.permutation(len(self.indices)))]

    def __len__(self) -> int:
        return len(self._shared(range(self._all)))

    @property
    def _all(self) -> int:
        """Number of batches of all processes together."""
        whole, rest = divmod(len(self.indices), self.batch_size)
        return whole if self.drop_last or not rest else whole + 1

    def _shared(self, batches: Sequence[T]) -> Sequence[T]:
        """Return the batches of which this process has a share."""
        return batches if self.share.split else batches[self.share.rank :: self.share.of]

    @property
    def images(self) -> int:
        """Number of images of one pass over all processes, if all can be read."""
        return min(self._all * self.batch_size, len(self.indices))

    def __iter__(self) -> Iterator[Batch]:
        return (batch for _, batch in self.numbered())

    def numbered(self) -> Iterator[tuple[int, Batch]]:
        """Yield batches with their numbers in the epoch, from 0; one that cannot be read leaves a gap."""
        numbers, requests = self._shared(range(self.start, self._all)), list(self._requests())
        # Corrupt images are left out of their batch; BatchNorm has no variance for a training batch of one image.
        fewest = 2 if self.drop_last and self.batch_size > 1 else 1
        given = 0
        read = self._here(requests) if self.pool is None else self._in_workers(self.pool, requests)
        for number, (images, labels) in zip(numbers, read, strict=True):
            enough = len(labels) >= fewest
            if everyone(enough) if self.share.split else enough:
                given += 1
                yield number, (images, labels)
        if requests and not given and not self.start:
            raise DataError(f"expected a batch with at least {fewest} images that can be read, got none")

    def _requests(self) -> Iterator[BatchRequest]:
        indices = torch.split(self.order(), self.batch_size)
        for number in self._shared(range(self.start, self._all)):
            part, before, place = indices[number], indices[number][:0], 0
            if self.share.split and self.share.of > 1:
                parts = torch.tensor_split(part, self.share.of)
                part, before = parts[self.share.rank], parts[self.share.rank - 1][-1:]
                place = sum(map(len, parts[: self.share.rank]))
            draw = (self.shuffle_seed or 0, self.epoch, number)
            yield BatchRequest(part, draw, self.augment, self.mixing, before, place)

    def _here(self, requests: Sequence[BatchRequest]) -> Iterator[Batch]:
        for request in requests:
            with seeded(request.seed):
                batch = request.fetch(self.dataset)
            yield batch

    def _in_workers(self, pool: WorkerPool[BatchRequest], requests: Sequence[BatchRequest]) -> Iterator[Batch]:
        if isinstance(self.dataset, AnsweredImages):
            self._answer(self.dataset, pool, requests)
        for batch, corrupt in pool.read(requests):
            self.dataset.corrupt.merge(corrupt)
            if isinstance(batch, DataError):
                raise batch
            yield batch[0], batch[1]

    def _answer(
        self, dataset: AnsweredImages, pool: WorkerPool[BatchRequest], requests: Sequence[BatchRequest]
    ) -> None:
        """Find the answers that are missing for batches, because workers have no model."""
        dataset.answers.share_memory_()  # type: ignore[no-untyped-call]
        missing, asked = dataset.labels < 0, list[BatchRequest]()
        for request in requests:
            wanted = torch.cat([request.before, request.indices])
            if len(left := wanted[missing[wanted]]):
                asked.append(BatchRequest(left, request.draw, augment=False, mixing=None, numbered=True))
        for images, numbers in replace(self, dataset=dataset.images)._in_workers(pool, asked) if asked else ():
            dataset.add(images, numbers)


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
        shuffle_seed: determines the order together with the epoch, see `Batches.at_epoch`; None: the data set's order.
        workers: processes that read ahead, their number or settings; 0: none. The batches are the same.
        drop_last: whether a last batch that is not full is left out.
        indices: of the images to use, in this order unless shuffled; None: all.
        augment: whether images are augmented, the same for the same `shuffle_seed`, epoch and image; for training.
        mixing: mixes the images of each batch, the same for the same `shuffle_seed`, epoch and number of the batch;
            labels are then the share of each class, (B, classes) float32.
        device: that batches are for; they stay on the CPU, in page-locked memory if workers read for CUDA.
    """
    how = workers if isinstance(workers, Workers) else Workers(workers)
    if batch_size < 1 or how.count < 0:
        raise UsageError(f"expected batch_size >= 1 and workers >= 0, got {batch_size} and {how.count}")
    chosen = torch.arange(len(dataset)) if indices is None else torch.as_tensor(indices, dtype=torch.int64)
    pin = how.pin_memory and device is not None and device.type == "cuda"
    pool: WorkerPool[BatchRequest] | None = WorkerPool(_RequestReader(dataset), how, pin) if how.count else None
    result = Batches(dataset, batch_size, shuffle_seed, drop_last, chosen, augment, mixing, pool)
    if not len(result):
        raise DataError(f"expected at least one batch of {batch_size} images, but there are {len(chosen)} images")
    return result


@dataclass(frozen=True)
class _RequestReader(TorchDataset[tuple[Batch | DataError, dict[str, str]]]):
    """The data set of worker processes: from a request to its batch, and the worker's corrupt images so far."""

    dataset: SampleDataset

    def __getitem__(self, request: BatchRequest) -> tuple[Batch | DataError, dict[str, str]]:
        batch: Batch | DataError
        seed_all(request.seed)
        try:
            batch = request.fetch(self.dataset)
        except DataError as error:
            batch = DataError(str(error))  # raised in the parent, or the loader would put the message into a traceback
        return batch, dict(self.dataset.corrupt.found)  # a copy: the loader pickles it later in a thread


class WorkerPool(Generic[Task]):
    """Worker processes that read tasks; they end when this object and its iterators are no longer used.

    `dataset[task]` is the result of a task; every worker has a copy of the data set. With `pin`, which needs CUDA,
    tensors are put into page-locked memory.
    """

    def __init__(self, dataset: TorchDataset[Any], workers: Workers, pin: bool) -> None:
        self._dataset, self._workers, self._pin = dataset, workers, pin
        self._kept: tuple[DataLoader[Any], list[Task]] | None = None
        self._busy = False

    def read(self, tasks: Sequence[Task]) -> Iterator[Any]:
        """Yield the results of tasks in their order."""
        if self._busy or not self._workers.persistent:  # persistent workers make one pass at a time
            yield from self._loader(tasks, persistent=False)
            return
        if self._kept is None:
            order: list[Task] = []  # the tasks of the next pass
            self._kept = self._loader(order, persistent=True), order
        loader, order = self._kept
        order[:], self._busy = tasks, True
        try:
            yield from loader
        except Exception:  # a worker died or raised something unexpected: start new ones
            self._kept = None
            raise
        finally:
            self._busy = False

    def _loader(self, tasks: Sequence[Task], *, persistent: bool) -> DataLoader[Any]:
        return DataLoader(
            self._dataset,
            sampler=tasks,  # an index is a whole task, so that persistent workers get those of another epoch
            batch_size=None,
            num_workers=self._workers.count,
            prefetch_factor=self._workers.prefetch,
            persistent_workers=persistent,
            pin_memory=self._pin,
            generator=torch.Generator(),  # its own: the loader would draw from the global one
        )
