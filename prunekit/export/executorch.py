"""Export of a model to ExecuTorch, with operators of XNNPACK, for phones and small devices."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from torch import Tensor

from prunekit.errors import ArtifactError, RunError, UsageError, reason_of
from prunekit.export.format import ExportFormat, ExportSource, Run, register_format
from prunekit.export.model_location import failure
from prunekit.export.onnx import KEY, interface_of_json
from prunekit.export.program import Program, fed, largest_sizes, program_of, tracing
from prunekit.models.interface import ModelInterface


@register_format(
    "executorch",
    about="ExecuTorch program with XNNPACK's operators, for phones and small devices",
    suffix=".pte",
    packages=("executorch",),
)
class ExecutorchFormat(ExportFormat):
    """Programs of ExecuTorch; their interface is what the method `prunekit` returns, as JSON."""

    def write(self, source: ExportSource, path: Path) -> list[str]:
        """Write a program; memory is planned for the largest sizes, which the notes name."""
        if source.options.half:
            raise UsageError(
                "half: an ExecuTorch program stores weights in the dtype of its model; use onnx or openvino"
            )
        most = largest_sizes(source)
        program = program_of(source, flat=True, most=most)
        path.write_bytes(_lowered(source, program))
        return [*program.notes, *(f"memory is planned for a {name} of at most {size}" for name, size in most.items())]

    def open(self, path: Path, *, threads: int = 1) -> Run:
        """Return a function that runs a program in ExecuTorch's own runtime, which has threads of its own number."""
        interface, method = self.interface(path), _method(path, "forward")

        def run(example: tuple[Any, ...]) -> list[Tensor]:
            given = fed(example, interface)
            try:
                return [one.clone() for one in method.execute([tensor.contiguous() for tensor in given.values()])]
            except Exception as error:  # of the runtime
                raise RunError(f"{path}: ExecuTorch cannot run it: {reason_of(error)}") from error

        return run

    def interface(self, path: Path) -> ModelInterface:
        """Return the interface that a program carries."""
        found = _method(path, KEY).execute([])
        return interface_of_json(str(found[0]), str(path))


def _lowered(source: ExportSource, program: Program) -> bytes:
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
    from executorch.exir import to_edge_transform_and_lower

    carried = {KEY: json.dumps(program.interface.as_dict())}
    with tracing():
        try:
            lowered = to_edge_transform_and_lower(
                program.exported, partitioner=[XnnpackPartitioner()], constant_methods=carried
            )
            return bytes(lowered.to_executorch().buffer)
        except Exception as error:  # of its compiler
            raise RunError(
                f"{type(source.model).__name__} cannot be exported to ExecuTorch: {failure(error, source.model)}; "
                "compute it there with operators that ExecuTorch has, or use another format, such as onnx"
            ) from error


def _method(path: Path, name: str) -> Any:
    from executorch.runtime import Runtime

    if not path.is_file():
        raise ArtifactError(f"{path}: expected an ExecuTorch program, and there is no file")
    try:
        program = Runtime.get().load_program(path)
        method = program.load_method(name) if name in program.method_names else None
    except Exception as error:  # of the runtime
        raise ArtifactError(f"{path}: expected an ExecuTorch program, but {reason_of(error)}") from error
    if method is None:
        raise ArtifactError(
            f"{path}: expected an ExecuTorch program that prunekit wrote, but it has no method {name!r}"
        )
    return method
