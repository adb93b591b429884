"""ONNX Runtime: files of ONNX are written, opened, timed on the CPU, and quantized."""

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from prunekit.backends.backend import FileBackend, register_backend
from prunekit.backends.files import export_source, onnx_program
from prunekit.backends.int8.onnx_quantizer import OnnxQuantizer
from prunekit.backends.int8.quantizer import Batch
from prunekit.backends.session import INT8, LayerClock, Sample, Session, Setting
from prunekit.errors import ArtifactError, RunError, UsageError, raised_as
from prunekit.models.interface import ModelInterface, TensorSpec

OLDEST = 18
"""The oldest opset that torch's exporter knows."""
STACKS = "pkg.torch.onnx.stack_trace"
"""Metadata of torch's exporter: the files and lines that a node comes from, which are of this machine."""
LARGEST_HALF = 65504.0
"""The largest number in float16."""
KERNEL, FORWARD = "_kernel_time", "model_run"
"""The profiler's names for the time of a node, and for the time of a whole pass, which it writes last."""
ROUNDING_US = 0.5
"""Mean of the fractions of microseconds that the profiler cuts off."""


@register_backend(
    format="onnx",
    runtime="onnxruntime",
    about="ONNX file, with its interface in the metadata, for ONNX Runtime and others",
    runs="ONNX Runtime's CPU provider, on the exported file",
    suffix=".onnx",
    packages=("onnx", "onnxscript", "onnxruntime"),
    install="pip install 'prunekit[export]'",
    quantizer="onnxruntime",
    times_layers=True,
)
class OnnxRuntime(FileBackend):
    """ONNX files, written by `torch.onnx.export` and run by ONNX Runtime."""

    def write(self, source: export_source.ExportSource, path: Path) -> list[str]:
        """Write a model; weights beyond two gigabytes are in a file beside it, `NAME.onnx.data`."""
        opset = opset_of(source.options)
        program, built = onnx_program.onnx_program_of(source, opset)
        found = built.model.opset_imports.get("")
        if found != opset:
            raise RunError(
                f"onnx: {type(source.model).__name__} needs operators of opset {found}, and cannot be converted to "
                f"{opset}; export it with opset {found}"
            )
        if source.options.half:
            _store_half(built.model)
        for node in built.model.graph:
            node.metadata_props.pop(STACKS, None)
        built.model.metadata_props.update(export_source.metadata_of(program.interface))
        built.save(path)
        return program.notes

    def open(self, path: Path, *, threads: int = 1) -> export_source.Run:
        """Return a function that runs a file in ONNX Runtime on the CPU."""
        interface = self.interface(path)  # first: it checks where the weights are
        session = open_session(path, threads, takes_turns=False)
        taken, names = input_names(session), [spec.name for spec in interface.outputs]

        def run(example: tuple[Any, ...]) -> list[Tensor]:
            arrays = export_source.fed_arrays(example, interface, taken)
            with raised_as(RunError, f"{path}: ONNX Runtime cannot run it: "):
                return [torch.from_numpy(np.array(one)) for one in session.run(names, arrays)]

        return run

    def interface(self, path: Path) -> ModelInterface:
        """Return the interface in a file's metadata; without that, the inputs and outputs of its graph, and no task."""
        model = onnx_program.read_onnx(path)
        export_source.require_own_data(model, path)
        known = onnx_program.known_metadata(model)
        if export_source.KEY in known:
            return export_source.interface_of_json(known[export_source.KEY], str(path))
        return ModelInterface(
            tuple(map(_spec, onnx_program.graph_inputs(model))), tuple(map(_spec, model.graph.output))
        )

    def parts(self, path: Path, example: tuple[Any, ...], expected: Mapping[str, Tensor]) -> str:
        """Return the first module whose output differs, from one run with the results at modules' ends as outputs."""
        import onnx

        model = onnx.load(path)
        ends = onnx_program.module_ends(model.graph)
        known = {entry.name for entry in model.graph.output}
        wanted = list(dict.fromkeys(name for path in expected for name in ends.get(path, ())))
        model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in wanted if name not in known)
        session = open_session(model.SerializeToString(), 1, takes_turns=False)
        results = session.run(wanted, export_source.fed_arrays(example, self.interface(path), input_names(session)))
        found = {name: torch.from_numpy(np.array(one)) for name, one in zip(wanted, results, strict=True)}
        for module, reference in expected.items():
            candidates = [found[name] for name in ends.get(module, ()) if found[name].shape == reference.shape]
            if module and candidates and reference.is_floating_point():
                largest = float(reference.abs().max()) or 1.0
                difference = min(float((one - reference).abs().max()) for one in candidates) / largest
                if not difference <= self.tolerance:
                    return f"{module} (by {difference:.1e} of its largest value)"
        return ""

    def refuse(self, setting: Setting) -> str:
        """Return why it cannot run a setting."""
        if setting.dtype not in ("float32", INT8):
            return f"its CPU kernels compute in float32 and int8, and {setting.dtype} models run on casts"
        return "" if setting.memory_format == "contiguous" else "it chooses layouts itself"

    def write_fixed(self, model: nn.Module, sample: Sample, path: Path) -> Path:
        """Write a model, which is not changed, for inputs of exactly this shape."""
        return onnx_program.export_onnx(model, sample, path)

    def file_session(
        self, path: Path, interface: ModelInterface, sample: Sample, setting: Setting, *, trusted: bool
    ) -> Session:
        """Open a file with one pool of `threads` threads; it is fed by the names of its interface."""
        import onnxruntime

        session = open_session(path, setting.threads)
        arrays = export_source.fed_arrays(sample, interface, input_names(session))
        feed = {name: onnxruntime.OrtValue.ortvalue_from_numpy(array) for name, array in arrays.items()}
        names = [spec.name for spec in interface.outputs]
        return Session(
            lambda: session.run_with_ort_values(names, feed),
            lambda found: [torch.from_numpy(value.numpy().copy()) for value in found],
            lambda: _layer_clock(path, names, feed, setting.threads),
        )

    def quantizer_of(
        self, file: Path, folder: Path, batches: Iterable[Batch], images: int, *, only_timed: bool = False
    ) -> OnnxQuantizer:
        """Return ONNX Runtime's static quantization of a file."""
        return OnnxQuantizer(file, folder, batches, images)


def opset_of(options: export_source.ExportOptions) -> int:
    """Return the opset that is asked for, or the default."""
    import onnx

    if options.opset is None:
        return onnx_program.OPSET
    newest = onnx.defs.onnx_opset_version()
    if not OLDEST <= options.opset <= newest:
        raise UsageError(
            f"opset: expected {OLDEST} to {newest}, as torch and the installed onnx know, got {options.opset}"
        )
    return options.opset


def _spec(entry: Any) -> TensorSpec:
    import onnx

    kind = entry.type.tensor_type
    dtype = onnx.TensorProto.DataType.Name(kind.elem_type).lower()
    shape = tuple(
        one.dim_value if one.HasField("dim_value") else one.dim_param or f"{entry.name}_{axis}"
        for axis, one in enumerate(kind.shape.dim)
    )
    return TensorSpec(entry.name, {"float": "float32", "double": "float64"}.get(dtype, dtype), shape)


def _store_half(model: Any) -> None:
    """Store weights in float16, with a cast where each is read; single numbers, or any beyond float16, stay."""
    import onnx_ir

    graph = model.graph
    for name, value in list(graph.initializers.items()):
        array = value.const_value.numpy() if value.const_value is not None else np.zeros(0)
        if array.dtype != np.float32 or array.size < 2 or np.abs(array).max() > LARGEST_HALF:
            continue
        stored = onnx_ir.Value(
            name=f"{name}.half",
            type=onnx_ir.TensorType(onnx_ir.DataType.FLOAT16),
            shape=value.shape,
            const_value=onnx_ir.tensor(array.astype(np.float16), name=f"{name}.half"),
        )
        cast = onnx_ir.node("Cast", [stored], {"to": onnx_ir.DataType.FLOAT}, name=f"{name}.cast")
        (result,) = cast.outputs
        result.name, result.type, result.shape = f"{name}.float", value.type, value.shape
        value.replace_all_uses_with(result)
        del graph.initializers[name]
        graph.register_initializer(stored)
        graph.insert_before(graph[0], cast)


def _layer_clock(file: Path, names: Sequence[str], feed: Mapping[str, Any], threads: int) -> LayerClock:
    """Return the profiler of ONNX Runtime, in a session of its own; it writes a file next to the model's."""
    session, modules = open_session(file, threads, profile=file.with_suffix(".profile")), onnx_program.NodeModules(file)

    def passes(count: int) -> list[dict[str | None, float]]:
        written = Path(session.end_profiling())
        events = json.loads(written.read_text(encoding="utf-8"))
        written.unlink()
        return times_by_module(events, modules)[-count:]

    return LayerClock(lambda: session.run_with_ort_values(names, feed), passes)


def times_by_module(
    events: Sequence[Mapping[str, Any]], modules: onnx_program.NodeModules
) -> list[dict[str | None, float]]:
    """Return the milliseconds of each forward by module, from the profiler's events."""
    found: list[dict[str | None, float]] = []
    times: dict[str | None, float] = defaultdict(float)
    for event in events:
        if event["name"].endswith(KERNEL):
            kind = event["args"]["op_name"].removeprefix("Fused").removeprefix("QLinear")
            path = modules.of(event["name"].removesuffix(KERNEL), convolution=kind == "Conv")
            times[path] += (event["dur"] + ROUNDING_US) / 1000
        elif event["name"] == FORWARD:
            found.append(dict(times))
            times.clear()
    return found


def open_session(model: Path | bytes, threads: int, *, takes_turns: bool = True, profile: Path | None = None) -> Any:
    """Return a session on the CPU with this many threads.

    Args:
        model: a file, or its bytes.
        takes_turns: whether models take turns in one process: threads of one must not spin while another is timed.
        profile: prefix of the name of the file that its profiler writes; None: the profiler is off.
    """
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    options.log_severity_level = 3  # errors, which are raised as well
    if takes_turns:
        options.add_session_config_entry("session.force_spinning_stop", "1")
    if profile is not None:
        options.enable_profiling, options.profile_file_prefix = True, str(profile)
    given, where = (model, "the changed file") if isinstance(model, bytes) else (str(model), str(model))
    with raised_as(ArtifactError, f"{where}: ONNX Runtime cannot load it: "):
        return onnxruntime.InferenceSession(given, options, providers=["CPUExecutionProvider"])


def input_names(session: Any) -> list[str]:
    """Return the names of the inputs that a session takes."""
    return [entry.name for entry in session.get_inputs()]
