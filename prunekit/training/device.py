"""Accelerate on one device, without leaving its process-wide state behind; mixed precision on any device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState

from prunekit.training.settings import Precision

HALF: dict[Precision, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16}


def autocast(precision: Precision, device: torch.device) -> AbstractContextManager[None]:
    """Runs what PyTorch deems safe in half precision; nothing for `fp32`."""
    return torch.autocast(device.type, dtype=HALF.get(precision), enabled=precision in HALF)


def loss_scaler(precision: Precision, device: torch.device) -> torch.amp.GradScaler | None:
    """What keeps small gradients from vanishing in float16, and skips steps whose gradients overflow."""
    return torch.amp.GradScaler(device.type) if precision == "fp16" else None


@contextmanager
def one_device(device: torch.device, scaler: torch.amp.GradScaler | None = None) -> Iterator[Accelerator]:
    """An Accelerator for this device and no other; afterwards Accelerate's shared state is what it was.

    The state is process-wide: without this a run on CUDA after one on the CPU would stay on the CPU, and a caller's
    own Accelerator would lend us its mixed precision. Placement stays ours, so that `cuda:1` means `cuda:1`; so does
    precision, because Accelerate has no float16 on the CPU: it is only given the scaler.
    """
    states = [kind._shared_state for kind in (PartialState, AcceleratorState, GradientState)]
    before = [dict(state) for state in states]
    for state in states:
        state.clear()
    try:
        accelerator = Accelerator(cpu=device.type == "cpu", mixed_precision="no", device_placement=False)
        accelerator.scaler = scaler
        yield accelerator
    finally:
        for state, kept in zip(states, before, strict=True):
            state.clear()
            state.update(kept)
