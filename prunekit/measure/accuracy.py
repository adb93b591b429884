"""Accuracy: the scores of a model at its task, counted exactly."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from prunekit.errors import DataError
from prunekit.tasks.batches import ModelBatches
from prunekit.tasks.task import Measurement, Task, get_task
from prunekit.utils.context import training_mode
from prunekit.utils.inputs import call, described, to_device


@dataclass(frozen=True)
class Scores:
    """The scores of a model at a task."""

    values: dict[str, float]  # every score by name, in percent, the main one first
    n_test: int  # number of samples
    # (K,) sums that the scores are computed from; the first has the hits, if the main score is a proportion. Empty
    # where a metric measures.
    counts: tuple[float, ...]
    interval: tuple[float, float] | None  # 95 % interval of the main score, in percent; None if it has none
    # main score of a model that always answers the most frequent class, in percent; None if unknown
    chance: float | None = None
    unit: str = "%"  # of the main score
    lower_is_better: bool = False  # whether less of the main score is better

    @property
    def at_chance(self) -> bool:
        """True if the main score may be chance, so that comparing it says nothing."""
        if self.chance is None:
            return False
        low, high = self.interval or [next(iter(self.values.values()))] * 2
        return high >= self.chance if self.lower_is_better else low <= self.chance

    def figures(self) -> dict[str, Any]:
        """Return plain data: the scores by name and `n_test`.

        With an interval also `low` and `high`, for a proportion `correct`; if chance is known, `chance` and
        `at_chance`.
        """
        found: dict[str, Any] = {**self.values, "n_test": self.n_test}
        if self.interval is not None:
            low, high = self.interval
            found |= {"correct": int(self.counts[0])} if self.counts else {}
            found |= {"low": low, "high": high}
        if self.chance is not None:
            found |= {"chance": self.chance, "at_chance": self.at_chance}
        return found


def evaluate(
    model: nn.Module, batches: Any, task: Task | str, device: torch.device, *, together: bool = False
) -> Scores:
    """Return every score of a task, in eval mode and without gradients; the model stays on `device`, in its mode.

    Batches are pairs of inputs and targets, as `prunekit.prune` takes them. With `together`, all processes of a group
    call this, each with its share of the batches, to count all samples; no sample may be in two shares.

    Raises:
        DataError: there are no samples, or no targets.
    """
    task = get_task(task)
    measured = Measurement(task, together=together)
    model.to(device)
    with training_mode(model, False), torch.inference_mode():
        for pair in ModelBatches(model, batches, where="accuracy"):
            inputs, targets = to_device(pair, device)
            if targets is None:
                raise DataError(f"accuracy: expected {task.samples} with targets, got {described(inputs)} alone")
            measured.add(task.scored(model, inputs, call(model, inputs)), targets)
    found = measured.of_all() if together else measured
    if not found.samples:
        raise DataError(f"accuracy: expected at least one {task.samples.removesuffix('s')}, got none")
    read = found.result()
    interval, chance = task.main.interval, task.main.chance
    ends = None if interval is None else interval(read)
    guessed = None if chance is None else chance(read)
    main = task.main
    return Scores(task.score(read), found.samples, tuple(found.counts), ends, guessed, main.unit, main.lower_is_better)
