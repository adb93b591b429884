"""Export of a model to ONNX, and ONNX files in ONNX Runtime."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from prunekit.errors import ArtifactError, RunError, UsageError, reason_of, reraise_shortage
from prunekit.formats.files.external_data import require_own_data
from prunekit.formats.format import ExportFormat, ExportOptions, ExportSource, Run, register_format
from prunekit.formats.model_location import failure
from prunekit.formats.program import Program, fed, program_of, trace, tracing
from prunekit.hooks.model_copy import copied
from prunekit.models.interface import ModelInterface, TensorSpec, input_specs_of
from prunekit.reading.text_files import parse_json
from prunekit.utils.context import set_mode
from prunekit.utils.files import StrPath
from prunekit.utils.inputs import as_example
from prunekit.utils.tensors import map_tensors

OPSET = 23
"""The first with an operator for attention; later ones add nothing that torch's exporter uses."""
OLDEST = 18
"""The oldest opset that torch's exporter knows."""
KEY = "prunekit"
"""Key of the interface in the metadata of a file."""
SCOPES = "pkg.torch.onnx.name_scopes"
"""Metadata of torch's exporter: the paths of the modules around a node, from the root on, and its own name."""
STACKS = "pkg.torch.onnx.stack_trace"
"""Metadata of torch's exporter: the files and lines of a node."""
LARGEST_HALF = 65504.0
"""The largest number in float16."""


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


@register_format(
    "onnx",
    about="ONNX file, with its interface in the metadata, for ONNX Runtime and others",
    suffix=".onnx",
    packages=("onnx", "onnxscript", "onnxruntime"),
    install="pip install 'prunekit[export]'",
)
class OnnxFormat(ExportFormat):
    """ONNX files, written by `torch.onnx.export` and run by ONNX Runtime."""

    def write(self, source: ExportSource, path: Path) -> list[str]:
        """Write a model; weights beyond two gigabytes are in a file beside it, `NAME.onnx.data`."""
        opset = opset_of(source.options)
        program = program_of(source, flat=True)
        built = translated(source.model, program.exported, opset, program.interface)
        found = built.model.opset_imports.get("")
        if found != opset:
            raise RunError(
                f"onnx: {type(source.model).__name__} needs operators of opset {found}, and cannot be converted to "
                f"{opset}; export it with opset {found}"
            )
        if source.options.half:
            _store_half(built.model)
        renamed_values(built.model, program)
        _forget_places(built.model)
        built.model.metadata_props.update(metadata_of(program.interface))
        built.save(path)
        return program.notes

    def open(self, path: Path, *, threads: int = 1) -> Run:
        """Return a function that runs a file in ONNX Runtime on the CPU."""
        interface = self.interface(path)  # first: it checks where the weights are
        session = session_of(path, threads)
        taken = {entry.name for entry in session.get_inputs()}
        names = [spec.name for spec in interface.outputs]

        def run(example: tuple[Any, ...]) -> list[Tensor]:
            arrays = {name: tensor.numpy() for name, tensor in fed(example, interface).items() if name in taken}
            try:
                return [torch.from_numpy(np.array(one)) for one in session.run(names, arrays)]
            except Exception as error:  # onnxruntime's own classes
                reraise_shortage(error)
                raise RunError(f"{path}: ONNX Runtime cannot run it: {reason_of(error)}") from error

        return run

    def interface(self, path: Path) -> ModelInterface:
        """Return the interface of a file; one without prunekit's metadata has that of its graph, without a task."""
        return interface_of_file(path)

    def parts(self, path: Path, example: tuple[Any, ...], expected: Mapping[str, Tensor]) -> str:
        """Return the first module whose output differs, from one run with the results at modules' ends as outputs."""
        import onnx

        model = onnx.load(path)
        ends = module_ends(model.graph)
        known = {entry.name for entry in model.graph.output}
        wanted = list(dict.fromkeys(name for path in expected for name in ends.get(path, ())))
        model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in wanted if name not in known)
        session = session_of(model.SerializeToString(), 1)
        arrays = {name: tensor.numpy() for name, tensor in fed(example, self.interface(path)).items()}
        taken = {entry.name for entry in session.get_inputs()}
        results = session.run(wanted, {name: array for name, array in arrays.items() if name in taken})
        found = {name: torch.from_numpy(np.array(one)) for name, one in zip(wanted, results, strict=True)}
        return _first_different(expected, ends, found, self.tolerance)


def opset_of(options: ExportOptions) -> int:
    """Return the opset that is asked for, or the default."""
    import onnx

    if options.opset is None:
        return OPSET
    newest = onnx.defs.onnx_opset_version()
    if not OLDEST <= options.opset <= newest:
        raise UsageError(
            f"opset: expected {OLDEST} to {newest}, as torch and the installed onnx know, got {options.opset}"
        )
    return options.opset


def metadata_of(interface: ModelInterface) -> dict[str, str]:
    """Return the metadata of a file: the interface as JSON, and its parts that other programs may read on their own."""
    plain = interface.as_dict()
    found = {KEY: json.dumps(plain)}
    if interface.classes:
        found["classes"] = json.dumps(plain["classes"])
    if interface.preprocessing is not None:
        found["preprocessing"] = json.dumps(plain["preprocessing"])
    if interface.task is not None:
        found["task"] = interface.task
    return found


def interface_of_json(text: str, where: str) -> ModelInterface:
    """Return an interface from the JSON of a file's metadata."""
    return ModelInterface.from_dict(parse_json(text, where, "the interface as JSON in its metadata"), where)


def interface_of_file(path: Path) -> ModelInterface:
    """Return the interface of an ONNX file."""
    import onnx

    try:
        model = onnx.load(path, load_external_data=False)
        if not model.graph.output:
            raise ValueError("it has no graph with outputs")
    except Exception as error:  # protobuf's own classes
        reraise_shortage(error)
        raise ArtifactError(f"{path}: expected an ONNX file, but {reason_of(error)}") from error
    require_own_data(model, path)
    known = {entry.key: entry.value for entry in model.metadata_props}
    if KEY in known:
        return interface_of_json(known[KEY], str(path))
    constants = {entry.name for entry in model.graph.initializer}
    return ModelInterface(
        tuple(_spec(entry) for entry in model.graph.input if entry.name not in constants),
        tuple(_spec(entry) for entry in model.graph.output),
    )


def _spec(entry: Any) -> TensorSpec:
    import onnx

    kind = entry.type.tensor_type
    dtype = onnx.TensorProto.DataType.Name(kind.elem_type).lower()
    shape = tuple(
        one.dim_value if one.HasField("dim_value") else one.dim_param or f"{entry.name}_{axis}"
        for axis, one in enumerate(kind.shape.dim)
    )
    return TensorSpec(entry.name, {"float": "float32", "double": "float64"}.get(dtype, dtype), shape)


def session_of(model: Path | bytes, threads: int) -> Any:
    """Return a session of ONNX Runtime on the CPU."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    options.log_severity_level = 3  # errors, which are raised as well
    given = model if isinstance(model, bytes) else str(model)
    try:
        return onnxruntime.InferenceSession(given, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime's own classes
        reraise_shortage(error)
        where = "the changed file" if isinstance(model, bytes) else str(model)
        raise ArtifactError(f"{where}: ONNX Runtime cannot load it: {reason_of(error)}") from error


def renamed_values(model: Any, program: Program) -> None:
    """Give axes of any size their names in a graph, and its results other names than its inputs and outputs."""
    import onnx_ir
    from onnx_ir.passes.common import NameFixPass

    for value in _graph_values(model.graph):
        if value.shape is not None:
            sizes = [size if isinstance(size, int) else program.renamed(str(size.value)) for size in value.shape]
            value.shape = onnx_ir.Shape(sizes)
    NameFixPass()(model)


def _forget_places(model: Any) -> None:
    """Remove the paths and lines of the code that nodes come from, which are of this machine."""
    for node in model.graph:
        node.metadata_props.pop(STACKS, None)


def _graph_values(graph: Any) -> Iterator[Any]:
    yield from graph.inputs
    for node in graph:
        yield from node.outputs


def _store_half(model: Any) -> None:
    """Store the weights of a graph in float16, each with a cast to float32 where it is read.

    Numbers of a tensor stay in float32 if one is beyond float16, or if they are few.
    """
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


def scopes_of(node: Any) -> list[str] | None:
    """Return the paths of the modules around a node of an ONNX file of torch's exporter; None if it has none."""
    known = {entry.key: entry.value for entry in node.metadata_props}
    if SCOPES not in known:
        return None
    *modules, _ = ast.literal_eval(known[SCOPES])
    return [str(path) for path in modules]


def module_ends(graph: Any) -> dict[str, list[str]]:
    """Return the results of each module that are read outside of it, by its path."""
    readers: dict[str, list[frozenset[str]]] = {entry.name: [frozenset()] for entry in graph.output}
    scopes = [frozenset(scopes_of(node) or ()) for node in graph.node]
    for node, around in zip(graph.node, scopes, strict=True):
        for name in node.input:
            readers.setdefault(name, []).append(around)
    found: dict[str, list[str]] = {}
    for node, around in zip(graph.node, scopes, strict=True):
        for path in around:
            outside = [name for name in node.output if any(path not in reader for reader in readers.get(name, ()))]
            found.setdefault(path, []).extend(outside)
    return found


def _first_different(
    expected: Mapping[str, Tensor], ends: Mapping[str, list[str]], found: Mapping[str, Tensor], tolerance: float
) -> str:
    for path, reference in expected.items():
        candidates = [found[name] for name in ends.get(path, ()) if found[name].shape == reference.shape]
        if not path or not candidates or not reference.is_floating_point():
            continue
        largest = float(reference.abs().max()) or 1.0
        difference = min(float((one - reference).abs().max()) for one in candidates) / largest
        if not difference <= tolerance:
            return f"{path} (by {difference:.1e} of its largest value)"
    return ""
