"""Files that runtimes run: models exported to ONNX, and quantized to int8."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
from torch import nn

from prunekit.channels.cut.model_copy import copied
from prunekit.formats.onnx import export_onnx
from prunekit.measure.runtimes.session import FileKey, Inputs, Source, in_dtype


def onnx_source(model: nn.Module, inputs: Inputs, keys: Iterable[FileKey], folder: Path) -> Source:
    """Export a model to ONNX files, for each batch and dtype, in a folder that is created if need be.

    Raises:
        RunError: the exporter cannot follow the model.
    """
    folder.mkdir(exist_ok=True)
    with torch.inference_mode(False), torch.no_grad():  # export traces, which needs version counters
        return Source(files={key: _file(model, inputs, *key, folder) for key in sorted(set(keys))})


def _file(model: nn.Module, inputs: Inputs, batch: int, dtype: str, folder: Path) -> Path:
    sample, path = inputs.sample(batch), folder / f"{batch}-{dtype}.onnx"
    if dtype == "float32":
        return export_onnx(model, sample, path)
    kind: torch.dtype = getattr(torch, dtype)
    return export_onnx(copied(model, dtype=kind), in_dtype(sample, kind), path)
