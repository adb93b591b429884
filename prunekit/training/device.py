"""Accelerate on one device, without leaving its process-wide state behind."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState


@contextmanager
def one_device(device: torch.device) -> Iterator[Accelerator]:
    """An Accelerator for this device and no other; afterwards Accelerate's shared state is what it was.

    The state is process-wide: without this a run on CUDA after one on the CPU would stay on the CPU, and a caller's
    own Accelerator would lend us its mixed precision. Placement stays ours, so that `cuda:1` means `cuda:1`.
    """
    states = [kind._shared_state for kind in (PartialState, AcceleratorState, GradientState)]
    before = [dict(state) for state in states]
    for state in states:
        state.clear()
    try:
        yield Accelerator(cpu=device.type == "cpu", mixed_precision="no", device_placement=False)
    finally:
        for state, kept in zip(states, before, strict=True):
            state.clear()
            state.update(kept)
