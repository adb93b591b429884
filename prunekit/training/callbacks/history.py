"""The history of a training run: figures of each epoch, clamped gradients, what compiling took."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any


@dataclass(frozen=True)
class History:
    """Result of a training run.

    Attributes:
        rows: one for each epoch, in order.
        best_epoch: the epoch whose weights the model was left with; 0 if there was none.
        clamps: how often gradient clamps were needed.
        compilation: what came of compiling; None if it was not asked for.
        paused: the state of a run that was left before its end, see `transfer_run`; None if it came to its end.
    """

    rows: tuple[EpochRow, ...]
    best_epoch: int
    clamps: tuple[ClampRow, ...] = ()
    compilation: Compilation | None = None
    paused: PausedRun | None = None


@dataclass(frozen=True)
class EpochRow:
    """The figures of one epoch.

    Attributes:
        epoch: counted from 1.
        lr: learning rate of the epoch's last step.
        train_loss: mean over the images trained on, label smoothing, auxiliary heads and distillation included.
        train_score: the task's main score, percent, in train mode and while the weights change; of a mixed image
            (mixup, CutMix) the share of the class that is predicted counts. None if what the model returns for the
            loss has no score.
        validation_loss: mean of the task's loss over the validation samples, without label smoothing, of the average of
            weights if there is one; None if the task has no loss in eval mode.
        validation_score: percent.
        images_per_s: training samples per second, validation left out.
        seconds: of the whole epoch.
        skipped: steps that were not made, because float16 gradients overflowed or whole batches could not be read.
        score: name of the score: `top1` for classifiers.
    """

    epoch: int
    lr: float
    train_loss: float
    train_score: float | None
    validation_loss: float | None
    validation_score: float
    images_per_s: float
    seconds: float
    skipped: int
    score: str = "top1"

    def figures(self) -> dict[str, Any]:
        """Return the row of a table, whose columns are named for the score: `train_top1`, `validation_top1`."""
        return dict(zip(columns(self.score), list(asdict(self).values())[:-1], strict=True))


def columns(score: str) -> tuple[str, ...]:
    """Return the columns of `EpochRow.figures`."""
    return tuple(each.name.replace("_score", f"_{score}") for each in fields(EpochRow) if each.name != "score")


@dataclass(frozen=True)
class ClampRow:
    """Share of gradients that a clamp changed at one module.

    Attributes:
        clamp: which of the two clamps.
        module: path of the module.
        by: value or norm.
        limit: for the unscaled gradient.
        share: share of the values (by norm: of the gradients) that were beyond the limit, 0..1.
    """

    clamp: str
    module: str
    by: str
    limit: float
    share: float


@dataclass(frozen=True)
class Compilation:
    """Result of compiling the training steps of a run.

    Attributes:
        graphs: how many graphs were compiled; more than one if shapes or hooks changed.
        seconds: what compiling took, the first pass through each graph included.
        fallback: why steps ran in eager from some step on; None if all ran compiled.
    """

    graphs: int
    seconds: float
    fallback: str | None

    def __str__(self) -> str:
        if self.fallback is not None:
            return f"trained in eager, because steps could not be compiled: {self.fallback}"
        return f"steps were compiled, which took {self.seconds:.1f} s; graphs: {self.graphs}"


@dataclass(frozen=True)
class PausedRun:
    """A run that was left between two steps, from which another one can continue.

    Attributes:
        state: the whole state, as in a checkpoint.
        parameters: names of the optimizer's parameters, in its order.
        callbacks: types of the run's callbacks, in their order.
    """

    state: Mapping[str, Any]
    parameters: tuple[str, ...]
    callbacks: tuple[type, ...]
