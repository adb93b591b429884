"""TensorRT on CUDA."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from prunekit.errors import RunError
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
        import tensorrt

        class Logger(tensorrt.ILogger):  # type: ignore[misc]
            """Collects errors for the message: a process of its own has no terminal."""

            def __init__(self) -> None:
                tensorrt.ILogger.__init__(self)
                self.said: list[str] = []

            def log(self, severity: Any, message: str) -> None:
                if severity in (tensorrt.ILogger.ERROR, tensorrt.ILogger.INTERNAL_ERROR):
                    self.said.append(message)

        self.logger = logger = Logger()
        builder = tensorrt.Builder(logger)
        network = builder.create_network(1 << int(tensorrt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
        parser = tensorrt.OnnxParser(network, logger)
        if not parser.parse_from_file(str(file)):
            raise RunError(f"tensorrt: cannot read the exported model: {parser.get_error(0).desc()}")
        built = builder.build_serialized_network(network, builder.create_builder_config())
        if built is None:
            raise RunError(f"tensorrt: no engine could be built: {'; '.join(logger.said) or 'it does not say why'}")
        self.input_names = [network.get_input(index).name for index in range(network.num_inputs)]
        names = [network.get_output(index).name for index in range(network.num_outputs)]
        self.runtime = tensorrt.Runtime(logger)
        self.engine = self.runtime.deserialize_cuda_engine(built)
        self.context = self.engine.create_execution_context()
        self.outputs = [self._empty(name, device) for name in names]
        for name, output in zip(names, self.outputs, strict=True):
            self.context.set_tensor_address(name, output.data_ptr())
        # On the default stream every forward would wait for the whole device.
        self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def _empty(self, name: str, device: torch.device) -> Tensor:
        import tensorrt

        dtypes: dict[Any, torch.dtype] = {
            tensorrt.float32: torch.float32,
            tensorrt.float16: torch.float16,
            tensorrt.bfloat16: torch.bfloat16,
            tensorrt.int64: torch.int64,
            tensorrt.int32: torch.int32,
            tensorrt.int8: torch.int8,
            tensorrt.uint8: torch.uint8,
            tensorrt.bool: torch.bool,
        }
        shape = tuple(self.engine.get_tensor_shape(name))
        return torch.empty(shape, dtype=dtypes[self.engine.get_tensor_dtype(name)], device=device)

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
            raise RunError(f"tensorrt: a forward failed: {'; '.join(self.logger.said) or 'it does not say why'}")
        around.wait_stream(self.stream)
