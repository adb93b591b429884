"""Accelerate on our devices, without leaving its process-wide state behind; mixed precision on any device."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DataLoaderConfiguration

from prunekit.distributed.group import rank, size
from prunekit.distributed.launch import local_rank
from prunekit.settings.training import Precision

HALF: dict[Precision, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16}


def autocast(precision: Precision, device: torch.device) -> AbstractContextManager[None]:
    """Runs what PyTorch deems safe in half precision; nothing for `fp32`."""
    return torch.autocast(device.type, dtype=HALF.get(precision), enabled=precision in HALF)


def loss_scaler(precision: Precision, device: torch.device) -> torch.amp.GradScaler | None:
    """What keeps small gradients from vanishing in float16, and skips steps whose gradients overflow."""
    return torch.amp.GradScaler(device.type) if precision == "fp16" else None


@contextmanager
def this_group(device: torch.device, scaler: torch.amp.GradScaler | None = None) -> Iterator[Accelerator]:
    """An Accelerator for this device and our process group; afterwards Accelerate's shared state is what it was.

    The state is process-wide: without this a run on CUDA after one on the CPU would stay on the CPU, and a caller's
    own Accelerator would lend us its mixed precision. Placement stays ours, so that `cuda:1` means `cuda:1`; so does
    precision, because Accelerate has no float16 on the CPU: it is only given the scaler. What it reads from the
    environment is what our group is, not what a launcher has left there.
    """
    states = [kind._shared_state for kind in (PartialState, AcceleratorState, GradientState)]
    before = [dict(state) for state in states]
    for state in states:
        state.clear()
    batches = DataLoaderConfiguration(split_batches=True)  # ours are of all processes: a schedule steps once for each
    try:
        with _as_launched(device):
            accelerator = Accelerator(
                cpu=device.type == "cpu", mixed_precision="no", device_placement=False, dataloader_config=batches
            )
        accelerator.scaler = scaler
        yield accelerator
    finally:
        for state, kept in zip(states, before, strict=True):
            state.clear()
            state.update(kept)


@contextmanager
def _as_launched(device: torch.device) -> Iterator[None]:
    """The environment as a launcher makes it for our group; of a single process: as if none had been there."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "OMP_NUM_THREADS")
    before = {name: os.environ.get(name) for name in names}
    for name in names[:4]:
        os.environ.pop(name, None)
    if size() > 1:
        number = local_rank() if device.index is None else device.index
        ours = {"RANK": rank(), "WORLD_SIZE": size(), "LOCAL_RANK": number, "LOCAL_WORLD_SIZE": size()}
        ours["OMP_NUM_THREADS"] = torch.get_num_threads()  # or Accelerate would set them
        os.environ.update({name: str(value) for name, value in ours.items()})
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
