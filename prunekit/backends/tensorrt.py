"""TensorRT on CUDA: engines are built, opened and timed."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from prunekit.backends.backend import FORMATS, ProgramBackend, register_backend
from prunekit.backends.files.export_source import ExportSource, Run, beside, fed, read_beside
from prunekit.backends.files.onnx_program import onnx_program_of
from prunekit.backends.files.program import largest_sizes
from prunekit.backends.session import Sample, Session, Setting, Source
from prunekit.compaction.zero_patterns import zero_pattern
from prunekit.errors import ArtifactError, RunError
from prunekit.models.interface import BATCH, ModelInterface
from prunekit.utils.display import listed, plural
from prunekit.utils.tensors import gather

Sizes = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
"""Smallest, usual and largest shape of an input."""


@register_backend(
    format="tensorrt",
    runtime="tensorrt",
    about="TensorRT engine, built for this machine's GPU",
    runs="TensorRT, on the exported file in the setting's dtype",
    suffix=".engine",
    packages=("onnx", "onnxscript", "tensorrt"),
    install="pip install 'prunekit[tensorrt]'",
    carrier="onnx",
    devices=("cuda",),
    measures_memory=False,
    typed_files=True,
)
class TensorRt(ProgramBackend):
    """Engines that TensorRT builds from the graph of the ONNX export, with a JSON of the interface beside them."""

    loader = "TensorRT's runtime"

    def write(self, source: ExportSource, path: Path) -> list[str]:
        """Build an engine: `NAME.engine`, and its interface in `NAME.engine.json`; for this GPU and this TensorRT."""
        self.require_writable(source, "an engine computes")
        most = largest_sizes(source)
        program, built = onnx_program_of(source)
        shapes = _shapes(program.interface, program.example, most)
        with TemporaryDirectory() as folder:
            file = Path(folder, "model.onnx")
            built.save(file)
            engine = built_engine(file, engine_logger(), shapes, exact=True)
            packed = two_of_four_weights(file)
        path.write_bytes(engine)
        beside(path).write_text(json.dumps(program.interface.as_dict()), encoding="utf-8")
        notes = [f"the engine takes a {name} of at most {size}" for name, size in most.items()]
        return [
            *program.notes,
            *notes,
            *sparse_notes(packed),
            "the engine is for this GPU and this version of TensorRT; build it again for others",
        ]

    def code_in(self, path: Path) -> str:
        """Return that an engine is compiled code."""
        return "it is an engine of TensorRT, which is machine code for the GPU and may name plug-in libraries"

    def open_trusted(self, path: Path, *, threads: int = 1) -> Run:
        """Return a function that runs an engine on the current GPU."""
        interface = self.interface(path)
        engine = _Engine(path.read_bytes(), interface, torch.device("cuda"), engine_logger(), str(path))
        dtypes = [getattr(torch, spec.dtype) for spec in interface.outputs]

        def run(example: tuple[Any, ...]) -> list[Tensor]:
            engine.bind(example)
            engine.run()
            engine.stream.synchronize()
            return [output.cpu().to(dtype) for output, dtype in zip(engine.outputs, dtypes, strict=True)]

        return run

    def interface(self, path: Path) -> ModelInterface:
        """Return the interface in the JSON beside an engine."""
        return ModelInterface.from_dict(read_beside(path), str(beside(path)))

    def refuse(self, setting: Setting) -> str:
        """Return why it cannot run a setting."""
        return "" if setting.memory_format == "contiguous" else "it chooses layouts itself"

    def session(self, source: Source, sample: Sample, setting: Setting) -> Session:
        """Build an engine from the ONNX file.

        The network is strongly typed: it computes in the dtypes of the file, as TensorRT 11 always does, but with TF32
        in float32, as torch's convolutions do. Memory is not torch's, and is not measured.
        """
        file, logger = source.files[setting.batch, setting.dtype], engine_logger()
        interface, device = FORMATS.get(self.carrier).interface(file), torch.device(setting.device)
        engine = _Engine(built_engine(file, logger), interface, device, logger, "tensorrt")
        engine.bind(sample)
        return Session(engine.run, lambda _: engine.outputs)


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

    The network is strongly typed: it computes in the dtypes of the file, as TensorRT 11 always does. Where weights are
    2:4, TensorRT may choose kernels of sparse tensor cores, and does where they are faster by its own timing. Inputs
    with axes of any size have `shapes`.
    """
    import tensorrt

    builder = tensorrt.Builder(logger)
    network = builder.create_network(1 << int(tensorrt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = tensorrt.OnnxParser(network, logger)
    if not parser.parse_from_file(str(file)):
        problem = parser.get_error(0).desc() if parser.num_errors else said(logger)
        raise RunError(f"tensorrt: cannot read the exported model: {problem}")
    config = builder.create_builder_config()
    if two_of_four_weights(file):
        config.set_flag(tensorrt.BuilderFlag.SPARSE_WEIGHTS)
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


def two_of_four_weights(file: Path) -> tuple[str, ...]:
    """Return the names of the weights in an ONNX file that are 2:4: what TensorRT's sparse kernels can compute.

    Of convolutions, groups of 4 are along input channels at each kernel position; of products, along the inputs.
    """
    import onnx

    graph = onnx.load(file).graph
    zeros = {one.name: torch.from_numpy(onnx.numpy_helper.to_array(one) != 0) for one in graph.initializer}
    turned = {
        node.output[0]: zeros[node.input[0]].t()
        for node in graph.node
        if node.op_type == "Transpose" and node.input[0] in zeros and zeros[node.input[0]].dim() == 2
    }
    values = zeros | turned
    found = {}
    for node in graph.node:
        weight = values.get(node.input[1]) if len(node.input) > 1 else None
        if weight is None or node.op_type not in ("Conv", "Gemm", "MatMul") or weight.dim() < 2:
            continue
        given = {attribute.name: attribute.i for attribute in node.attribute}
        if node.op_type == "Conv":
            found[node.input[1]] = zero_pattern(weight, groups=given.get("group", 1))
        elif weight.dim() == 2:
            found[node.input[1]] = zero_pattern(weight, transposed=not given.get("transB", 0))
    return tuple(name for name, pattern in found.items() if pattern.two_of_four)


def sparse_notes(weights: Sequence[str]) -> list[str]:
    """Return a note that weights are 2:4, if there are any."""
    if not weights:
        return []
    return [
        f"{plural(len(weights), 'weight')} are 2:4 ({listed(weights, 3)}): the engine may use sparse tensor cores, "
        "which TensorRT chooses where its own timing finds them faster"
    ]


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


class _Engine:
    """An engine with the tensors that it reads and writes, and the objects that must live as long as it does."""

    outputs: Sequence[Tensor]  # what the last run computed, on the device, in the order of the interface

    def __init__(self, built: bytes, interface: ModelInterface, device: torch.device, logger: Any, where: str) -> None:
        import tensorrt

        self.interface, self.device, self.logger, self.where = interface, device, logger, where
        self.runtime = tensorrt.Runtime(logger)
        self.engine = self.runtime.deserialize_cuda_engine(built)
        if self.engine is None:
            raise ArtifactError(
                f"{where}: expected a TensorRT engine that was built for this GPU and this version of TensorRT: "
                f"{said(logger)}"
            )
        self.context = self.engine.create_execution_context()
        self.names = {self.engine.get_tensor_name(index) for index in range(self.engine.num_io_tensors)}
        # On the default stream every forward would wait for the whole device.
        self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def bind(self, example: tuple[Any, ...]) -> None:
        """Make the engine read these tensors, moved to its device, and write new ones of the shapes that follow."""
        given = {name: one for name, one in fed(example, self.interface).items() if name in self.names}
        self.inputs = {
            name: one.to(self.device, dtype_of(self.engine, name)).contiguous() for name, one in given.items()
        }
        for name, tensor in self.inputs.items():
            shape = tuple(tensor.shape)
            if not self.context.set_input_shape(name, shape):
                raise RunError(f"{self.where}: the engine takes no {name} of shape {shape}: {said(self.logger)}")
            self.context.set_tensor_address(name, tensor.data_ptr())
        names = [spec.name for spec in self.interface.outputs]
        self.outputs = [
            torch.empty(
                tuple(self.context.get_tensor_shape(name)), dtype=dtype_of(self.engine, name), device=self.device
            )
            for name in names
        ]
        for name, output in zip(names, self.outputs, strict=True):
            self.context.set_tensor_address(name, output.data_ptr())

    def run(self) -> None:
        """Run one forward, in order with the work on the current stream."""
        around = torch.cuda.current_stream(self.device)
        self.stream.wait_stream(around)
        if not self.context.execute_async_v3(self.stream.cuda_stream):
            raise RunError(f"{self.where}: a forward failed: {said(self.logger)}")
        around.wait_stream(self.stream)
