"""Export of a model to ONNX."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn

from prunekit.channels.cut.model_copy import copied
from prunekit.errors import RunError
from prunekit.utils.context import set_mode
from prunekit.utils.files import StrPath
from prunekit.utils.inputs import as_example, split

OPSET = 23
"""The first with an operator for attention; later ones add nothing that torch's exporter uses."""


def export_onnx(model: nn.Module, sample: Any, path: StrPath) -> Path:
    """Write a model as one ONNX file, for inputs of exactly this shape, by `torch.onnx.export` on `torch.export`.

    Weights beyond two gigabytes, the limit of the format, are in a file beside it.

    Args:
        model: exported in eval mode; not changed.
        sample: an example, see `prunekit.utils.inputs.as_example`.
        path: of the file.

    Raises:
        UsageError: the sample is not an example.
        RunError: the exporter cannot follow the model.
    """
    positional, named = split(as_example(model, sample))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecations in the exporter itself
        try:
            program = torch.onnx.export(
                set_mode(copied(model), False),
                positional,
                kwargs=dict(named),
                dynamo=True,
                opset_version=OPSET,
                verbose=False,
            )
            assert program is not None
            program.save(Path(path))
        except Exception as error:  # errors of the exporter, or any of the model's code
            raise RunError(f"{type(model).__name__} cannot be exported to ONNX: {_cause(error)}") from error
    return Path(path)


def _cause(error: BaseException) -> str:
    """Return the first line of the original error, which the exporter wraps in advice."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {str(error).strip()}".splitlines()[0]
