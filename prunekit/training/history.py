"""What happened in each epoch.

How far a run has come.

Memory that is too small for a batch: known for what it is, and said with the size of the batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import torch
from torch import Tensor

from prunekit.distributed.process_group import gather_values, size
from prunekit.errors import MemoryShortageError


@dataclass(frozen=True)
class EpochRow:
    """One epoch.

    Attributes:
        epoch: counted from 1.
        lr: learning rate of the epoch's last step.
        train_loss: mean over the images trained on, label smoothing, auxiliary heads and distillation included.
        train_score: the task's main score, percent, in train mode and while the weights change; of a mixed image
            (mixup, CutMix) the share of the class that is predicted counts.
        validation_loss: mean of the task's loss over the validation samples, without label smoothing, of the average of
            weights if there is one.
        validation_score: percent.
        images_per_s: training samples per second, validation left out.
        seconds: of the whole epoch.
        skipped: steps that were not made, because float16 gradients overflowed or whole batches could not be read.
        score: name of the score: `top1` of classifiers.
    """

    epoch: int
    lr: float
    train_loss: float
    train_score: float
    validation_loss: float
    validation_score: float
    images_per_s: float
    seconds: float
    skipped: int
    score: str = "top1"

    def figures(self) -> dict[str, Any]:
        """As a row of a table, whose columns are named for the score: `train_top1`, `validation_top1`."""
        return dict(zip(columns(self.score), list(asdict(self).values())[:-1], strict=True))


def columns(score: str) -> tuple[str, ...]:
    """Return the columns of `EpochRow.figures`."""
    return tuple(each.name.replace("_score", f"_{score}") for each in fields(EpochRow) if each.name != "score")


@dataclass(frozen=True)
class ClampRow:
    """How often a gradient clamp was needed at one module.

    Attributes:
        clamp: which of the two.
        module: its path.
        by: value or norm.
        limit: for the unscaled gradient.
        share: of the values (by norm: of the gradients) that were beyond the limit, 0..1.
    """

    clamp: str
    module: str
    by: str
    limit: float
    share: float


@dataclass(frozen=True)
class Compilation:
    """What came of compiling the training steps of a run.

    Attributes:
        graphs: how many were compiled; more than one where shapes or hooks changed.
        seconds: what compiling took, the first pass through each graph included.
        fallback: why steps ran in eager, from some step on; None: all ran compiled.
    """

    graphs: int
    seconds: float
    fallback: str | None

    def __str__(self) -> str:
        if self.fallback is not None:
            return f"trained in eager, because steps could not be compiled: {self.fallback}"
        return f"steps were compiled, which took {self.seconds:.1f} s; graphs: {self.graphs}"


@dataclass(frozen=True)
class LeftRun:
    """A run that was left between two steps.

    Attributes:
        state: of everything, as checkpoints have it.
        parameters: names of the optimizer's, in its order.
        parts: kinds of the run's parts, in their order.
    """

    state: Mapping[str, Any]
    parameters: tuple[str, ...]
    parts: tuple[type, ...]


@dataclass(frozen=True)
class History:
    """Every epoch in order, and what else is to be known of a run.

    Attributes:
        rows: the epochs.
        best_epoch: the one whose weights the model was left with; 0: there was none.
        clamps: what was clamped.
        compilation: what came of compiling; None where it was not asked for.
        left: where the run was left before its end, see `transfer_run`; None where it was not.
    """

    rows: tuple[EpochRow, ...]
    best_epoch: int
    clamps: tuple[ClampRow, ...] = ()
    compilation: Compilation | None = None
    left: LeftRun | None = None


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
        """Return the sums over all processes, of which some may have had no batch."""
        parts = gather_values(self)
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
        """Take the place of a state."""
        rows = tuple(EpochRow(**row) for row in state["rows"])
        vars(self).update(state, sums=Sums(**state["sums"]), rows=rows)

    def __str__(self) -> str:
        return f"epoch {self.epoch}, batch {self.batch}"


SAID = (
    "DefaultCPUAllocator: can't allocate memory",
    "DefaultCPUAllocator: not enough memory",
    "CUDA out of memory",
    "CUDA error: out of memory",
    "CUDNN_STATUS_ALLOC_FAILED",
    "CUBLAS_STATUS_ALLOC_FAILED",
)
"""How torch's allocators and CUDA's libraries put it where they raise a plain `RuntimeError`."""


def is_shortage(error: BaseException) -> bool:
    """Return whether an error says that there is not enough memory, of the CPU or of a device."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError | MemoryShortageError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in SAID)


@contextmanager
def naming_batch(batch: int, shape: Sequence[int], device: torch.device, at: Position) -> Iterator[None]:
    """Say of errors for want of memory how large the batch was, and what helps.

    Raises:
        MemoryShortageError: in the place of such an error.
    """
    try:
        yield
    except Exception as error:
        if not is_shortage(error):
            raise
        each = "" if size() == 1 else f", {-(-batch // size())} of them in each of {size()} processes"
        raise MemoryShortageError(
            f"out of memory on {device} in epoch {at.epoch}, step {at.trained or 1}: a batch of {batch} images of "
            f"{'x'.join(map(str, shape))}{each} does not fit ({_first_line(error)}); `prunekit finetune RECIPE "
            "--find-batch-size` names the largest data.batch that does; `accumulate: 2` with half of data.batch makes "
            "the same steps in less memory"
        ) from error


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no more is said'}"
