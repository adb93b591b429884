"""OpenVINO: files of its IR are written, opened, timed on the CPU, and quantized by NNCF."""

import json
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import Tensor

from prunekit.backends.backend import FileBackend, register_backend
from prunekit.backends.files.export_source import (
    KEY,
    ExportSource,
    Run,
    fed_arrays,
    interface_of_json,
    metadata_of,
    require_own_file,
)
from prunekit.backends.files.onnx_program import NodeModules, onnx_program_of
from prunekit.backends.int8.openvino_quantizer import MODULES, OpenvinoQuantizer, openvino_core, sparse_options
from prunekit.backends.int8.quantizer import Array, Batch
from prunekit.backends.session import INT8, LayerClock, Sample, Session, Setting, Source
from prunekit.errors import ArtifactError, RunError, raised_as, reason_of
from prunekit.models.interface import ModelInterface, TensorSpec
from prunekit.utils.tensors import gather

DTYPES = {"f32": "float32", "f16": "float16", "f64": "float64", "bf16": "bfloat16", "boolean": "bool"}
"""Names of dtypes in torch by OpenVINO's; integers are `i64` and `u8` there."""

STARTS = (b"<?xml", b"<net")
"""Beginnings of IR files."""
HINTS = {"float32": "f32", "bfloat16": "bf16", "float16": "f16", INT8: "f32"}
"""Precisions of the kernels; in a quantized file, of the kernels of layers that stayed in float."""
CAPABILITIES = {"float32": "FP32", "bfloat16": "BF16", "float16": "FP16", INT8: "INT8"}

ROUNDING_US = 0.5
"""Mean of the fractions of microseconds that the counters cut off."""


@register_backend(
    format="openvino",
    runtime="openvino",
    about="OpenVINO IR, .xml and .bin, with its interface in the runtime information",
    runs="OpenVINO's CPU plug-in tuned for latency, on the exported file",
    suffix=".xml",
    packages=("onnx", "onnxscript", "openvino"),
    install="pip install 'prunekit[openvino]'",
    carrier="onnx",
    reads=("onnx",),
    quantizer="nncf",
    times_layers=True,
    chooses_dtype=True,
)
class OpenVino(FileBackend):
    """IR files that OpenVINO converts from the graph of the ONNX export, and so with its names and operators.

    What is timed is that graph: sessions are made from ONNX files.
    """

    def write(self, source: ExportSource, path: Path) -> list[str]:
        """Write a model: `NAME.xml`, and its weights in `NAME.bin` beside it."""
        import openvino

        program, built = onnx_program_of(source)
        failed = f"{type(source.model).__name__} cannot be converted to OpenVINO: "
        with TemporaryDirectory(prefix=f"{path.name}.", dir=path.parent) as folder:
            carrier = Path(folder, f"{path.stem}.onnx")
            built.save(carrier)
            with raised_as(RunError, failed, "; use another format, such as onnx"):
                model = openvino.convert_model(carrier)
            for key, value in metadata_of(program.interface).items():
                model.set_rt_info(value, key)
            model.set_rt_info(json.dumps(NodeModules(carrier).of_names), MODULES)
            openvino.save_model(model, path, compress_to_fp16=source.options.half)
        return program.notes

    def open(self, path: Path, *, threads: int = 1) -> Run:
        """Return a function that runs a file on the CPU, computing in float32 where OpenVINO would choose bfloat16."""
        model, interface = _read(path), self.interface(path)
        if len(interface.outputs) > len(model.outputs):
            raise ArtifactError(
                f"{path}: its interface has {len(interface.outputs)} outputs, its network {len(model.outputs)}; the "
                "file is damaged"
            )
        request, taken = _compiled(model, threads, "f32").create_infer_request(), _input_names(model)
        known = [entry.get_names() for entry in model.outputs]
        ports = [
            next((at for at, names in enumerate(known) if spec.name in names), index)
            for index, spec in enumerate(interface.outputs)
        ]

        def run(example: tuple[Any, ...]) -> list[Tensor]:
            arrays = fed_arrays(example, interface, taken)
            with raised_as(RunError, f"{path}: OpenVINO cannot run it: "):
                found = request.infer(arrays)
            return _tensors(found, ports)

        return run

    def interface(self, path: Path) -> ModelInterface:
        """Return the interface that prunekit wrote into a file; else that of its graph, without a task."""
        model = _read(path)
        if model.has_rt_info(KEY):
            return interface_of_json(str(model.get_rt_info(KEY).value), str(path))
        return ModelInterface(
            tuple(_spec(entry, f"input_{index}") for index, entry in enumerate(model.inputs)),
            tuple(_spec(entry, f"output_{index}") for index, entry in enumerate(model.outputs)),
        )

    def refuse(self, setting: Setting) -> str:
        """Return why it cannot run a setting."""
        if setting.memory_format != "contiguous":
            return "it chooses layouts itself"
        able = openvino_core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
        return "" if CAPABILITIES[setting.dtype] in able else f"it has no {setting.dtype} kernels for this CPU"

    def session(self, source: Source, sample: Sample, setting: Setting) -> Session:
        """Compile the ONNX file; the setting's dtype is the precision of the kernels."""
        key = (setting.batch, "float32") if setting.dtype != INT8 else self.file_key(setting)
        file, arrays = source.files[key], [one.numpy() for one in gather(sample)]
        exported = source.files[setting.batch, "float32"]
        compiled = compiled_file(file, setting)
        return Session(
            _run_of(compiled, arrays),
            lambda found: _tensors(found, compiled.outputs),
            lambda: _layer_clock(file, NodeModules(exported), setting, arrays),
        )

    def file_session(
        self, path: Path, interface: ModelInterface, sample: Sample, setting: Setting, *, trusted: bool
    ) -> Session:
        """Compile an exported file, IR or ONNX, which is fed by the names of its interface."""
        compiled = compiled_file(path, setting)
        arrays, names = fed_arrays(sample, interface, _input_names(compiled)), [one.name for one in interface.outputs]
        return Session(_run_of(compiled, arrays), lambda found: _tensors(found, names))

    def quantizer_of(
        self, file: Path, folder: Path, batches: Iterable[Batch], images: int, *, only_timed: bool = False
    ) -> OpenvinoQuantizer:
        """Return NNCF's quantization of a file, IR or ONNX."""
        return OpenvinoQuantizer(file, folder, batches, images, correct_biases=not only_timed)


def _input_names(model: Any) -> list[str]:
    return [name for entry in model.inputs for name in entry.get_names()]


def _tensors(found: Any, outputs: Iterable[Any]) -> list[Tensor]:
    """Return copies of some results, by what OpenVINO takes for an output: its name, its number or itself."""
    return [torch.from_numpy(found[output].copy()) for output in outputs]


def _run_of(compiled: Any, arrays: Any) -> Callable[[], Any]:
    request = compiled.create_infer_request()
    return lambda: request.infer(arrays, share_inputs=True, share_outputs=True)


def _read(path: Path) -> Any:
    if not path.is_file():
        raise ArtifactError(f"{path}: expected an OpenVINO .xml file, and there is none")
    weights = path.with_suffix(".bin")
    if weights.is_symlink() or weights.exists():
        require_own_file(path, weights.name, "the file of its weights")
    with path.open("rb") as file:
        if not file.read(100).lstrip().startswith(STARTS):  # else OpenVINO tries what else it reads: ONNX, TensorFlow
            raise ArtifactError(f"{path}: expected an OpenVINO .xml file, and it is no XML of a network")
    expected = f"{path}: expected an OpenVINO .xml file with its weights in {path.stem}.bin beside it, but "
    with raised_as(ArtifactError, expected, reason=_last_line):
        return openvino_core().read_model(path)


def _last_line(error: Exception) -> str:
    """Return the last line of an error of OpenVINO, which has the cause."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else reason_of(error)


def _spec(entry: Any, name: str) -> TensorSpec:
    called = entry.get_any_name() if entry.get_names() else name
    kind = entry.get_element_type().get_type_name()
    dtype = DTYPES.get(kind) or {"i": "int", "u": "uint"}.get(kind[:1], kind[:1]) + kind[1:]
    shape = tuple(
        f"{called}_{axis}" if size.is_dynamic else size.get_length() for axis, size in enumerate(entry.partial_shape)
    )
    return TensorSpec(called, dtype, shape)


def _compiled(model: Any, threads: int, hint: str, **others: Any) -> Any:
    """Return a model that is compiled for the CPU, tuned for latency, with kernels of a precision."""
    options = {"PERFORMANCE_HINT": "LATENCY", "INFERENCE_NUM_THREADS": threads, "INFERENCE_PRECISION_HINT": hint}
    return openvino_core().compile_model(model, "CPU", options | sparse_options() | others)


def compiled_file(file: Path, setting: Setting, **others: Any) -> Any:
    """Return a file, ONNX or OpenVINO's own, compiled for a setting, whose dtype is the precision of the kernels.

    Raises:
        RunError: its kernels compute in another precision.
    """
    hint = HINTS[setting.dtype]
    compiled = _compiled(openvino_core().read_model(file), setting.threads, hint, **others)
    used = compiled.get_property("INFERENCE_PRECISION_HINT").get_type_name()
    if used != hint:  # without kernels for the hint, it silently takes another
        raise RunError(f"openvino: asked for {hint}, and its kernels compute in {used}")
    return compiled


def _layer_clock(file: Path, modules: NodeModules, setting: Setting, arrays: list[Any]) -> LayerClock:
    """Return a clock by OpenVINO's counters: means over all forwards so far, in whole microseconds."""
    compiled = compiled_file(file, setting, PERF_COUNT=True)
    request, module_of = compiled.create_infer_request(), _modules_of(compiled.get_runtime_model(), modules)
    means_us: list[list[float]] = []

    def run() -> None:
        request.infer(arrays, share_inputs=True, share_outputs=True)
        means_us.append([node.real_time.total_seconds() * 1e6 for node in request.profiling_info])

    def passes(count: int) -> list[dict[str | None, float]]:
        times: dict[str | None, float] = defaultdict(float)
        for node, us in zip(request.profiling_info, undisturbed_means(np.array(means_us), count), strict=True):
            if node.status == node.Status.EXECUTED:
                times[module_of.get(node.node_name)] += float(us) / 1000
        return [dict(times)]

    return LayerClock(run, passes)


def undisturbed_means(means: Array, count: int) -> Array:
    """Return the time of each operator, from running means (forwards, operators) that are cut off to whole numbers.

    The time of one forward is the difference of two sums, and as coarse as the number of forwards before; the mean
    over several is finer. Forwards that another process disturbed are left out.
    """
    total = len(means)
    sums = np.vstack([np.zeros_like(means[:1]), (means + ROUNDING_US) * np.arange(1, total + 1)[:, None]])
    each = np.diff(sums, axis=0)[-count:]
    kept = each <= 2 * np.median(each, axis=0) + 4 * total
    found: Array = np.maximum(0.0, np.mean(each, axis=0, where=kept))
    return found


def _modules_of(executed: Any, modules: NodeModules) -> dict[str, str]:
    """Return the module of every operator that OpenVINO executes: of the first node that was made a part of it."""
    found: dict[str, str] = {}
    for node in executed.get_ordered_ops():
        info = node.get_rt_info()
        names = info["originalLayersNames"].astype(str).split(",") if "originalLayersNames" in info else []
        known = [path for path in map(modules.of, filter(None, names)) if path is not None]
        found |= {node.get_friendly_name(): known[0]} if known else {}
    return found
