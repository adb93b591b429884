"""Files that runtimes run: models exported to ONNX, and quantized to int8."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
from torch import nn

from prunekit.errors import RunError
from prunekit.formats.onnx import export_onnx
from prunekit.hooks.model_copy import copied
from prunekit.measure.runtimes.session import INT8, FileKey, Inputs, Sample, Source, in_dtype
from prunekit.quantization.onnx_quantization import OnnxQuantizer, input_names
from prunekit.quantization.openvino_quantization import OpenvinoQuantizer
from prunekit.utils.tensors import gather


def onnx_source(model: nn.Module, inputs: Inputs, keys: Iterable[FileKey], folder: Path) -> Source:
    """Export a model to files for each batch and dtype, in a folder that is created if need be.

    Quantized files are calibrated on the sample that they are timed on: times do not depend on the ranges.
    """
    folder.mkdir(exist_ok=True)
    wanted = set(keys)
    quantized = {key for key in wanted if key[1].startswith(INT8)}
    exported = (wanted - quantized) | {(batch, "float32") for batch, _ in quantized}
    with torch.inference_mode(False), torch.no_grad():  # export traces, which needs version counters
        files = {key: _file(model, inputs, *key, folder) for key in sorted(exported)}
    for batch, dtype in sorted(quantized):
        files[batch, dtype] = _quantized(files[batch, "float32"], dtype, inputs.sample(batch), folder)
    return Source(files=files)


def _file(model: nn.Module, inputs: Inputs, batch: int, dtype: str, folder: Path) -> Path:
    sample, path = inputs.sample(batch), folder / f"{batch}-{dtype}.onnx"
    if path.exists():  # it is the same model's
        return path
    if dtype == "float32":
        return export_onnx(model, sample, path)
    kind: torch.dtype = getattr(torch, dtype)
    return export_onnx(copied(model, dtype=kind), in_dtype(sample, kind), path)


def _quantized(file: Path, dtype: str, sample: Sample, folder: Path) -> Path:
    """Quantize a file by the quantizer that the key of its dtype names, in a folder of its own."""
    place = folder / f"{file.stem} {dtype}"
    place.mkdir()
    arrays = [one.numpy() for one in gather(sample)]
    batch = dict(zip(input_names(file), arrays, strict=True))
    quantizer: OnnxQuantizer | OpenvinoQuantizer
    if dtype.endswith("nncf"):
        quantizer = OpenvinoQuantizer(file, place, [batch], 1, correct_biases=False)
    else:
        quantizer = OnnxQuantizer(file, place, [batch], 1)
    if not quantizer.layers:
        raise RunError("int8: expected layers that can be quantized, such as convolutions, and there are none")
    return quantizer.quantize(quantizer.ways[0], frozenset(quantizer.layers))
