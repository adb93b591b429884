"""Processes that read batches ahead."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Generic, TypeVar

import torch
from torch.utils.data import DataLoader, Sampler
from torch.utils.data import Dataset as TorchDataset

from prunekit.settings.data import Workers

Task = TypeVar("Task")


class Readers(Generic[Task]):
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
        """What the tasks give, in their order."""
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
