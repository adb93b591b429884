"""What takes part in a training run beside the loss: masks, schedules, distillation, averages of weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from prunekit.training.history import EpochRow

ClampCounts = Mapping[str, Mapping[str, tuple[int, int]]]
"""Of each clamp by module path: how many values (by norm: gradients) of how many were beyond the limit so far."""


@dataclass(frozen=True)
class Training:
    """The run that a part takes part in.

    Attributes:
        model: as it is trained, on `device`; under `sharding: full` in several processes a sharded copy of what was
            given, whose parameters, gradients and moments are DTensors.
        optimizer: torch's own.
        steps: of an epoch in which none is skipped.
        epochs: of the run.
        clamped: how often gradient clamps were needed so far, in all processes; all of them ask together.
        scale: what gradients are multiplied by before a step: float16's loss scale.
    """

    model: nn.Module
    optimizer: Optimizer
    device: torch.device
    steps: int
    epochs: int
    clamped: Callable[[], ClampCounts] = dict
    scale: Callable[[], float] = lambda: 1.0


class Part:
    """One feature of a training run; what it does not say it leaves as it is.

    A part is entered before the first step and left after the last. Steps are counted from 1 over the whole run, those
    skipped under float16's loss scale included, as the epochs' are. State that a resumed run needs goes through
    `state_dict`: tensors, numbers, text, and lists and dicts of them. Several processes are all given the main one's.
    """

    def active(self, training: Training) -> AbstractContextManager[Any]:
        """Entered around the whole training."""
        return nullcontext()

    def restarts(self, training: Training) -> Sequence[int]:
        """Return steps before which the learning-rate schedule begins anew, ascending; asked once."""
        return ()

    def loss(self, inputs: Any, output: Any, targets: Any) -> Tensor | None:
        """Return a scalar that is added to the mean loss of a batch, within autocast; None adds nothing.

        Inputs and targets are what the task unpacked: of classifiers images, and labels (B,) int64, or under mixup and
        CutMix the share of each class, (B, classes) float32.
        """
        return None

    def before_step(self, step: int) -> None:
        """Gradients are complete, under float16's loss scale if there is one; the optimizer has not stepped yet."""

    def after_step(self, step: int, made: bool) -> None:
        """The optimizer has stepped (`made`), or skipped the step."""

    def evaluating(self) -> AbstractContextManager[Any]:
        """Entered while the model is validated and its weights may be kept as the best."""
        return nullcontext()

    def after_epoch(self, row: EpochRow) -> None:
        """An epoch is over, its validation too."""

    def settled(self) -> bool:
        """Return whether what is validated now is of the kind that the run is to end with; asked while it is.

        Epochs that are not do not compete for the best weights; where none is, the last epoch's are kept.
        """
        return True

    def describe(self) -> Mapping[str, Any]:
        """Return figures for the progress bar; asked once an epoch."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs, as it is after a step."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state; called when the part is active, before model and optimizer get their states."""


@dataclass(frozen=True)
class Within(Part):
    """A part that is a context around the whole training, such as masks.

    Attributes:
        enter: gives the context of a run.
        figures: more for the progress bar.
    """

    enter: Callable[[Training], AbstractContextManager[Any]]
    figures: Callable[[], Mapping[str, Any]] = dict

    def active(self, training: Training) -> AbstractContextManager[Any]:
        return self.enter(training)

    def describe(self) -> Mapping[str, Any]:
        return self.figures()


class Parts:
    """Several parts as one, entered and asked in their order.

    Raises:
        Whatever a part raises when it is entered; those entered before it are left.
    """

    def __init__(self, parts: Sequence[Part]) -> None:
        self.all = tuple(parts)

    @contextmanager
    def active(self, training: Training) -> Iterator[None]:
        """Enter every part."""
        with ExitStack() as entered:
            for part in self.all:
                entered.enter_context(part.active(training))
            yield

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Enter what every part does while the model is validated."""
        with ExitStack() as entered:
            for part in self.all:
                entered.enter_context(part.evaluating())
            yield

    def added_to(self, loss: Tensor, inputs: Any, output: Any, targets: Any) -> Tensor:
        """Return the loss with what the parts add."""
        for part in self.all:
            if (more := part.loss(inputs, output, targets)) is not None:
                loss = loss + more
        return loss

    def before_step(self, step: int) -> None:
        """Tell every part."""
        for part in self.all:
            part.before_step(step)

    def after_step(self, step: int, made: bool) -> None:
        """Tell every part."""
        for part in self.all:
            part.after_step(step, made)

    def after_epoch(self, row: EpochRow) -> None:
        """Tell every part."""
        for part in self.all:
            part.after_epoch(row)

    def restarts(self, training: Training) -> tuple[int, ...]:
        """Return the steps of all parts, each once."""
        return tuple(sorted({step for part in self.all for step in part.restarts(training)}))

    def settled(self) -> bool:
        """Return whether every part is."""
        return all(part.settled() for part in self.all)

    def describe(self) -> dict[str, Any]:
        """Return all figures for the progress bar."""
        return {name: value for part in self.all for name, value in part.describe().items()}

    def state_dict(self) -> list[dict[str, Any]]:
        """Return the state of every part."""
        return [part.state_dict() for part in self.all]

    def load_state_dict(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Hand every part its state."""
        for part, state in zip(self.all, states, strict=True):
            part.load_state_dict(state)
