"""ONNX programs of a model, from which ONNX, OpenVINO and TensorRT files are made, and the modules of their nodes."""

import ast
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from prunekit.backends.files.export_source import ExportSource
from prunekit.backends.files.program import Program, exporting, program_of, trace, tracing
from prunekit.errors import ArtifactError, RunError, raised_as
from prunekit.hooks.model_copy import copied
from prunekit.models.interface import ModelInterface, input_specs_of
from prunekit.utils.context import set_mode
from prunekit.utils.files import StrPath
from prunekit.utils.inputs import as_example
from prunekit.utils.private_torch import onnx_operators_read_once
from prunekit.utils.tensors import map_tensors

OPSET = 23
"""The first with an operator for attention; later ones add nothing that torch's exporter uses."""


def export_onnx(model: nn.Module, sample: Any, path: StrPath) -> Path:
    """Write a model as one ONNX file, for inputs of exactly this shape, by `torch.onnx.export` on `torch.export`.

    The model is exported in eval mode, and not changed. Weights beyond two gigabytes, the limit of the format, are in a
    file beside it.

    Raises:
        UsageError: the sample is not an example.
        RunError: the exporter cannot follow the model.
    """
    example = map_tensors(as_example(model, sample), torch.detach)
    model = set_mode(copied(model), False)
    try:
        exported = trace(model, example)
    except RunError as error:
        raise RunError(str(error).replace("cannot be exported", "cannot be exported to ONNX", 1)) from error
    translated(model, exported, OPSET, ModelInterface(input_specs_of(model, example), ())).save(Path(path))
    return Path(path)


def translated(model: nn.Module, exported: torch.export.ExportedProgram, opset: int, interface: ModelInterface) -> Any:
    """Return the ONNX program of a program of `torch.export`, simplified by onnxscript's optimizer."""
    names: dict[str, Any] = {"input_names": [spec.name for spec in interface.inputs]}
    if interface.outputs:
        names["output_names"] = [spec.name for spec in interface.outputs]
    advice = "compute it there with operators that ONNX has, or use another format, such as pt2"
    with tracing(), onnx_operators_read_once(), exporting(model, "exported to ONNX", advice):
        program = torch.onnx.export(exported, dynamo=True, opset_version=opset, verbose=False, **names)
    assert program is not None
    return program


def onnx_program_of(source: ExportSource, opset: int = OPSET) -> tuple[Program, Any]:
    """Return the program of a model with axes of any size, and its ONNX program, whose values have their names."""
    program = program_of(source, flat=True)
    built = translated(source.model, program.exported, opset, program.interface)
    _rename_values(built.model, program)
    return program, built


def _rename_values(model: Any, program: Program) -> None:
    """Give axes of any size their names in a graph, and its results other names than its inputs and outputs."""
    import onnx_ir
    from onnx_ir.passes.common import NameFixPass

    for value in (*model.graph.inputs, *(value for node in model.graph for value in node.outputs)):
        if value.shape is not None:
            sizes = [size if isinstance(size, int) else program.renamed(str(size.value)) for size in value.shape]
            value.shape = onnx_ir.Shape(sizes)
    NameFixPass()(model)


def read_onnx(file: Path) -> Any:
    """Return the model in an ONNX file, without weights that lie in other files."""
    import onnx

    with raised_as(ArtifactError, f"{file}: expected an ONNX file, but "):
        model = onnx.load(file, load_external_data=False)
        if not model.graph.output:
            raise ValueError("it has no graph with outputs")
    return model


def known_metadata(part: Any) -> dict[str, str]:
    """Return the metadata of a model or of a node."""
    return {entry.key: entry.value for entry in part.metadata_props}


def graph_inputs(model: Any) -> list[Any]:
    """Return the inputs of a graph that are no weights, which older files have among them."""
    weights = {one.name for one in model.graph.initializer}
    return [entry for entry in model.graph.input if entry.name not in weights]


SCOPES = "pkg.torch.onnx.name_scopes"
"""Metadata of torch's exporter: the paths of the modules around a node, from the root on, and its own name."""
RULES = "pkg.onnxscript.rewriter.rule_name"
"""Metadata of the exporter's optimizer: the rules by which it fused nodes."""
NORM_FUSED = "FuseBatchNormInto"
"""Prefix of the rules whose result has the name of the norm, and the weight of the layer before it."""
RENAMED = re.compile(r"(?:fused )?(?P<name>.+?)(?:_nchwc)?(?:_token_\d+)?(?:_(?:Q|Deq)uantizeLinear(?:_\d+)?)?(?:/.*)?")
"""Names that runtimes give to their operators: the name of a node, or of its result, and what was done with it."""

CASTS = ("QuantizeLinear", "DequantizeLinear")
"""Operators of quantized files, which belong to what made their input."""


def name_of_node(operator: str) -> str:
    """Return the name of the node, or of its result, that a runtime made an operator of this name from."""
    match = RENAMED.fullmatch(operator)
    assert match is not None
    return match["name"]


class NodeModules:
    """The modules that the nodes of an ONNX file of torch's exporter were made from."""

    def __init__(self, file: Path) -> None:
        import onnx

        graph = onnx.load(file, load_external_data=False).graph
        self._made_by = {output: node for node in graph.node for output in node.output}
        self._nodes = {node.name: node for node in graph.node}
        found = {node.name: _module_of(node) for node in graph.node}
        # path of the innermost module by the name of the node; "" is the model's own code
        self.of_nodes: Mapping[str, str] = {name: path for name, path in found.items() if path is not None}

    @property
    def of_names(self) -> dict[str, str]:
        """Paths of modules by the names of nodes and of what they return."""
        made = {
            output: self.of_nodes[node.name] for output, node in self._made_by.items() if node.name in self.of_nodes
        }
        return made | dict(self.of_nodes)

    def of(self, name: str, *, convolution: bool = False) -> str | None:
        """Return the module of an operator by its name in a runtime; None for one that the runtime has added."""
        given = name_of_node(name)
        node = self._nodes.get(given) or self._made_by.get(given)
        while node is not None and node.op_type in CASTS:
            node = self._made_by.get(node.input[0])
        if convolution and node is not None and node.op_type != "Conv" and node.input:
            before = self._made_by.get(node.input[0])
            node = before if before is not None and before.op_type == "Conv" else node
        return None if node is None else self.of_nodes.get(node.name)


def _module_of(node: Any) -> str | None:
    if NORM_FUSED in known_metadata(node).get(RULES, ""):
        return str(node.input[1]).rpartition(".")[0]
    modules = scopes_of(node)
    return modules if modules is None else (["", *modules])[-1]


def scopes_of(node: Any) -> list[str] | None:
    """Return the paths of the modules around a node of an ONNX file of torch's exporter; None if it has none."""
    known = known_metadata(node)
    if SCOPES not in known:
        return None
    *modules, _ = ast.literal_eval(known[SCOPES])
    return [str(path) for path in modules]


def module_ends(graph: Any) -> dict[str, list[str]]:
    """Return by module path the names of results that nodes outside of the module read."""
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
