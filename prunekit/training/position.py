"""How far a run has come."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from torch import Tensor

from prunekit.distributed.exchange import total
from prunekit.training.history import EpochRow


@dataclass
class Sums:
    """Loss, hits and images of an epoch so far; a mixed image counts as a hit by the share of the class predicted."""

    loss: float = 0.0
    correct: float = 0.0
    images: int = 0

    def add(self, loss: float, output: Tensor, labels: Tensor) -> None:
        """A batch's mean loss, its logits (B, classes), and its labels: (B,) int64 or shares (B, classes)."""
        predicted = output.argmax(1)
        hits = predicted == labels if labels.ndim == 1 else labels.gather(1, predicted[:, None])
        self.loss += loss * len(labels)
        self.correct += hits.sum().item()
        self.images += len(labels)

    def of_all(self) -> Sums:
        """The sums over all processes."""
        loss, correct, images = total(self.loss, self.correct, self.images)
        return Sums(loss, correct, int(images))

    @property
    def mean_loss(self) -> float:
        return self.loss / self.images

    @property
    def top1(self) -> float:
        return 100 * self.correct / self.images


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
