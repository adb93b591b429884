"""Export of a model as a program of `torch.export`, and such files in PyTorch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from prunekit.backends.backend import ProgramBackend, register_backend
from prunekit.backends.files.export_source import ExportSource, Run, arguments, as_exported, interface_of_json
from prunekit.backends.files.program import program_of, tracing
from prunekit.backends.files.pt2_archive import PROGRAM, Archive, archive_file
from prunekit.backends.files.symbolic_sizes import BOUNDED
from prunekit.errors import RunError, raised_as
from prunekit.models.interface import ModelInterface
from prunekit.utils.context import threads as threads_of
from prunekit.utils.tensors import gather, map_tensors

EXTRA = "prunekit.json"
"""Name of the extra file with the interface."""


@register_backend(
    format="pt2", about="program of torch.export, which PyTorch runs without the model's code", suffix=".pt2"
)
class Pt2(ProgramBackend):
    """Files of `torch.export.save`."""

    loader = "torch.export.load"

    def write(self, source: ExportSource, path: Path) -> list[str]:
        """Write a program that takes the model's own arguments; its examples are zeros, and no data of the user."""
        self.require_writable(source, "a pt2 program stores weights")
        program = program_of(source, flat=False)
        exported = program.exported
        for graph in (part for part in exported.graph_module.modules() if isinstance(part, torch.fx.GraphModule)):
            for node in graph.graph.nodes:
                node.meta.pop("stack_trace", None)  # paths of this machine
        positional, named = exported.example_inputs
        exported.example_inputs = map_tensors((positional, named), lambda one: one.new_zeros(()).expand(one.shape))
        failed = f"{type(source.model).__name__} cannot be saved as a pt2 program: "
        with tracing(), archive_file(path) as stream, raised_as(RunError, failed, "; use another format, such as onnx"):
            torch.export.save(exported, stream, extra_files={EXTRA: json.dumps(program.interface.as_dict())})
        return program.notes

    def code_in(self, path: Path) -> str:
        """Return what in a program would do more than compute tensors from tensors."""
        return next(Archive(path).code(), "")

    def open_trusted(self, path: Path, *, threads: int = 1) -> Run:
        """Return a function that runs a program."""
        archive = Archive(path)
        with tracing(), archive.reading():
            program = torch.export.load(path)
            module = program.module()
        _bound_numbers(module)

        interface, (by_position, by_name) = self.interface(path), program.call_spec.in_spec.children()
        names = [str(name) for name in by_name.context]

        def run(example: tuple[Any, ...]) -> list[Tensor]:
            positional, named = arguments(as_exported(example, interface, by_position.num_children, names))
            with threads_of(threads), torch.no_grad(), raised_as(RunError, f"{path}: the program cannot run: "):
                return [one.clone() for one in gather(module(*positional, **named))]

        return run

    def interface(self, path: Path) -> ModelInterface:
        """Return the interface that prunekit wrote into a file; else inputs and outputs of its program, and no task."""
        archive = Archive(path)
        if (text := archive.text(f"extra/{EXTRA}")) is not None:
            return interface_of_json(text, str(path))
        if (text := archive.text(PROGRAM)) is None:
            raise archive.damaged("it has no program named model")
        return archive.interface(text)


def _bound_numbers(module: torch.nn.Module) -> None:
    """Make the arithmetic on sizes in a program raise for numbers beyond any size: squares of squares never end."""
    for graph in (part for part in module.modules() if isinstance(part, torch.fx.GraphModule)):
        changed = [node for node in graph.graph.nodes if node.target in BOUNDED]
        for node in changed:
            node.target = BOUNDED[node.target]
        if changed:
            graph.recompile()
