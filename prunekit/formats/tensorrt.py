"""Export of a model to a TensorRT engine, and the parts of TensorRT that engines are built and run with."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from prunekit.errors import ArtifactError, RunError, UsageError
from prunekit.formats.format import ExportFormat, ExportSource, Run, register_format
from prunekit.formats.onnx import OPSET, interface_of_json, renamed_values, translated
from prunekit.formats.program import fed, largest_sizes, program_of
from prunekit.models.interface import BATCH, ModelInterface
from prunekit.utils.tensors import gather

Sizes = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
"""Smallest, usual and largest shape of an input."""


@register_format(
    "tensorrt",
    about="TensorRT engine, built for this machine's GPU",
    suffix=".engine",
    packages=("onnx", "onnxscript", "tensorrt"),
    install="pip install 'prunekit[tensorrt]'",
)
class TensorRtFormat(ExportFormat):
    """Engines that TensorRT builds from the graph of the ONNX export, with a JSON of the interface beside them."""

    def unusable(self) -> str:
        """Return that there is no GPU, or no package."""
        if problem := self.missing():
            return problem
        return "" if torch.cuda.is_available() else "needs a CUDA GPU, and there is none here"

    def write(self, source: ExportSource, path: Path) -> list[str]:
        """Build an engine: `NAME.engine`, and its interface in `NAME.engine.json`; for this GPU and this TensorRT."""
        if source.options.half:
            raise UsageError("half: an engine computes in the dtype of its model; use onnx or openvino")
        if problem := self.unusable():
            raise UsageError(f"tensorrt: {problem}")
        most = largest_sizes(source)
        program = program_of(source, flat=True)
        built = translated(source.model, program.exported, OPSET, program.interface)
        renamed_values(built.model, program)
        shapes = _shapes(program.interface, program.example, most)
        with TemporaryDirectory() as folder:
            file = Path(folder, "model.onnx")
            built.save(file)
            engine = built_engine(file, engine_logger(), shapes, exact=True)
        path.write_bytes(engine)
        _beside(path).write_text(json.dumps(program.interface.as_dict()), encoding="utf-8")
        notes = [f"the engine takes a {name} of at most {size}" for name, size in most.items()]
        return [
            *program.notes,
            *notes,
            "the engine is for this GPU and this version of TensorRT; build it again for others",
        ]

    def open(self, path: Path, *, threads: int = 1) -> Run:
        """Return a function that runs an engine on the current GPU."""
        import tensorrt

        interface, device, logger = self.interface(path), torch.device("cuda"), engine_logger()
        runtime = tensorrt.Runtime(logger)
        engine = runtime.deserialize_cuda_engine(path.read_bytes())
        if engine is None:
            raise ArtifactError(
                f"{path}: expected a TensorRT engine that was built for this GPU and this version of TensorRT: "
                f"{said(logger)}"
            )
        context = engine.create_execution_context()
        known = {engine.get_tensor_name(index) for index in range(engine.num_io_tensors)}

        def run(example: tuple[Any, ...]) -> list[Tensor]:
            given = {name: one for name, one in fed(example, interface).items() if name in known}
            inputs = {name: one.to(device, dtype_of(engine, name)).contiguous() for name, one in given.items()}
            for name, tensor in inputs.items():
                if not context.set_input_shape(name, tuple(tensor.shape)):
                    raise RunError(f"{path}: the engine takes no {name} of shape {tuple(tensor.shape)}: {said(logger)}")
                context.set_tensor_address(name, tensor.data_ptr())
            names = [spec.name for spec in interface.outputs]
            outputs = [
                torch.empty(tuple(context.get_tensor_shape(name)), dtype=dtype_of(engine, name), device=device)
                for name in names
            ]
            for name, output in zip(names, outputs, strict=True):
                context.set_tensor_address(name, output.data_ptr())
            stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            stream.wait_stream(torch.cuda.current_stream(device))
            if not context.execute_async_v3(stream.cuda_stream):
                raise RunError(f"{path}: a forward failed: {said(logger)}")
            stream.synchronize()
            dtypes = [getattr(torch, spec.dtype) for spec in interface.outputs]
            return [output.cpu().to(dtype) for output, dtype in zip(outputs, dtypes, strict=True)]

        return run

    def interface(self, path: Path) -> ModelInterface:
        """Return the interface in the JSON beside an engine."""
        beside = _beside(path)
        if not beside.is_file():
            raise ArtifactError(f"{path}: expected its interface in {beside.name} beside it, and there is none")
        return interface_of_json(beside.read_text(encoding="utf-8"), str(beside))


def _beside(path: Path) -> Path:
    return path.with_name(f"{path.name}.json")


def _shapes(interface: ModelInterface, example: tuple[Any, ...], most: Mapping[str, int]) -> dict[str, Sizes]:
    """Return the shapes that an engine is optimized for; axes besides the batch from half the example's size on."""
    found: dict[str, Sizes] = {}
    for spec, tensor in zip(interface.inputs, gather(example), strict=True):
        if any(isinstance(size, str) for size in spec.shape):
            usual = tuple(tensor.shape)
            least = [1 if name == BATCH else max(1, size // 2) for name, size in zip(spec.shape, usual, strict=True)]
            found[spec.name] = (
                tuple(low if isinstance(name, str) else name for name, low in zip(spec.shape, least, strict=True)),
                usual,
                tuple(most[name] if isinstance(name, str) else name for name in spec.shape),
            )
    return found


def engine_logger() -> Any:
    """Return a logger of TensorRT that collects errors in `said`: a process of its own has no terminal."""
    import tensorrt

    class Logger(tensorrt.ILogger):  # type: ignore[misc]
        """Collects errors for the message."""

        def __init__(self) -> None:
            tensorrt.ILogger.__init__(self)
            self.said: list[str] = []

        def log(self, severity: Any, message: str) -> None:
            if severity in (tensorrt.ILogger.ERROR, tensorrt.ILogger.INTERNAL_ERROR):
                self.said.append(message)

    return Logger()


def said(logger: Any) -> str:
    """Return the errors that a logger collected."""
    return "; ".join(logger.said) or "it does not say why"


def built_engine(file: Path, logger: Any, shapes: Mapping[str, Sizes] | None = None, *, exact: bool = False) -> bytes:
    """Return an engine of an ONNX file.

    The network is strongly typed: it computes in the dtypes of the file, as TensorRT 11 always does.

    Args:
        file: the ONNX file.
        logger: see `engine_logger`.
        shapes: smallest, usual and largest shape of each input that has axes of any size.
        exact: whether products of float32 are in float32, and not in TF32.

    Raises:
        RunError: TensorRT cannot read the file, or build the engine.
    """
    import tensorrt

    builder = tensorrt.Builder(logger)
    network = builder.create_network(1 << int(tensorrt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = tensorrt.OnnxParser(network, logger)
    if not parser.parse_from_file(str(file)):
        problem = parser.get_error(0).desc() if parser.num_errors else said(logger)
        raise RunError(f"tensorrt: cannot read the exported model: {problem}")
    config = builder.create_builder_config()
    if exact:
        config.clear_flag(tensorrt.BuilderFlag.TF32)
    if shapes:
        profile = builder.create_optimization_profile()
        for name, (least, usual, most) in shapes.items():
            profile.set_shape(name, least, usual, most)
        config.add_optimization_profile(profile)
    built = builder.build_serialized_network(network, config)
    if built is None:
        raise RunError(f"tensorrt: no engine could be built: {said(logger)}")
    return bytes(built)


def dtype_of(engine: Any, name: str) -> torch.dtype:
    """Return the dtype of a tensor of an engine."""
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
    return dtypes[engine.get_tensor_dtype(name)]
