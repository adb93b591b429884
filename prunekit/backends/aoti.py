"""Export of a model to AOTInductor packages: compiled for this machine's CPU, run by PyTorch without compiling."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from prunekit.backends.backend import ProgramBackend, register_backend
from prunekit.backends.files.export_source import KEY, ExportSource, Run, arguments, interface_of_json
from prunekit.backends.files.program import exporting, program_of, tracing
from prunekit.backends.files.pt2_archive import COMPILED, Archive, archive_file
from prunekit.errors import ArtifactError, RunError, raised_as
from prunekit.models.interface import ModelInterface
from prunekit.utils.context import threads as threads_of
from prunekit.utils.tensors import gather


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
            positional, named = arguments(example)
            with threads_of(threads), torch.no_grad(), raised_as(RunError, f"{path}: the package cannot run: "):
                found = gather(model(*positional, **named))
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
