"""What a runtime is asked for and what it gives: a setting, what to run, and a session that runs it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Setting:
    """One way of running a model, in the words of a row of results.

    Attributes:
        device: "cpu", "cuda" or "cuda:n".
        threads: of the CPU.
        dtype: that the model computes in: "float32", "bfloat16" or "float16".
        memory_format: "contiguous" or "channels_last".
    """

    runtime: str
    device: str
    batch: int
    threads: int
    dtype: str = "float32"
    memory_format: str = "contiguous"

    @property
    def torch_dtype(self) -> torch.dtype:
        """`dtype` as torch has it."""
        found: torch.dtype = getattr(torch, self.dtype)
        return found


@dataclass(frozen=True, eq=False)
class Source:
    """A model as it reaches a runtime: the module itself, or an ONNX file for each batch."""

    module: nn.Module | None = None
    files: Mapping[int, Path] = field(default_factory=dict)


@dataclass(frozen=True)
class LayerClock:
    """A model that is ready to run with every operator timed.

    Attributes:
        run: runs one forward.
        passes: of the last so many forwards, in order, the milliseconds by path of the innermost module ("" the model's
            own code), and under None what the runtime does for no module; it is asked once, when all have run.
    """

    run: Callable[[], object]
    passes: Callable[[int], Sequence[Mapping[str | None, float]]]


@dataclass(frozen=True)
class Session:
    """A model that is ready to run on one sample.

    Attributes:
        run: runs one forward.
        tensors: what a forward returned, as tensors nested as the model nests them; outside the timed part.
        layers: the same model on the same sample, timed layer by layer; None where the runtime cannot tell.
    """

    run: Callable[[], Any]
    tensors: Callable[[Any], Any] = lambda output: output
    layers: Callable[[], LayerClock] | None = None


@dataclass(frozen=True)
class Runtime:
    """Something that runs models.

    Attributes:
        open: a session from a source, a float32 sample on the CPU, (B, ...), and a setting. It is called, and its
            sessions run, with the setting's number of torch threads and in inference mode.
        carrier: what it makes sessions from.
        devices: kinds of device that it runs on here.
        packages: that it needs, besides torch.
        extra: of prunekit, which brings them.
        refuse: why it cannot run a setting on these devices; empty where it can.
        forget: drops what is kept of sessions, once a setting is done.
        times_layers: whether its sessions have a layer clock.
        measures_memory: whether the growth of the process is the model's: not where building leaves more behind.
    """

    open: Callable[[Source, Tensor, Setting], Session]
    carrier: Literal["module", "onnx"]
    devices: tuple[str, ...]
    packages: tuple[str, ...] = ()
    extra: str = ""
    refuse: Callable[[Setting], str] = lambda setting: ""
    times_layers: bool = False
    measures_memory: bool = True
    forget: Callable[[], object] = lambda: None


def sample_of(shape: tuple[int, ...], batch: int) -> Tensor:
    """The input of every measurement: standard normal, float32 on the CPU, (batch, *shape), the same at each call."""
    return torch.randn(batch, *shape, generator=torch.Generator().manual_seed(0))
