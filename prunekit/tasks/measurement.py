"""Measurement of a task over batches: counts that are summed, or the task's metric."""

from __future__ import annotations

from typing import Any

import torch

from prunekit.distributed.process_group import gather_values, size
from prunekit.tasks.task import Task
from prunekit.utils.inputs import to_device
from prunekit.utils.tensors import accumulation_dtype


def added(counts: list[float], more: list[float]) -> list[float]:
    """Return sums of counts, (K,) each; either may be empty, as before the first batch."""
    return [a + b for a, b in zip(counts, more, strict=True)] if counts and more else counts or more


class DeviceSum:
    """A sum of vectors, kept where they are until it is taken: reading a number waits for the device.

    It is in float64, or float32 on MPS. On the CPU nothing waits, and each vector is read at once.
    """

    def __init__(self) -> None:
        self._read: list[float] = []
        self._sum: torch.Tensor | None = None

    def add(self, values: torch.Tensor, weight: float = 1) -> None:
        """Add a vector (K,) times its weight."""
        wide = values.detach().to(accumulation_dtype(values.device)) * weight
        if values.device.type == "cpu":
            self._read = added(self._read, wide.tolist())
        else:
            self._sum = wide if self._sum is None else self._sum + wide

    def take(self) -> list[float]:
        """Return the sum, (K,), or nothing if nothing was added, and begin again."""
        found = added(self._read, [] if self._sum is None else self._sum.tolist())
        self._read, self._sum = [], None
        return found


class Measurement:
    """The samples of a task that were measured so far.

    A metric of several processes is computed in each of them from the outputs of all: any metric can be, and what
    detectors return is small.

    Args:
        task: whose scores are measured.
        together: whether each process of a group measures its share, see `of_all`.

    Attributes:
        samples: number of samples.
    """

    def __init__(self, task: Task, *, together: bool = False) -> None:
        self.samples, self._counted, self._device, self._task = 0, list[float](), DeviceSum(), task
        self._metric = None if task.metric is None else task.metric()
        self._kept: list[tuple[Any, Any]] | None = [] if together and size() > 1 else None

    @property
    def counts(self) -> list[float]:
        """The sums of the task's counts, (K,); empty where a metric measures."""
        self._counted = added(self._counted, self._device.take())
        return self._counted

    def add(self, output: Any, targets: Any) -> None:
        """Add a batch: what `Task.scored` returned, and the targets."""
        self.samples += len(targets)
        if self._metric is None:
            assert self._task.counts is not None
            self._device.add(self._task.counts(output, targets))
        elif self._kept is None:
            self._metric.update(output, targets)
        else:
            self._kept.append(to_device((output, targets), torch.device("cpu")))

    def of_all(self) -> Measurement:
        """Return the measurement of all processes, some of which may have had no batch; all call this together."""
        if self._metric is not None and self._kept is None:
            return self
        found = Measurement(self._task)
        for samples, counts, kept in gather_values((self.samples, self.counts, self._kept)):
            found.samples += samples
            found._counted = added(found._counted, counts)
            for output, targets in kept or ():
                assert found._metric is not None
                found._metric.update(output, targets)
        return found

    def result(self) -> Any:
        """Return what the scores are read from: counts (K,) float64, or what the metric computes."""
        if self._metric is None:
            return torch.tensor(self.counts, dtype=torch.float64)
        return self._metric.compute()
