"""A model to export, with its options: what every writer of files is given."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from prunekit.models.interface import ModelInterface

Run = Callable[[tuple[Any, ...]], list[Tensor]]
"""From an example (float32, on the CPU) to the tensors of the output on the CPU, in the order of the interface."""


@dataclass(frozen=True)
class ExportOptions:
    """Options of an export.

    Attributes:
        opset: version of ONNX's operators; None: the one that prunekit is tested with.
        half: whether weights are stored in float16, where the format can; computations stay in float32.
        dynamic: names of axes of any size by input and axis, besides the batch: `{"image": {2: "height"}}`.
    """

    opset: int | None = None
    half: bool = False
    dynamic: Mapping[str, Mapping[int, str]] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class ExportSource:
    """A model to export.

    Attributes:
        model: a copy in eval mode on the CPU, in float32; free to be changed.
        example: positional and named arguments of `forward`, with at least two samples on the first axis, real ones
            where there are any.
        interface: names, dtypes and axes of inputs and outputs; task, classes and preprocessing. Axes that are not
            numbers are of any size in the export.
        options: of the export.
        folder: the model folder that the model was loaded from; None for others.
        facts: further facts by name, such as the figures of the run that the model is from, for a model card.
    """

    model: nn.Module
    example: tuple[Any, ...]
    interface: ModelInterface
    options: ExportOptions = field(default_factory=ExportOptions)
    folder: Path | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)
