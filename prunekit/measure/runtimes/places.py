"""Which module an operator of an ONNX file belongs to, and what runtimes made of these operators."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

SCOPES = "pkg.torch.onnx.name_scopes"
"""Metadata by torch's exporter: the paths of the modules around a node, from the root on, and its own name."""
RULES = "pkg.onnxscript.rewriter.rule_name"
"""Metadata by the exporter's optimizer: by which rules it made a node of others."""
NORM_FUSED = "FuseBatchNormInto"
"""Begins the rules whose result is named for the norm, and reads the weight of the layer before it."""
RENAMED = re.compile(r"(?:fused )?(?P<name>.+?)(?:_nchwc(?:_token_\d+)?|/.*)?")
"""How runtimes name what they make of a node: by its name, or that of its result, and what was done."""


class Places:
    """The modules of an ONNX file that torch's exporter wrote.

    Attributes:
        of_nodes: name of each node -> path of the innermost module; "" is the model's own code.
    """

    def __init__(self, file: Path) -> None:
        import onnx

        graph = onnx.load(file, load_external_data=False).graph
        self._made_by = {output: node for node in graph.node for output in node.output}
        self._nodes = {node.name: node for node in graph.node}
        found = {node.name: _place(node) for node in graph.node}
        self.of_nodes: Mapping[str, str] = {name: place for name, place in found.items() if place is not None}

    def of(self, name: str, *, convolution: bool = False) -> str | None:
        """The module of an operator by its name in a runtime; None for one that the runtime has added.

        Args:
            convolution: whether the operator convolves: one fused with its activation may be named for the latter.
        """
        match = RENAMED.fullmatch(name)
        assert match is not None
        node = self._nodes.get(match["name"]) or self._made_by.get(match["name"])
        if convolution and node is not None and node.op_type != "Conv" and node.input:
            before = self._made_by.get(node.input[0])
            node = before if before is not None and before.op_type == "Conv" else node
        return None if node is None else self.of_nodes.get(node.name)


def _place(node: Any) -> str | None:
    known = {entry.key: entry.value for entry in node.metadata_props}
    if NORM_FUSED in known.get(RULES, ""):
        return str(node.input[1]).rpartition(".")[0]
    if SCOPES not in known:
        return None
    *modules, _ = ast.literal_eval(known[SCOPES])
    return str(modules[-1]) if modules else ""
