"""Sessions of runtimes: the setting, inputs and source that one is made from, and how it runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from prunekit.errors import UsageError
from prunekit.utils.inputs import Keywords, split
from prunekit.utils.tensors import map_tensors


@dataclass(frozen=True)
class Setting:
    """One way of running a model, in the terms of a row of results.

    `prunekit.measure.latency.comparison.choose_settings` makes all of them, and turns a recipe's "fp32" into "float32".

    Attributes:
        device: "cpu", "cuda" or "cuda:n".
        threads: of the CPU.
        dtype: of the model's computations, by torch's name: "float32", "bfloat16", "float16", or "int8" for a file that
            was quantized, whose inputs and outputs are in float32.
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
        """The dtype as an object of torch."""
        found: torch.dtype = getattr(torch, self.dtype)
        return found


Sample = tuple[Any, ...]
"""An example (see `prunekit.utils.inputs.as_example`): (B, ...) tensors on the CPU, floating-point ones in float32."""


def in_dtype(sample: Sample, dtype: torch.dtype) -> Sample:
    """Return a sample with its floating-point tensors in a dtype."""
    found: Sample = map_tensors(sample, lambda one: one.to(dtype) if one.is_floating_point() else one)
    return found


@dataclass(frozen=True, eq=False)
class Inputs:
    """The inputs of a model: one tensor for each argument of `forward`, with the batch on its first axis.

    Attributes:
        shapes: without the batch.
        values: (1, ...) for each argument that is not of floating-point numbers, such as token ids, and so cannot be
            drawn at random; None for the others.
        names: of the last arguments, which are given by name.
    """

    shapes: tuple[tuple[int, ...], ...]
    values: tuple[Tensor | None, ...]
    names: tuple[str, ...] = ()

    def sample(self, batch: int) -> Sample:
        """Return standard normal numbers, the same at each call; values that cannot be random are repeated."""
        generator = torch.Generator().manual_seed(0)
        tensors = tuple(
            torch.randn(batch, *shape, generator=generator) if value is None else value.repeat_interleave(batch, 0)
            for shape, value in zip(self.shapes, self.values, strict=True)
        )
        positional = len(tensors) - len(self.names)
        named = Keywords(zip(self.names, tensors[positional:], strict=True))
        return (*tensors[:positional], named) if named else tensors

    def described(self) -> list[Any]:
        """Return plain data that is equal for equal inputs: a shape if there is only one, else a list for each."""
        if self.values == (None,) and not self.names:
            return list(self.shapes[0])
        found: list[Any] = [
            [list(shape), None if value is None else [str(value.dtype), sha256(value.numpy().tobytes()).hexdigest()]]
            for shape, value in zip(self.shapes, self.values, strict=True)
        ]
        return [*found, list(self.names)] if self.names else found


def inputs_of(given: Sequence[int] | Inputs) -> Inputs:
    """Return the inputs of a model with one floating-point input, from its shape without the batch, or `Inputs`."""
    return given if isinstance(given, Inputs) else Inputs((tuple(given),), (None,))


def inputs_like(example: tuple[Any, ...]) -> Inputs:
    """Return the inputs of a model from an example.

    Args:
        example: see `prunekit.utils.inputs.as_example`.

    Raises:
        UsageError: not all of them are tensors with the same number of samples on their first axis.
    """
    positional, named = split(example)
    tensors = (*positional, *named.values())
    kinds = [type(one).__name__ for one in tensors if not isinstance(one, Tensor)]
    sizes = {one.shape[0] if one.dim() else None for one in tensors if isinstance(one, Tensor)}
    if kinds or len(sizes) != 1 or None in sizes:
        found = ", ".join(kinds) or " and ".join(str(tuple(one.shape)) for one in tensors) or "none"
        raise UsageError(
            "inputs that are timed: expected tensors, each with the batch on its first axis, because batches of other "
            f"sizes are made of them; got {found}"
        )
    return Inputs(
        tuple(tuple(one.shape[1:]) for one in tensors),
        tuple(None if one.is_floating_point() else one[:1].detach().cpu() for one in tensors),
        tuple(named),
    )


FileKey = tuple[int, str]
"""Batch, and the dtype of `Setting`; after "int8" comes the quantizer, as in "int8 by nncf"."""
INT8 = "int8"
"""The dtype of settings whose files are quantized."""


@dataclass(frozen=True, eq=False)
class Source:
    """A model in the form that a runtime takes: the module itself, or files by batch and dtype.

    Beside a quantized file there is always the ONNX file in float32 that it was made from.

    Attributes:
        open: opens a session of a model that was exported before, in place of the runtime's own function.
    """

    module: nn.Module | None = None
    files: Mapping[FileKey, Path] = field(default_factory=dict)
    open: Callable[[Sample, Setting], Session] | None = None


@dataclass(frozen=True)
class LayerClock:
    """A model that is ready to run with every operator timed.

    Attributes:
        run: runs one forward.
        passes: returns for each of the last forwards, as many as it is given, the milliseconds by path of the innermost
            module ("" the model's own code), and under None those of no module; it is called once, when all have run.
    """

    run: Callable[[], object]
    passes: Callable[[int], Sequence[Mapping[str | None, float]]]


@dataclass(frozen=True)
class Session:
    """A model that is ready to run on one sample.

    Attributes:
        run: runs one forward.
        tensors: turns what `run` returned into tensors, nested as the model nests them; is not timed.
        layers: opens the same model on the same sample, timed layer by layer; None if the runtime cannot.
        move: moves its weights elsewhere in memory, see `prunekit.measure.latency.memory_layout`; None if it cannot.

    Example:
        >>> import prunekit as pk, torch
        >>> model, x = torch.nn.Linear(8, 2), torch.randn(4, 8)
        >>> session = pk.Session(run=lambda: model(x).detach().numpy(), tensors=torch.from_numpy)
        >>> session.tensors(session.run()).shape  # `run` is what is timed
        torch.Size([4, 2])
    """

    run: Callable[[], Any]
    tensors: Callable[[Any], Any] = lambda output: output
    layers: Callable[[], LayerClock] | None = None
    move: Callable[[], object] | None = None
