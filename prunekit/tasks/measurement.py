"""Measurement of a task over batches: counts that are summed, or the task's metric."""

from __future__ import annotations

from typing import Any

import torch

from prunekit.distributed.process_group import gather_values, size
from prunekit.tasks.task import Task
from prunekit.utils.inputs import to_device


def added(counts: list[float], more: list[float]) -> list[float]:
    """Return sums of counts, (K,) each; either may be empty, as before the first batch."""
    return [a + b for a, b in zip(counts, more, strict=True)] if counts and more else counts or more


class Measurement:
    """The samples of a task that were measured so far.

    A metric of several processes is computed in each of them from the outputs of all: any metric can be, and what
    detectors return is small.

    Args:
        task: whose scores are measured.
        together: whether each process of a group measures its share, see `of_all`.

    Attributes:
        samples: number of samples.
        counts: (K,) sums of the task's counts; empty where a metric measures.
    """

    def __init__(self, task: Task, *, together: bool = False) -> None:
        self.samples, self.counts, self._task = 0, list[float](), task
        self._metric = None if task.metric is None else task.metric()
        self._kept: list[tuple[Any, Any]] | None = [] if together and size() > 1 else None

    def add(self, output: Any, targets: Any) -> None:
        """Add a batch: what `Task.scored` returned, and the targets."""
        self.samples += len(targets)
        if self._metric is None:
            assert self._task.counts is not None
            found = self._task.counts(output, targets).tolist()
            self.counts = added(self.counts, found)
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
            found.counts = added(found.counts, counts)
            for output, targets in kept or ():
                assert found._metric is not None
                found._metric.update(output, targets)
        return found

    def result(self) -> Any:
        """Return what the scores are read from: counts (K,) float64, or what the metric computes."""
        if self._metric is None:
            return torch.tensor(self.counts, dtype=torch.float64)
        return self._metric.compute()
