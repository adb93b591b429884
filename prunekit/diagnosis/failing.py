"""What an exception of a model's says about shapes."""

from __future__ import annotations

import re
import traceback
from pathlib import Path

import torch
from torch import Tensor

from prunekit.diagnosis.observation import Failure, Shape
from prunekit.diagnosis.watching import Running, shapes_of

SHAPE_WORDS = re.compile(
    r"\b(shapes?|sizes?|dimensions?|channels?|expand|broadcast|numel|stack|split|view|batch_size|Expected \d-?D)\b",
    re.I,
)
"""What torch's messages about sizes that do not go together have in common: there is no exception of their own."""
_TORCH = f"{Path(torch.__file__).parent}/"
_PACKAGE = Path(__file__).parents[1]
_AROUND = (
    *(f"{_PACKAGE / room}/" for room in ("diagnosis", "calibration", "hooks", "masking")),
    f"{_PACKAGE / 'channels' / 'modes.py'}",
)


def failure_of(error: Exception, running: Running, stage: str = "the forward pass") -> Failure:
    """What happened, from an exception and from what was running."""
    text = str(error).strip().splitlines()
    line, operands = _own_line(error)
    received = running.received[-1] if running.received else []
    inside = running.paths[-1] != ""
    return Failure(
        module=running.current,
        received=shapes_of(received),
        operands={name: tuple(tensor.shape) for name, tensor in operands.items()},
        error=f"{type(error).__name__}: {text[0] if text else ''}",
        line=line,
        trail=running.trail([*(received if inside else []), *operands.values()]),
        of_shapes=not isinstance(error, (TypeError, AttributeError)) and bool(SHAPE_WORDS.search(str(error))),
        stage=stage,
    )


def _own_line(error: Exception) -> tuple[str, dict[str, Tensor]]:
    """The innermost line of the model's own code, and the tensors that it names; empty where all of it is torch's."""
    frames = zip(traceback.walk_tb(error.__traceback__), traceback.extract_tb(error.__traceback__), strict=True)
    for (frame, _), summary in reversed(list(frames)):
        if not summary.filename.startswith((_TORCH, *_AROUND)):
            text = summary.line or ""
            values = {name: frame.f_locals.get(name) for name in re.findall(r"[A-Za-z_]\w*", text)}
            tensors = {name: value for name, value in values.items() if isinstance(value, Tensor)}
            return f"{Path(summary.filename).name}:{summary.lineno}: {text}", tensors
    return "", {}


def shown(shapes: tuple[Shape, ...]) -> str:
    """Shapes as text."""
    return ", ".join(map(str, shapes)) or "no tensor"
