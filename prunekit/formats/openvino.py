"""Export of a model to OpenVINO's IR, and IR files in OpenVINO."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from prunekit.errors import ArtifactError, RunError, reason_of, reraise_shortage
from prunekit.formats.files.external_data import require_own_file
from prunekit.formats.files.node_modules import NodeModules
from prunekit.formats.format import ExportFormat, ExportSource, Run, register_format
from prunekit.formats.onnx import KEY, OPSET, interface_of_json, metadata_of, renamed_values, translated
from prunekit.formats.program import fed, program_of
from prunekit.models.interface import ModelInterface, TensorSpec
from prunekit.utils.availability import CPUINFO, int8_instructions

DTYPES = {"f32": "float32", "f16": "float16", "f64": "float64", "bf16": "bfloat16", "boolean": "bool"}
"""Names of dtypes in torch by OpenVINO's; integers are `i64` and `u8` there."""

SPARSE_RATE = 0.5
"""Share of zeros from which int8 weights of fully connected layers stay packed in memory, on CPUs with AMX."""

STARTS = (b"<?xml", b"<net")
"""Beginnings of IR files."""

MODULES = "prunekit_modules"
"""Key of the runtime information that names the module of each operator, as JSON."""


@register_format(
    "openvino",
    about="OpenVINO IR, .xml and .bin, with its interface in the runtime information",
    suffix=".xml",
    packages=("onnx", "onnxscript", "openvino"),
    install="pip install 'prunekit[openvino]'",
)
class OpenVinoFormat(ExportFormat):
    """IR files that OpenVINO converts from the graph of the ONNX export, and so with its names and operators."""

    def write(self, source: ExportSource, path: Path) -> list[str]:
        """Write a model: `NAME.xml`, and its weights in `NAME.bin` beside it."""
        program = program_of(source, flat=True)
        built = translated(source.model, program.exported, OPSET, program.interface)
        renamed_values(built.model, program)
        carrier = path.with_name(f"{path.stem}.onnx")
        data = path.with_name(f"{path.stem}.onnx.data")
        try:
            built.save(carrier)
            _convert(carrier, path, program.interface, source)
        finally:
            carrier.unlink(missing_ok=True)
            data.unlink(missing_ok=True)
        return program.notes

    def open(self, path: Path, *, threads: int = 1) -> Run:
        """Return a function that runs a file on the CPU, computing in float32 where OpenVINO would choose bfloat16."""
        model, interface = _read(path), self.interface(path)
        if len(interface.outputs) > len(model.outputs):
            raise ArtifactError(
                f"{path}: its interface has {len(interface.outputs)} outputs, its network {len(model.outputs)}; the "
                "file is damaged"
            )
        options = {"INFERENCE_NUM_THREADS": threads, "INFERENCE_PRECISION_HINT": "f32", "PERFORMANCE_HINT": "LATENCY"}
        request = openvino_core().compile_model(model, "CPU", options | sparse_options()).create_infer_request()
        taken = {name: entry for entry in model.inputs for name in entry.get_names()}
        ports = [_port(model, spec.name, index) for index, spec in enumerate(interface.outputs)]

        def run(example: tuple[Any, ...]) -> list[Tensor]:
            arrays = {name: tensor.numpy() for name, tensor in fed(example, interface).items() if name in taken}
            try:
                found = request.infer(arrays)
            except Exception as error:  # of OpenVINO
                reraise_shortage(error)
                raise RunError(f"{path}: OpenVINO cannot run it: {reason_of(error)}") from error
            return [torch.from_numpy(found[port].copy()) for port in ports]

        return run

    def interface(self, path: Path) -> ModelInterface:
        """Return the interface of a file; one that others made has that of its graph, without a task."""
        model = _read(path)
        if model.has_rt_info(KEY):
            return interface_of_json(str(model.get_rt_info(KEY).value), str(path))
        return ModelInterface(
            tuple(_spec(entry, f"input_{index}") for index, entry in enumerate(model.inputs)),
            tuple(_spec(entry, f"output_{index}") for index, entry in enumerate(model.outputs)),
        )


def _convert(carrier: Path, path: Path, interface: ModelInterface, source: ExportSource) -> None:
    import openvino

    try:
        model = openvino.convert_model(carrier)
    except Exception as error:  # of OpenVINO
        reraise_shortage(error)
        raise RunError(
            f"{type(source.model).__name__} cannot be converted to OpenVINO: {reason_of(error)}; use another format, "
            "such as onnx"
        ) from error
    for key, value in metadata_of(interface).items():
        model.set_rt_info(value, key)
    model.set_rt_info(json.dumps(NodeModules(carrier).of_names), MODULES)
    openvino.save_model(model, path, compress_to_fp16=source.options.half)


@cache
def openvino_core() -> Any:
    """Return OpenVINO's core, which lives until the process ends.

    Its CPU plug-in gives the thread that loads it a stack for signals, and frees it with the last reference: if a
    garbage collection in another thread does that, the next signal (a worker of a data loader that ends) kills the
    process.
    """
    import openvino

    return openvino.Core()


def sparse_options(cpuinfo: Path = CPUINFO) -> dict[str, float]:
    """Return the option of a compiled model by which int8 weights with many zeros are read packed; empty without AMX.

    It is OpenVINO's sparse weights decompression: for fully connected layers in int8 on CPUs with AMX alone, and for
    weights with at least `SPARSE_RATE` of zeros. The numbers stay the same.
    """
    able = "AMX" in (int8_instructions(cpuinfo) or ())
    return {"CPU_SPARSE_WEIGHTS_DECOMPRESSION_RATE": SPARSE_RATE} if able else {}


def _read(path: Path) -> Any:
    if not path.is_file():
        raise ArtifactError(f"{path}: expected an OpenVINO .xml file, and there is none")
    weights = path.with_suffix(".bin")
    if weights.is_symlink() or weights.exists():
        require_own_file(path, weights.name, "the file of its weights")
    with path.open("rb") as file:
        if not file.read(100).lstrip().startswith(STARTS):  # else OpenVINO tries what else it reads: ONNX, TensorFlow
            raise ArtifactError(f"{path}: expected an OpenVINO .xml file, and it is no XML of a network")
    try:
        return openvino_core().read_model(path)
    except Exception as error:  # of OpenVINO
        reraise_shortage(error)
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]  # the cause is in the last
        raise ArtifactError(
            f"{path}: expected an OpenVINO .xml file with its weights in {path.stem}.bin beside it, but "
            f"{lines[-1] if lines else reason_of(error)}"
        ) from error


def _port(model: Any, name: str, index: int) -> int:
    """Return the number of the output of a name."""
    return next((at for at, entry in enumerate(model.outputs) if name in entry.get_names()), index)


def _spec(entry: Any, name: str) -> TensorSpec:
    called = entry.get_any_name() if entry.get_names() else name
    kind = entry.get_element_type().get_type_name()
    dtype = DTYPES.get(kind) or {"i": "int", "u": "uint"}.get(kind[:1], kind[:1]) + kind[1:]
    shape = tuple(
        f"{called}_{axis}" if size.is_dynamic else size.get_length() for axis, size in enumerate(entry.partial_shape)
    )
    return TensorSpec(called, dtype, shape)
