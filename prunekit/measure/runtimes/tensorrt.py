"""TensorRT on CUDA."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from prunekit.errors import RunError
from prunekit.formats.tensorrt import built_engine, dtype_of, engine_logger, said
from prunekit.measure.runtimes.runtime import register_runtime
from prunekit.measure.runtimes.session import Sample, Session, Setting, Source, in_dtype
from prunekit.utils.tensors import gather


def _refuse(setting: Setting) -> str:
    return "" if setting.memory_format == "contiguous" else "it chooses layouts itself"


@register_runtime(
    "tensorrt",
    about="TensorRT, on the exported file in the setting's dtype",
    carrier="onnx",
    devices=("cuda",),
    packages=("onnx", "onnxscript", "tensorrt"),
    install="pip install 'prunekit[tensorrt]'",
    refuse=_refuse,
    measures_memory=False,
    typed_files=True,
)
def tensor_rt(source: Source, sample: Sample, setting: Setting) -> Session:
    """Build an engine from the file.

    The network is strongly typed: it computes in the dtypes of the file, as TensorRT 11 always does, but with TF32 in
    float32, as torch's convolutions do. Memory is not torch's, and is not measured.
    """
    device = torch.device(setting.device)
    engine = _Engine(source.files[setting.batch, setting.dtype], device)
    engine.bind([one.to(device) for one in gather(in_dtype(sample, setting.torch_dtype))])
    return Session(engine.run, lambda _: engine.outputs)


class _Engine:
    """An engine with the tensors that it reads and writes, and the objects that must live as long as it does."""

    def __init__(self, file: Path, device: torch.device) -> None:
        import onnx
        import tensorrt

        self.logger = engine_logger()
        built = built_engine(file, self.logger)
        self.runtime = tensorrt.Runtime(self.logger)
        self.engine = self.runtime.deserialize_cuda_engine(built)
        graph = onnx.load(file, load_external_data=False).graph
        self.input_names = [entry.name for entry in graph.input]
        names = [entry.name for entry in graph.output]
        self.context = self.engine.create_execution_context()
        self.outputs = [self._empty(name, device) for name in names]
        for name, output in zip(names, self.outputs, strict=True):
            self.context.set_tensor_address(name, output.data_ptr())
        # On the default stream every forward would wait for the whole device.
        self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def _empty(self, name: str, device: torch.device) -> Tensor:
        shape = tuple(self.engine.get_tensor_shape(name))
        return torch.empty(shape, dtype=dtype_of(self.engine, name), device=device)

    def bind(self, inputs: list[Tensor]) -> None:
        """Make the engine read these tensors."""
        self.inputs = [one.contiguous() for one in inputs]
        for name, one in zip(self.input_names, self.inputs, strict=True):
            self.context.set_tensor_address(name, one.data_ptr())

    def run(self) -> None:
        """Run one forward, in order with the work on the current stream."""
        around = torch.cuda.current_stream(self.stream.device)
        self.stream.wait_stream(around)
        if not self.context.execute_async_v3(self.stream.cuda_stream):
            raise RunError(f"tensorrt: a forward failed: {said(self.logger)}")
        around.wait_stream(self.stream)
