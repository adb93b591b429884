"""Programs of `torch.export`, which PyTorch runs: as they are, and compiled by AOTInductor for this machine's CPU."""

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from prunekit.backends.backend import ProgramBackend, register_backend
from prunekit.backends.files.export_source import KEY, ExportSource, Run, as_exported, interface_of_json
from prunekit.backends.files.program import exporting, program_of, tracing
from prunekit.backends.files.pt2_archive import COMPILED, PROGRAM, Archive, archive_file
from prunekit.backends.files.symbolic_sizes import BOUNDED
from prunekit.errors import ArtifactError, RunError, raised_as
from prunekit.models.interface import ModelInterface
from prunekit.utils.context import threads as threads_of
from prunekit.utils.inputs import call
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
            given = as_exported(example, interface, by_position.num_children, names)
            with threads_of(threads), torch.no_grad(), raised_as(RunError, f"{path}: the program cannot run: "):
                return [one.clone() for one in gather(call(module, given))]

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


@register_backend(
    format="aoti", about="AOTInductor package, compiled for this machine's CPU", suffix=".aoti.pt2", compiler=True
)
class Aoti(ProgramBackend):
    """Packages of `torch._inductor.aoti_compile_and_package`. They hold a compiled library, so only open your own."""

    loader = "torch._inductor.aoti_load_package"

    def write(self, source: ExportSource, path: Path) -> list[str]:
        """Compile a model; the package is for the operating system and the instructions of this CPU."""
        self.require_writable(source, "a compiled package stores weights")
        program = program_of(source, flat=False)
        metadata = {KEY: json.dumps(program.interface.as_dict())}
        failing = exporting(source.model, "compiled by AOTInductor", "use another format, such as pt2")
        with tracing(), archive_file(path) as stream, failing:
            torch._inductor.aoti_compile_and_package(
                program.exported, package_path=stream, inductor_configs={"aot_inductor.metadata": metadata}
            )
        return [*program.notes, "it holds code for this CPU and operating system; export it again for others"]

    def code_in(self, path: Path) -> str:
        """Return that a package is a compiled library."""
        found = [name for name in Archive(path).names if name.startswith(COMPILED)]
        library = next((name for name in found if name.endswith(".so")), next(iter(found), "no library"))
        return f"{library} is machine code, compiled by AOTInductor"

    def open_trusted(self, path: Path, *, threads: int = 1) -> Run:
        """Return a function that runs a package. Loading it runs the library in it."""
        interface = self.interface(path)
        with tracing(), raised_as(ArtifactError, f"{path}: expected an AOTInductor package, but "):
            model = torch._inductor.aoti_load_package(str(path))

        def run(example: tuple[Any, ...]) -> list[Tensor]:
            with threads_of(threads), torch.no_grad(), raised_as(RunError, f"{path}: the package cannot run: "):
                found = gather(call(model, example))
            if len(found) != len(interface.outputs):
                raise ArtifactError(f"{path}: its interface has {len(interface.outputs)} outputs, it gave {len(found)}")
            return [one.clone() for one in found]

        return run

    def interface(self, path: Path) -> ModelInterface:
        """Return the interface in a package's metadata."""
        archive = Archive(path)
        for name in archive.names:
            if name.startswith(COMPILED) and name.endswith("wrapper_metadata.json"):
                text = archive.json(name).get(KEY)
                if text is not None:
                    return interface_of_json(text, str(path))
        raise ArtifactError(
            f"{path}: expected an AOTInductor package with prunekit's interface in its metadata, got none"
        )
