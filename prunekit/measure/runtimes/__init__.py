"""What runs models: one entry for each runtime, by the name that rows of results have."""

from prunekit.measure.runtimes.exporting import exported
from prunekit.measure.runtimes.onnx_runtime import onnx_runtime
from prunekit.measure.runtimes.open_vino import open_vino
from prunekit.measure.runtimes.setting import (
    FileKey,
    Inputs,
    LayerClock,
    Runtime,
    Sample,
    Session,
    Setting,
    Source,
    inputs_like,
    inputs_of,
    sample_of,
)
from prunekit.measure.runtimes.tensor_rt import tensor_rt
from prunekit.measure.runtimes.torch_modules import compiled, cuda_graphs, eager

RUNTIMES: dict[str, Runtime] = {
    "eager": eager(),
    "compile": compiled(),
    "cudagraphs": cuda_graphs(),
    "onnxruntime": onnx_runtime(),
    "openvino": open_vino(),
    "tensorrt": tensor_rt(),
}

__all__ = [
    "RUNTIMES",
    "FileKey",
    "Inputs",
    "LayerClock",
    "Runtime",
    "Sample",
    "Session",
    "Setting",
    "Source",
    "exported",
    "inputs_like",
    "inputs_of",
    "sample_of",
]
