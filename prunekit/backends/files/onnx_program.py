"""ONNX programs of a model, which files of ONNX, OpenVINO and TensorRT are made from."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from prunekit.backends.files.program import Program, failure, trace, tracing
from prunekit.errors import RunError, reraise_shortage
from prunekit.hooks.model_copy import copied
from prunekit.models.interface import ModelInterface, input_specs_of
from prunekit.utils.context import set_mode
from prunekit.utils.files import StrPath
from prunekit.utils.inputs import as_example
from prunekit.utils.tensors import map_tensors

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
    example = map_tensors(as_example(model, sample), torch.detach)
    model = set_mode(copied(model), False)
    try:
        translated(model, trace(model, example), OPSET, ModelInterface(input_specs_of(model, example), ())).save(
            Path(path)
        )
    except RunError as error:
        raise RunError(str(error).replace("cannot be exported", "cannot be exported to ONNX", 1)) from error
    return Path(path)


def translated(
    model: nn.Module, exported: torch.export.ExportedProgram, opset: int, interface: ModelInterface | None = None
) -> Any:
    """Return the ONNX program of a program of `torch.export`, simplified by onnxscript's optimizer."""
    names: dict[str, Any] = {}
    if interface is not None:
        names["input_names"] = [spec.name for spec in interface.inputs]
        if interface.outputs:
            names["output_names"] = [spec.name for spec in interface.outputs]
    with tracing():
        try:
            program = torch.onnx.export(exported, dynamo=True, opset_version=opset, verbose=False, **names)
        except Exception as error:
            reraise_shortage(error)
            raise RunError(
                f"{type(model).__name__} cannot be exported to ONNX: {failure(error, model)}; compute it there with "
                "operators that ONNX has, or use another format, such as pt2"
            ) from error
    assert program is not None
    return program


def renamed_values(model: Any, program: Program) -> None:
    """Give axes of any size their names in a graph, and its results other names than its inputs and outputs."""
    import onnx_ir
    from onnx_ir.passes.common import NameFixPass

    for value in _graph_values(model.graph):
        if value.shape is not None:
            sizes = [size if isinstance(size, int) else program.renamed(str(size.value)) for size in value.shape]
            value.shape = onnx_ir.Shape(sizes)
    NameFixPass()(model)


def _graph_values(graph: Any) -> Iterator[Any]:
    yield from graph.inputs
    for node in graph:
        yield from node.outputs
