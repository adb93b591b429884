"""ONNX files that runtimes run: models exported to them, and the module of each of their nodes."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from prunekit.channels.cut.model_copy import copied
from prunekit.formats.onnx import export_onnx
from prunekit.measure.runtimes.session import FileKey, Inputs, Source, in_dtype


def onnx_source(model: nn.Module, inputs: Inputs, keys: Iterable[FileKey], folder: Path) -> Source:
    """Export a model to ONNX files, for each batch and dtype, in a folder that is created if need be.

    Raises:
        RunError: the exporter cannot follow the model.
    """
    folder.mkdir(exist_ok=True)
    with torch.inference_mode(False), torch.no_grad():  # export traces, which needs version counters
        return Source(files={key: _file(model, inputs, *key, folder) for key in sorted(set(keys))})


def _file(model: nn.Module, inputs: Inputs, batch: int, dtype: str, folder: Path) -> Path:
    sample, path = inputs.sample(batch), folder / f"{batch}-{dtype}.onnx"
    if dtype == "float32":
        return export_onnx(model, sample, path)
    kind: torch.dtype = getattr(torch, dtype)
    return export_onnx(copied(model, dtype=kind), in_dtype(sample, kind), path)


SCOPES = "pkg.torch.onnx.name_scopes"
"""Metadata of torch's exporter: the paths of the modules around a node, from the root on, and its own name."""
RULES = "pkg.onnxscript.rewriter.rule_name"
"""Metadata of the exporter's optimizer: the rules by which it fused nodes."""
NORM_FUSED = "FuseBatchNormInto"
"""Prefix of the rules whose result has the name of the norm, and the weight of the layer before it."""
RENAMED = re.compile(r"(?:fused )?(?P<name>.+?)(?:_nchwc(?:_token_\d+)?|/.*)?")
"""Names that runtimes give to their operators: the name of a node, or of its result, and what was done with it."""


class NodeModules:
    """The modules that the nodes of an ONNX file of torch's exporter were made from.

    Attributes:
        of_nodes: path of the innermost module by the name of the node; "" is the model's own code.
    """

    def __init__(self, file: Path) -> None:
        import onnx

        graph = onnx.load(file, load_external_data=False).graph
        self._made_by = {output: node for node in graph.node for output in node.output}
        self._nodes = {node.name: node for node in graph.node}
        found = {node.name: _module_of(node) for node in graph.node}
        self.of_nodes: Mapping[str, str] = {name: path for name, path in found.items() if path is not None}

    def of(self, name: str, *, convolution: bool = False) -> str | None:
        """Return the module of an operator by its name in a runtime; None for one that the runtime has added.

        Args:
            name: of the operator.
            convolution: whether it convolves: if fused with an activation, it may have the activation's name.
        """
        match = RENAMED.fullmatch(name)
        assert match is not None
        node = self._nodes.get(match["name"]) or self._made_by.get(match["name"])
        if convolution and node is not None and node.op_type != "Conv" and node.input:
            before = self._made_by.get(node.input[0])
            node = before if before is not None and before.op_type == "Conv" else node
        return None if node is None else self.of_nodes.get(node.name)


def _module_of(node: Any) -> str | None:
    known = {entry.key: entry.value for entry in node.metadata_props}
    if NORM_FUSED in known.get(RULES, ""):
        return str(node.input[1]).rpartition(".")[0]
    if SCOPES not in known:
        return None
    *modules, _ = ast.literal_eval(known[SCOPES])
    return str(modules[-1]) if modules else ""
