"""The state of a training run: all that it needs to continue, bit by bit, as if it had never stopped."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import reduce
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from prunekit.data.splits import Splits
from prunekit.distributed.process_group import (
    from_main,
    full_tensor,
    gather_values,
    is_main,
    is_shard,
    is_sharded,
    main_says,
    rank,
    shard_like,
    size,
)
from prunekit.errors import ArtifactError, NonFiniteError, ResumeError, reason_of, reraise_shortage
from prunekit.hooks.model_copy import named_tensors
from prunekit.reading.text_files import as_record, require_parts
from prunekit.settings.train import TrainSettings
from prunekit.tasks.task import DeviceSum, added
from prunekit.training.callbacks.callback import CallbackList, EpochRow, PausedRun, RateRow, StartRow
from prunekit.training.checkpoints import BestWeights, Checkpoints, set_buffers, unsaved_buffers
from prunekit.training.nonfinite import non_finite_tensor
from prunekit.training.optimizers import GradientClamps
from prunekit.training.parallel import share_state
from prunekit.utils.context import random_state, set_random_state
from prunekit.utils.tensors import map_tensors, require_same_kind


@dataclass
class EpochSums:
    """Sums over the batches of an epoch so far: losses, samples, what the task counts, and weights of the losses.

    What is added as tensors of an accelerator is summed there, and read by `settle`: reading waits for all that the
    device was asked to compute.
    """

    loss: float = 0.0
    samples: int = 0
    counts: list[float] = field(default_factory=list)
    weight: int = 0

    def __post_init__(self) -> None:
        self._losses, self._counts = DeviceSum(), DeviceSum()

    def add(self, loss: float | Tensor, counts: Tensor | None, samples: int, weight: int) -> None:
        """Add a batch's mean loss with its weight, its counts (K,), if it has any, and its number of samples."""
        self.samples += samples
        self.weight += weight
        if isinstance(loss, Tensor):
            self._losses.add(loss.detach().reshape(1), weight)
        else:
            self.loss += loss * weight
        if counts is not None:
            self._counts.add(counts)
            if counts.device.type == "cpu":
                self.settle()

    def settle(self) -> EpochSums:
        """Read what was summed on a device, and return the sums."""
        self.loss += sum(self._losses.take())
        self.counts = added(self.counts, self._counts.take())
        return self

    def of_all(self) -> EpochSums:
        """Return the sums over all processes, some of which may have had no batch."""
        self.settle()
        each = gather_values(self)
        counts = reduce(added, (sums.counts for sums in each))
        loss, samples, weight = (sum(getattr(sums, name) for sums in each) for name in ("loss", "samples", "weight"))
        return EpochSums(loss, samples, counts, weight)

    @property
    def mean_loss(self) -> float:
        """The mean loss of a sample, or of what else the task's losses are means over."""
        self.settle()
        return self.loss / (self.weight or self.samples)  # states of earlier versions have no weights


@dataclass
class Position:
    """The position of a run: its epoch, how far that epoch is, and the figures of the epochs before."""

    epoch: int = 1  # counted from 1; one more than the last when the run is over
    batch: int = 0  # batches of the epoch that are done, those that could not be read included
    trained: int = 0  # batches of the epoch that were trained on
    step: int = 0  # steps of the whole run, those skipped under float16's loss scale included
    made: int = 0  # steps of the epoch that were not skipped
    begun: bool = False  # whether the weights before the first step were offered, and made ready
    lr: float = 0.0  # learning rate of the last step
    seconds: float = 0.0  # time that the epoch took so far
    sums: EpochSums = field(default_factory=EpochSums)  # sums of the epoch so far
    rows: tuple[EpochRow, ...] = ()  # figures of the epochs before
    start: StartRow | None = None  # those of the weights before the first step, if they were offered as the best
    rates: tuple[RateRow, ...] = ()  # trials of learning rates before the first step

    @property
    def work(self) -> int:
        """Steps of the whole run and of the trials before it."""
        return self.step + sum(row.steps for row in self.rates)

    def next_epoch(self, row: EpochRow, steps: int) -> None:
        """Move on to the next epoch."""
        rows, epoch = (*self.rows, row), self.epoch + 1
        moved = Position(epoch, step=self.epoch * steps, begun=True, rows=rows, start=self.start, rates=self.rates)
        self.load_state_dict(asdict(moved))

    def state_dict(self) -> dict[str, Any]:
        """Return the position as plain data."""
        self.sums.settle()
        return asdict(self)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Move to the position of a state."""
        rows = tuple(EpochRow(**row) for row in state["rows"])
        start = None if state["start"] is None else StartRow(**state["start"])
        rates = tuple(RateRow(**row) for row in state["rates"])
        vars(self).update(state, sums=EpochSums(**state["sums"]), rows=rows, start=start, rates=rates)

    def __str__(self) -> str:
        return f"epoch {self.epoch}, batch {self.batch}"


@dataclass(frozen=True, eq=False)
class RunState:
    """Everything that changes from step to step; between two steps it includes no gradients."""

    model: nn.Module
    optimizer: Optimizer
    schedule: LRScheduler
    scaler: torch.amp.GradScaler | None
    clamps: GradientClamps
    callbacks: CallbackList
    best: BestWeights
    splits: Splits
    position: Position
    identity: Mapping[str, Any]  # plain data that must be the same where the run is resumed
    # where the state is kept; None if nowhere. In several processes the main one reads and writes.
    checkpoints: Checkpoints | None
    begin: Mapping[str, Any] | None = None  # a state to continue from if there is no checkpoint
    infinite: Collection[str] = ()  # names of buffers that had an Inf in them before, such as masks of attention

    def resume(self) -> None:
        """Continue from the newest checkpoint, if there is one."""
        if self.checkpoints is None:
            self._begin()
            return
        found, refused = None, ""
        if is_main():
            try:
                found = self.checkpoints.newest(self.identity, self._check)
            except ResumeError as error:
                refused = str(error)
        if refused := from_main(lambda: refused):
            raise ResumeError(refused)
        if found is not None:  # only the main process needs these
            self.best.weights = found["best"].pop("weights")
        if (state := share_state(found)) is None:
            self._begin()
            return
        try:
            self._load(state)
        except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
            reraise_shortage(error)
            raise ResumeError(
                f"{self.checkpoints.last}: cannot be resumed, a part of it does not fit ({reason_of(error)}); remove "
                "this folder, and the run goes on from the one before"
            ) from error
        self.checkpoints.last = gather_values(self.checkpoints.last)[0]
        over = state["training"] is None
        self.checkpoints.say(f"resumed from {self.checkpoints.last}: {'finished' if over else self.position}")

    def _begin(self) -> None:
        if self.begin is not None:
            self.best.weights = self.begin["best"]["weights"]
            self._load(self.begin)

    def non_finite_tensor(self) -> str | None:
        """Return the first parameter or buffer that has become NaN or Inf; None if none has."""
        return non_finite_tensor(self.model, self.infinite)

    def write_if_due(self) -> None:
        """Write a checkpoint when it is time."""
        if self.checkpoints is not None and main_says(self.checkpoints.due(self.position.work)):
            if (tensor := self.non_finite_tensor()) is not None:
                last = self.checkpoints.last or "none yet"
                raise NonFiniteError(f"{tensor} is NaN or Inf in {self.position}; the last good checkpoint: {last}")
            self._write(self.checkpoints, over=False)

    def write_paused(self) -> None:
        """Write a checkpoint where the run is paused, unless it was resumed there."""
        if self.checkpoints is not None and main_says(self.checkpoints.step < self.position.work):
            self._write(self.checkpoints, over=False)

    def pause(self) -> PausedRun:
        """Return the whole state, from which another run can continue."""
        names = {id(parameter): name for name, parameter in self.model.named_parameters()}
        parameters = (names[id(each)] for group in self.optimizer.param_groups for each in group["params"])
        kinds = tuple(type(callback) for callback in self.callbacks)
        return PausedRun(self._state(gather_values(self._own()), self._training()), tuple(parameters), kinds)

    def write_result(self) -> None:
        """Write a checkpoint that says that the run is over, and what came of it."""
        if self.checkpoints is not None:
            self._write(self.checkpoints, over=True)

    def _write(self, checkpoints: Checkpoints, *, over: bool) -> None:
        at, processes = self.position, gather_values(self._own())
        takes_part = is_main() or is_sharded(self.model)  # all processes put shards together
        training = None if over or not takes_part else self._training()
        if is_main():
            checkpoints.write(self._state(processes, training), epoch=at.epoch, batch=at.batch, work=at.work)
        checkpoints.last = gather_values(checkpoints.last)[0]

    def _state(self, processes: Sequence[Mapping[str, Any]], training: Mapping[str, Any] | None) -> dict[str, Any]:
        return {
            "identity": self.identity,
            "position": self.position.state_dict(),
            "best": {**self.best.state_dict(), "weights": self.best.weights},
            "callbacks": self.callbacks.state_dict(),
            "processes": list(processes),
            "training": training,
        }

    def _own(self) -> dict[str, Any]:
        """Return the state that each process has of its own; the rest is that of the main one."""
        return {
            "sums": asdict(self.position.sums),
            "clamps": self.clamps.state_dict(),
            "corrupt": {name: dict(data.corrupt.found) for name, data in self._data()},
            "random": random_state(),
        }

    def _training(self) -> dict[str, Any]:
        """Return the state that only training needs; that of a sharded model whole, in the main process."""
        model, optimizer = self.model.state_dict(), self.optimizer.state_dict()
        if is_sharded(self.model):
            model, optimizer = map_tensors((model, optimizer), _on_main)
        return {
            "model": model,
            "buffers": unsaved_buffers(self.model),
            "optimizer": optimizer,
            "schedule": self.schedule.state_dict(),
            "scaler": None if self.scaler is None else self.scaler.state_dict(),
        }

    def _check(self, state: Mapping[str, Any], where: str) -> None:
        """Raise an ArtifactError unless a state from a checkpoint has all parts, and tensors that fit the model."""
        as_record(Position, state.get("position"), f"{where}: position")
        require_parts(state, ("best", "processes", "training", "callbacks"), where)
        best, processes, training = state["best"], state["processes"], state["training"]
        require_parts(best, ("epoch", "score", "weights", "buffers"), f"{where}: best")
        if not isinstance(processes, list) or len(processes) != size():
            raise ArtifactError(f"{where}: expected the states of {size()} processes; the file is damaged")
        for number, own in enumerate(processes):
            require_parts(own, ("sums", "clamps", "corrupt", "random"), f"{where}: process {number}")
            as_record(EpochSums, own["sums"], f"{where}: process {number}: sums")
            require_parts(own["corrupt"], [name for name, _ in self._data()], f"{where}: process {number}: corrupt")
        model = {name: value for name, value in self.model.state_dict().items() if isinstance(value, Tensor)}
        if best["weights"]:
            require_same_kind(best["weights"], model.items(), f"{where}: best weights")
        if training is None:
            return
        require_parts(training, ("model", "buffers", "optimizer", "schedule", "scaler"), f"{where}: training")
        require_same_kind(training["model"], model.items(), f"{where}: model")
        require_parts(training["buffers"], tuple(unsaved_buffers(self.model)), f"{where}: buffers")
        self._check_optimizer(training["optimizer"], f"{where}: optimizer")

    def _check_optimizer(self, state: Any, where: str) -> None:
        """Raise an ArtifactError unless an optimizer's state has a group for each of ours, and moments that fit."""
        require_parts(state, ("state", "param_groups"), where)
        groups, there = self.optimizer.param_groups, state["param_groups"]
        counts = [len(group["params"]) for group in groups]
        if not isinstance(there, list) or [len(_parameters(group)) for group in there] != counts:
            raise ArtifactError(f"{where}: expected groups of {counts} parameters; the file is damaged")
        parameters = dict(enumerate(parameter for group in groups for parameter in group["params"]))
        require_parts(state["state"], (), where)
        for index, moments in state["state"].items():
            require_parts(moments, (), f"{where}: state {index}")
            shapes = {value.shape for value in moments.values() if isinstance(value, Tensor)}
            # an own optimizer may have moments of any shape
            known = self.identity["training"]["optimizer"] != "own"
            if index not in parameters or (known and not shapes <= {parameters[index].shape, torch.Size()}):
                raise ArtifactError(f"{where}: state {index}: expected that of a parameter; the file is damaged")

    def _load(self, state: Mapping[str, Any]) -> None:
        own = state["processes"][rank()]
        self.position.load_state_dict({**state["position"], "sums": own["sums"]})
        self.best.load_state_dict(state["best"])
        self.clamps.load_state_dict(own["clamps"])
        for name, data in self._data():
            data.corrupt.merge(own["corrupt"][name])
        self.callbacks.load_state_dict(state["callbacks"])
        if (training := state["training"]) is not None:
            there = self.model.state_dict()
            self.model.load_state_dict(
                {name: shard_like(v, there.get(name, v)) for name, v in training["model"].items()}
            )
            set_buffers(self.model, training["buffers"])
            self.optimizer.load_state_dict(_spread_moments(training["optimizer"], self.optimizer))
            self.schedule.load_state_dict(training["schedule"])
            if self.scaler is not None:
                self.scaler.load_state_dict(training["scaler"])
            set_random_state(own["random"])  # last: nothing may draw after it

    def _data(self) -> tuple[tuple[str, Any], ...]:
        return ("train", self.splits.train), ("validation", self.splits.validation)


def _parameters(group: Any) -> Sequence[Any]:
    """Return the parameters of an optimizer's group in a file; none if it has no list of them."""
    found = group.get("params") if isinstance(group, Mapping) else None
    return found if isinstance(found, list) else ()


def _on_main(tensor: Tensor) -> Tensor:
    """Return the whole tensor of a shard, on the CPU of the main process alone; other tensors as they are."""
    if not is_shard(tensor):
        return tensor
    found = full_tensor(tensor)
    return found.cpu() if is_main() else found.new_empty(0)


def _spread_moments(state: Mapping[str, Any], optimizer: Optimizer) -> dict[str, Any]:
    """Return a saved state of an optimizer, sharded where its parameters are."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    moments = {
        index: {key: shard_like(v, parameters[index]) if isinstance(v, Tensor) else v for key, v in values.items()}
        for index, values in state["state"].items()
    }
    return {**state, "state": moments}


def identity_of(
    model: nn.Module, splits: Splits, settings: TrainSettings, callbacks: CallbackList, **more: Any
) -> dict[str, Any]:
    """Return the facts that must be the same where a run is resumed, as plain data; `more` are further ones."""
    return {
        **more,
        "training": asdict(settings),
        "data": splits.fingerprint,
        "task": splits.task.name,
        "images": [len(splits.train), len(splits.validation)],
        "model": {name: [str(tensor.dtype), *tensor.shape] for name, tensor in named_tensors(model)},
        "callbacks": [type(callback).__name__ for callback in callbacks],
        "versions": {"prunekit": version("prunekit"), "torch": str(torch.__version__)},
    }
