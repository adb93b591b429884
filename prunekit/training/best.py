"""The best weights so far: in a file where one is named, else in memory; the main process keeps them."""

from __future__ import annotations

from pathlib import Path

import safetensors.torch
from torch import Tensor, nn

from prunekit.artifacts import atomic_file
from prunekit.distributed.exchange import share_tensors
from prunekit.distributed.group import is_main


class BestWeights:
    """Keeps the state dict of the epoch with the highest validation top-1; a later epoch wins a tie."""

    def __init__(self, model: nn.Module, path: Path | None) -> None:
        self.model, self.path = model, path
        self.epoch, self.top1 = 0, -1.0
        self._state: dict[str, Tensor] = {}

    def offer(self, epoch: int, top1: float) -> None:
        """Keeps the weights as they are now if none were better."""
        if top1 >= self.top1:
            self.epoch, self.top1 = epoch, top1
            self.keep()

    def keep(self) -> None:
        """Copies every parameter and buffer; the file is whole or not there."""
        if not is_main():
            return
        # A clone each: safetensors refuses tensors that share memory, as tied weights do.
        state = {name: value.detach().cpu().clone().contiguous() for name, value in self.model.state_dict().items()}
        if self.path is None:
            self._state = state
            return
        with atomic_file(self.path) as temporary:
            safetensors.torch.save_file(state, temporary)

    def restore(self) -> None:
        """Puts the kept weights back into the model, in every process."""
        if is_main():
            self.model.load_state_dict(self._state if self.path is None else safetensors.torch.load_file(self.path))
        share_tensors(self.model.state_dict().items(), "the model")
