"""Everything that a training run needs to go on as if it had never stopped."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from prunekit.channels.cut.model_copy import named_tensors
from prunekit.data.sources import Splits
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
)
from prunekit.errors import NonFiniteError, ResumeError
from prunekit.settings.train import TrainSettings
from prunekit.training.callbacks.callback import Parts
from prunekit.training.callbacks.clamping import Clamps
from prunekit.training.checkpoints import BestWeights, Checkpoints
from prunekit.training.history import LeftRun, Position
from prunekit.training.nonfinite import non_finite_tensor
from prunekit.training.replicas import share_state
from prunekit.utils.context import random_state, set_random_state
from prunekit.utils.tensors import map_tensors


@dataclass(frozen=True, eq=False)
class RunState:
    """What changes from step to step; between two steps no gradient is among it.

    Attributes:
        identity: plain data that must be the same where the run is resumed.
        checkpoints: where it is kept; None: nowhere. Of several processes the main one reads and writes.
        begin: a state to go on from where no checkpoint is newer.
    """

    model: nn.Module
    optimizer: Optimizer
    schedule: LRScheduler
    scaler: torch.amp.GradScaler | None
    clamps: Clamps
    parts: Parts
    best: BestWeights
    splits: Splits
    position: Position
    identity: Mapping[str, Any]
    checkpoints: Checkpoints | None
    begin: Mapping[str, Any] | None = None

    def resume(self) -> None:
        """Go on from the newest checkpoint, if there is one.

        Raises:
            ResumeError: it is of another run; says what differs, in every process.
        """
        if self.checkpoints is None:
            self._begin()
            return
        found, refused = None, ""
        if is_main():
            try:
                found = self.checkpoints.newest(self.identity)
            except ResumeError as error:
                refused = str(error)
        if refused := from_main(lambda: refused):
            raise ResumeError(refused)
        if found is not None:  # nobody else needs these
            self.best.weights = found["best"].pop("weights")
        if (state := share_state(found)) is None:
            self._begin()
            return
        self._load(state)
        self.checkpoints.last = gather_values(self.checkpoints.last)[0]
        over = state["training"] is None
        self.checkpoints.say(f"resumed from {self.checkpoints.last}: {'finished' if over else self.position}")

    def _begin(self) -> None:
        if self.begin is not None:
            self.best.weights = self.begin["best"]["weights"]
            self._load(self.begin)

    def keep_if_due(self) -> None:
        """Write a checkpoint when it is time.

        Raises:
            NonFiniteError: a weight is NaN or Inf: nobody could go on from there.
        """
        if self.checkpoints is not None and main_says(self.checkpoints.due(self.position.step)):
            if (tensor := non_finite_tensor(self.model)) is not None:
                last = self.checkpoints.last or "none yet"
                raise NonFiniteError(f"{tensor} is NaN or Inf in {self.position}; the last good checkpoint: {last}")
            self._write(self.checkpoints, over=False)

    def keep_place(self) -> None:
        """Write a checkpoint where the run is left, unless it was resumed there."""
        if self.checkpoints is not None and main_says(self.checkpoints.step < self.position.step):
            self._write(self.checkpoints, over=False)

    def left(self) -> LeftRun:
        """Return where the run is, for another to go on with."""
        names = {id(parameter): name for name, parameter in self.model.named_parameters()}
        parameters = (names[id(each)] for group in self.optimizer.param_groups for each in group["params"])
        kinds = tuple(type(part) for part in self.parts.all)
        return LeftRun(self._state(gather_values(self._own()), self._training()), tuple(parameters), kinds)

    def keep_result(self) -> None:
        """Write down that the run is over, and what came of it."""
        if self.checkpoints is not None:
            self._write(self.checkpoints, over=True)

    def _write(self, checkpoints: Checkpoints, *, over: bool) -> None:
        at, processes = self.position, gather_values(self._own())
        asked = is_main() or is_sharded(self.model)  # shards are put together by all
        training = self._training() if asked and not over else None
        if is_main():
            checkpoints.write(self._state(processes, training), epoch=at.epoch, batch=at.batch, step=at.step)
        checkpoints.last = gather_values(checkpoints.last)[0]

    def _state(self, processes: Sequence[Mapping[str, Any]], training: Mapping[str, Any] | None) -> dict[str, Any]:
        return {
            "identity": self.identity,
            "position": self.position.state_dict(),
            "best": {**self.best.state_dict(), "weights": self.best.weights},
            "parts": self.parts.state_dict(),
            "processes": list(processes),
            "training": training,
        }

    def _own(self) -> dict[str, Any]:
        """Return what each process has of its own; the rest is the main one's."""
        return {
            "sums": asdict(self.position.sums),
            "clamps": self.clamps.state_dict(),
            "corrupt": {name: dict(part.corrupt.found) for name, part in self._parts_of_data()},
            "random": random_state(),
        }

    def _training(self) -> dict[str, Any]:
        """Return what the result of a run does not need; of a sharded model whole, in the main process."""
        model, optimizer = self.model.state_dict(), self.optimizer.state_dict()
        if is_sharded(self.model):
            model, optimizer = map_tensors((model, optimizer), _on_main)
        return {
            "model": model,
            "buffers": _unsaved_buffers(self.model),
            "optimizer": optimizer,
            "schedule": self.schedule.state_dict(),
            "scaler": None if self.scaler is None else self.scaler.state_dict(),
        }

    def _load(self, state: Mapping[str, Any]) -> None:
        own = state["processes"][rank()]
        self.position.load_state_dict({**state["position"], "sums": own["sums"]})
        self.best.load_state_dict(state["best"])
        self.clamps.load_state_dict(own["clamps"])
        for name, part in self._parts_of_data():
            part.corrupt.merge(own["corrupt"][name])
        self.parts.load_state_dict(state["parts"])
        training = state["training"]
        if training is not None:
            there = self.model.state_dict()
            self.model.load_state_dict(
                {name: shard_like(v, there.get(name, v)) for name, v in training["model"].items()}
            )
            for name, tensor in training["buffers"].items():
                owner, _, own_name = name.rpartition(".")
                buffers = self.model.get_submodule(owner)._buffers
                buffers[own_name] = tensor.to(next(self.model.parameters()).device)
            self.optimizer.load_state_dict(_spread_moments(training["optimizer"], self.optimizer))
            self.schedule.load_state_dict(training["schedule"])
            if self.scaler is not None:
                self.scaler.load_state_dict(training["scaler"])
            set_random_state(own["random"])  # last: nothing may draw after it

    def _parts_of_data(self) -> tuple[tuple[str, Any], ...]:
        return ("train", self.splits.train), ("validation", self.splits.validation)


def _on_main(tensor: Tensor) -> Tensor:
    """Return a whole tensor as it is; a shard put together, which only the main process keeps, off the device."""
    if not is_shard(tensor):
        return tensor
    found = full_tensor(tensor)
    return found.cpu() if is_main() else found.new_empty(0)


def _spread_moments(state: Mapping[str, Any], optimizer: Optimizer) -> dict[str, Any]:
    """Return a saved state of an optimizer, in parts where its parameters are."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    moments = {
        index: {key: shard_like(v, parameters[index]) if isinstance(v, Tensor) else v for key, v in values.items()}
        for index, values in state["state"].items()
    }
    return {**state, "state": moments}


def _unsaved_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Return buffers that the model does not put into its state dict; a forward pass may have changed them."""
    saved = model.state_dict().keys()
    return {name: buffer for name, buffer in model.named_buffers() if name not in saved}


def identity_of(model: nn.Module, splits: Splits, settings: TrainSettings, parts: Parts, **more: Any) -> dict[str, Any]:
    """Return what must be the same where a run is resumed, as plain data.

    Args:
        model, splits, settings, parts: as for `fit`.
        more: further facts.
    """
    return {
        **more,
        "training": asdict(settings),
        "data": splits.fingerprint,
        "task": splits.task.name,
        "images": [len(splits.train), len(splits.validation)],
        "model": {name: [str(tensor.dtype), *tensor.shape] for name, tensor in named_tensors(model)},
        "parts": [type(part).__name__ for part in parts.all],
        "versions": {"prunekit": version("prunekit"), "torch": str(torch.__version__)},
    }
