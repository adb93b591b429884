"""How far a run has come."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from torch import Tensor

from prunekit.distributed.exchange import gather
from prunekit.training.history import EpochRow


@dataclass
class Sums:
    """Loss, samples, and what the task counts, of an epoch so far."""

    loss: float = 0.0
    samples: int = 0
    counts: list[float] = field(default_factory=list)

    def add(self, loss: float, counts: Tensor, samples: int) -> None:
        """A batch's mean loss, its counts (K,), and how many samples it has."""
        self.loss += loss * samples
        self.samples += samples
        found = counts.tolist()
        self.counts = [a + b for a, b in zip(self.counts or [0.0] * len(found), found, strict=True)]

    def of_all(self) -> Sums:
        """The sums over all processes, of which some may have had no batch."""
        parts = gather(self)
        counts = [sum(each) for each in zip(*(part.counts for part in parts if part.counts), strict=True)]
        return Sums(sum(part.loss for part in parts), sum(part.samples for part in parts), counts)

    @property
    def mean_loss(self) -> float:
        return self.loss / self.samples


@dataclass
class Position:
    """The epoch that a run is in, how far it has come in it, and the epochs before.

    Attributes:
        epoch: counted from 1; one more than the last when the run is over.
        batch: batches of the epoch that are done with, those that could not be read among them.
        trained: those that were trained on.
        step: steps of the whole run, those skipped under float16's loss scale among them.
        made: steps of the epoch that were not skipped.
        lr: of the last step.
        seconds: that the epoch took so far.
        sums: of the epoch so far.
        rows: the epochs before.
    """

    epoch: int = 1
    batch: int = 0
    trained: int = 0
    step: int = 0
    made: int = 0
    lr: float = 0.0
    seconds: float = 0.0
    sums: Sums = field(default_factory=Sums)
    rows: tuple[EpochRow, ...] = ()

    def next_epoch(self, row: EpochRow, steps: int) -> None:
        """The epoch is over.

        Args:
            row: of the epoch.
            steps: of an epoch in which none is left out.
        """
        rows, epoch = (*self.rows, row), self.epoch + 1
        self.load_state_dict(asdict(Position(epoch, step=self.epoch * steps, rows=rows)))

    def state_dict(self) -> dict[str, Any]:
        """As plain data."""
        return asdict(self)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes the place of a state."""
        rows = tuple(EpochRow(**row) for row in state["rows"])
        vars(self).update(state, sums=Sums(**state["sums"]), rows=rows)

    def __str__(self) -> str:
        return f"epoch {self.epoch}, batch {self.batch}"
