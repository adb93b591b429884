"""Checkpoints of a training run, and its best weights so far.

A file or folder is whole or not there, and checked when it is read. The main process writes and reads.
"""

import re
import shutil
import time
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from prunekit.distributed.process_group import full_tensor, is_main, is_sharded, share_tensors
from prunekit.errors import ArtifactError, ResumeError
from prunekit.settings.train import CheckpointSettings
from prunekit.training.parallel import share_state
from prunekit.utils.files import StrPath, atomic_file, remove_leftovers
from prunekit.utils.state_folders import differences, read_state, save_tensors, write_state

SHARE = 0.05
"""The largest share of the time that checkpoints by the clock may take."""
_NAME = re.compile(r"epoch-(\d+)-batch-(\d+)")


class CheckpointWarning(UserWarning):
    """A checkpoint could not be written; training goes on."""


class Checkpoints:
    """The checkpoints of a run, which is resumed from the newest one that is whole.

    A checkpoint is a folder `epoch-<epoch>-batch-<batch>` of safetensors and JSON, named by where training continues.
    If one cannot be written, because the disk is full, those before the last are removed to make room. If that does
    not help, the last is kept, training continues, and `log` is called, or a `CheckpointWarning` given.
    """

    def __init__(
        self,
        folder: StrPath,  # of this run alone
        settings: CheckpointSettings | None = None,  # how often, and how many are kept
        *,
        # plain data that must be the same where a run is resumed, besides what `fit` compares itself
        facts: Mapping[str, Any] | None = None,
        # gets a line when a run is resumed, and when something is wrong with a checkpoint; without it that is a warning
        log: Callable[[str], None] | None = None,
    ) -> None:
        self.folder, self.settings, self.facts = Path(folder), settings or CheckpointSettings(), dict(facts or {})
        self.last: Path | None = None  # the last checkpoint that was written or resumed from
        self.step = 0  # steps up to the last checkpoint, trials of learning rates included; 0 if there is none
        self._log = log
        self._begun, self._pause = time.monotonic(), 0.0

    def due(self, step: int) -> bool:
        """Return whether a checkpoint is due after this number of steps, trials of learning rates included."""
        steps, seconds = self.settings.every_steps, self.settings.every_seconds
        if steps is not None and step - self.step >= steps:
            return True
        return seconds is not None and time.monotonic() - self._begun >= max(seconds, self._pause)

    def write(self, state: Mapping[str, Any], *, epoch: int, batch: int, work: int) -> None:
        """Write a checkpoint, and remove those that are too old; warn if it cannot be written."""
        begun, path = time.monotonic(), self.folder / f"epoch-{epoch:04d}-batch-{batch:06d}"
        try:
            try:
                write_state(path, state)
            except OSError:  # make room, and try again
                self._keep(1)
                write_state(path, state)
        except OSError as error:
            self.warn(f"checkpoint {path} cannot be written ({error}); going on; the last good one: {self.last}")
        else:
            self.last = path
            self._keep(self.settings.keep)
        self._begun, self.step = time.monotonic(), work
        self._pause = (self._begun - begun) / SHARE

    def _keep(self, count: int) -> None:
        for path in self._found()[:-count]:
            shutil.rmtree(path, ignore_errors=True)

    def _found(self) -> list[Path]:
        """Return all checkpoints in the folder, the oldest first."""
        named = [(match, path) for path in self.folder.glob("epoch-*") if (match := _NAME.fullmatch(path.name))]
        return [path for _, path in sorted(named, key=lambda pair: (int(pair[0][1]), int(pair[0][2])))]

    def newest(
        self, identity: Mapping[str, Any], check: Callable[[Mapping[str, Any], str], None] = lambda state, where: None
    ) -> dict[str, Any] | None:
        """Return the newest state; None if there is none. A damaged checkpoint is reported and renamed.

        `check` gets a state and the name of its folder, before the state is used, and raises an `ArtifactError` if the
        state is damaged.
        """
        remove_leftovers(self.folder)
        for path in reversed(self._found()):
            try:
                state = read_state(path)
                there = state.get("identity")
                if not isinstance(there, dict):
                    raise ArtifactError(f"{path}: expected what run it is of; the file is damaged")
                require_same(path, there, identity)
                check(state, str(path))
            except ArtifactError as error:
                self.warn(f"checkpoint {error}; looking for the one before")
                with suppress(OSError):
                    path.rename(path.with_name(f"damaged-{path.name}"))
                continue
            at = state["position"]
            self.last, self._begun = path, time.monotonic()
            self.step = at["step"] + sum(row["steps"] for row in at.get("rates", ()))
            self._keep(self.settings.keep)  # a run may have been killed between writing one and removing another
            return state
        return None

    def say(self, message: str) -> None:
        """Log a message."""
        if self._log is not None:
            self._log(message)

    def warn(self, message: str) -> None:
        """Log a message, or give a warning if there is no log."""
        if self._log is not None:
            self._log(message)
        else:
            warnings.warn(message, CheckpointWarning, stacklevel=2)


def require_same(path: Path, there: Mapping[str, Any], here: Mapping[str, Any]) -> None:
    """Raise ResumeError with the differences if a run is resumed with something else than it was started with."""
    if found := list(differences(there, here)):
        raise ResumeError(
            "\n  ".join([f"{path}: cannot be resumed with this, it is of another recipe, plan or version:", *found])
            + "\n  resume it with what it was started with, or start again"
        )


class BestWeights:
    """The weights of the epoch with the best validation score so far; a later epoch wins a tie.

    Epoch 0 is the state before the first step, and wins a tie against all: training leaves nothing worse than it found.
    """

    def __init__(
        self,
        model: nn.Module,  # gets the best weights at the end
        path: Path | None,  # of the `.safetensors` file; None for none
        warn: Callable[[str], None],  # called with a message if the file cannot be written; `restore` tries again
        trained: nn.Module | None = None,  # the model that is trained, if that is a sharded copy
        *,
        lower_is_better: bool = False,
    ) -> None:
        self.model, self.path, self.warn = model, path, warn
        self._trained = model if trained is None else trained
        self._sign = -1 if lower_is_better else 1
        self.epoch = 0
        self.score: float | None = None
        # both in the main process alone: the state dict, and the buffers that are not in it
        self.weights: dict[str, Tensor] = {}
        self.buffers: Mapping[str, Tensor] = {}
        self._written = False

    def offer(self, epoch: int, score: float | None) -> None:
        """Keep the present weights if none were better; without a score only if none with one were offered."""
        if self.score is not None:
            if score is None:
                return
            found, kept = self._sign * score, self._sign * self.score
            if not (found >= kept if self.epoch else found > kept):
                return
        self.epoch, self.score = epoch, score
        self.keep()

    def keep(self) -> None:
        """Copy every parameter and buffer, also to the file."""
        if not is_main() and not is_sharded(self._trained):
            return
        kept = {}
        for name, value in self._trained.state_dict().items():
            found = full_tensor(value)  # one after the other: a process needs room for one
            if is_main():  # A clone each: safetensors refuses tensors that share memory, as tied weights do.
                kept[name] = found.detach().cpu().clone().contiguous()
        self.weights = kept
        if not is_main():
            return
        self.buffers = {name: buffer.cpu().clone() for name, buffer in unsaved_buffers(self._trained).items()}
        self._written = False
        try:
            self._write()
        except OSError as error:
            self.warn(f"the best weights so far cannot be written to {self.path} ({error}); they are kept in memory")

    def _write(self) -> None:
        if self.path is not None and not self._written:
            with atomic_file(self.path) as temporary:
                save_tensors(temporary, self.weights)
            self._written = True

    def restore(self) -> None:
        """Put the kept weights back into the model, in every process."""
        if is_main():
            self._write()
            self.model.load_state_dict(self.weights)
        share_tensors(self.model.state_dict().items(), "the model")
        set_buffers(self.model, share_state(self.buffers) or {})

    def state_dict(self) -> dict[str, Any]:
        """Return epoch and score of the weights, which are in `weights` in the main process, and the buffers."""
        return {"epoch": self.epoch, "score": self.score, "buffers": self.buffers}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state, once `weights` are set; the file may hold others until `restore`."""
        self.epoch, self.score, self.buffers = state["epoch"], state["score"], state["buffers"]
        self._written = False


def unsaved_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Return the buffers that are not in the state dict; a forward pass may have changed them."""
    saved = model.state_dict().keys()
    return {name: buffer for name, buffer in model.named_buffers() if name not in saved}


def set_buffers(model: nn.Module, buffers: Mapping[str, Tensor]) -> None:
    """Put buffers into a model, on the device of its parameters; they may have another size than those there."""
    for name, tensor in buffers.items():
        owner, _, own_name = name.rpartition(".")
        model.get_submodule(owner)._buffers[own_name] = tensor.to(next(model.parameters()).device)
