"""The best weights so far: in memory, and in a file where one is named; the main process keeps them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from prunekit.artifacts import atomic_file
from prunekit.distributed.exchange import share_tensors
from prunekit.distributed.group import is_main
from prunekit.distributed.shards import is_sharded, whole
from prunekit.states import save_tensors


class BestWeights:
    """Keeps the state dict of the epoch with the highest validation score; a later epoch wins a tie.

    Args:
        model: gets the best weights in the end.
        path: of the `.safetensors` file; None for none.
        warn: told when the file cannot be written; `restore` tries again.
        trained: what is trained, where that is a sharded copy of the model.
    """

    def __init__(
        self, model: nn.Module, path: Path | None, warn: Callable[[str], None], trained: nn.Module | None = None
    ) -> None:
        self.model, self.path, self.warn = model, path, warn
        self._trained = model if trained is None else trained
        self.epoch, self.score = 0, -1.0
        self.weights: dict[str, Tensor] = {}
        self._written = False

    def offer(self, epoch: int, score: float) -> None:
        """Keeps the weights as they are now if none were better; -1: only as long as no others were offered."""
        if score >= self.score:
            self.epoch, self.score = epoch, score
            self.keep()

    def keep(self) -> None:
        """Copies every parameter and buffer; the file is whole or not there."""
        if not is_main() and not is_sharded(self._trained):
            return
        kept = {}
        for name, value in self._trained.state_dict().items():
            found = whole(value)  # one after the other: a process needs room for one
            if is_main():  # A clone each: safetensors refuses tensors that share memory, as tied weights do.
                kept[name] = found.detach().cpu().clone().contiguous()
        self.weights = kept
        if not is_main():
            return
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
        """Puts the kept weights back into the model, in every process.

        Raises:
            OSError: the file cannot be written.
        """
        if is_main():
            self._write()
            self.model.load_state_dict(self.weights)
        share_tensors(self.model.state_dict().items(), "the model")

    def state_dict(self) -> dict[str, Any]:
        """Of which epoch the kept weights are; `weights` has them, in the main process."""
        return {"epoch": self.epoch, "score": self.score}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from a state, once `weights` are there; the file may hold something else until `restore`."""
        self.epoch, self.score = state["epoch"], state["score"]
        self._written = False
