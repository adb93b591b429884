"""Checks of exported files: their outputs beside the model's, at several batch sizes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from prunekit.backends.backend import FileBackend
from prunekit.backends.files.export_source import Run
from prunekit.channels.tracing.execution import first_outputs
from prunekit.errors import RunError, raised_as
from prunekit.measure.verification import largest_difference
from prunekit.models.interface import ModelInterface
from prunekit.utils.inputs import call, described, sample_count
from prunekit.utils.tensors import gather


@dataclass(frozen=True)
class Parity:
    """The agreement of an exported file with its model on one batch."""

    inputs: str  # shapes and dtypes, in words
    batch: int  # number of samples
    max_relative_difference: float  # largest difference of an output, over its largest value


def check_export(
    kind: FileBackend, path: Path, run: Run, model: nn.Module, interface: ModelInterface, example: tuple[Any, ...]
) -> Parity:
    """Compare a file's outputs with the model's in float32, on an example."""
    with torch.inference_mode():
        expected = gather(call(model, example))
    with raised_as(RunError, f"{kind.format}: the exported model does not run on {described(example)}: "):
        found = run(example)
    worst, reason = largest_difference(expected, found)
    if not worst <= kind.tolerance:
        named = "; ".join(_parted(expected, found, interface, kind.tolerance)) or reason
        where = kind.parts(path, example, first_outputs(model, example))
        raise RunError(
            f"{kind.format}: the exported model computes something else than {type(model).__name__} on "
            f"{described(example)}: {named}{f'; it first differs at {where}' if where else ''}; the file was removed"
        )
    return Parity(described(example), sample_count(example, 1), worst)


def _parted(
    expected: Sequence[Tensor], found: Sequence[Tensor], interface: ModelInterface, tolerance: float
) -> Iterator[str]:
    """Yield the difference of each output that differs by more than a tolerance."""
    if len(expected) != len(found):
        return
    names = [one.name for one in interface.outputs]
    for index, (want, got) in enumerate(zip(expected, found, strict=True)):
        difference, reason = largest_difference([want], [got])
        if not difference <= tolerance:
            yield f"{names[index] if index < len(names) else f'output {index}'}: {reason}"
