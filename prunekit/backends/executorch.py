"""ExecuTorch: programs with XNNPACK's operators, for phones and small devices, are written, opened and timed."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from weakref import WeakSet

from prunekit.backends.backend import DeviceBackend, Loaded, register_backend
from prunekit.backends.files.export_source import KEY, ExportSource, fed, interface_of_json
from prunekit.backends.files.program import (
    SAMPLES,
    Program,
    exporting,
    largest_sizes,
    place_of_node,
    program_of,
    tracing,
)
from prunekit.backends.session import Sample, Session, Setting
from prunekit.errors import ArtifactError, RunError, raised_as
from prunekit.models.interface import ModelInterface
from prunekit.utils.private_torch import OpOverload

_OPEN: WeakSet[Any] = WeakSet()
"""Methods that are loaded: they hold on to the pool of threads, which must not be replaced meanwhile."""


@register_backend(
    format="executorch",
    runtime="executorch",
    about="ExecuTorch program with XNNPACK's operators, for phones and small devices",
    runs="ExecuTorch's runtime with XNNPACK's kernels, on the exported file",
    suffix=".pte",
    packages=("executorch",),
    install="pip install 'prunekit[executorch]'",
)
class Executorch(DeviceBackend):
    """Programs of ExecuTorch; their interface is what the method `prunekit` returns, as JSON."""

    most_samples = SAMPLES
    loader = "ExecuTorch's runtime"
    advice = "; inputs may be no larger than memory was planned for, as its export noted"
    runs_for_interface = True

    def write(self, source: ExportSource, path: Path) -> list[str]:
        """Write a program; memory is planned for the largest sizes, which the notes name."""
        self.require_writable(source, "an ExecuTorch program stores weights")
        most = largest_sizes(source)
        program = program_of(source, flat=True, most=most)
        path.write_bytes(_lowered(source, program, most))
        return [*program.notes, *(f"memory is planned for a {name} of at most {size}" for name, size in most.items())]

    def code_in(self, path: Path) -> str:
        """Return that a program is not checked by what runs it."""
        return "it is a program of ExecuTorch, whose runtime takes the addresses in it on trust"

    def load(self, path: Path, threads: int) -> Loaded:
        """Load a program; its runtime has one pool of threads, of the number that the first open program asks for."""
        from executorch.extension.pybindings import portable_lib

        interface = self.interface(path)
        if portable_lib._threadpool_get_thread_count() != threads and not _OPEN:
            portable_lib._unsafe_reset_threadpool(threads)
        method = method_of(path, "forward")
        _OPEN.add(method)
        return Loaded(
            lambda example: [tensor.contiguous() for tensor in fed(example, interface).values()],
            method.execute,
            lambda found: [one.clone() for one in found],
        )

    def file_session(
        self, path: Path, interface: ModelInterface, sample: Sample, setting: Setting, *, trusted: bool
    ) -> Session:
        """Open a program to be timed; raise if others that are open keep the pool at another number of threads."""
        session = super().file_session(path, interface, sample, setting, trusted=trusted)
        from executorch.extension.pybindings import portable_lib

        if (found := portable_lib._threadpool_get_thread_count()) != setting.threads:
            raise RunError(
                f"executorch: expected {setting.threads} threads, and its pool has {found} while other programs are "
                "open in this process; time it in a process of its own"
            )
        return session

    def interface(self, path: Path) -> ModelInterface:
        """Return the interface that a program carries."""
        found = method_of(path, KEY).execute([])
        return interface_of_json(str(found[0]), str(path))


def _lowered(source: ExportSource, program: Program, most: Mapping[str, int]) -> bytes:
    carried = {KEY: json.dumps(program.interface.as_dict())}
    with tracing():
        from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
        from executorch.exir import EdgeCompileConfig, to_edge_transform_and_lower

        # Its verifier runs the graph on sizes that it compares, which can fix an axis of any size.
        unverified = EdgeCompileConfig(_check_ir_validity=False)
        advice = "compute it there with operators that ExecuTorch has, or use another format, such as onnx"
        with exporting(source.model, "exported to ExecuTorch", advice):
            lowered = to_edge_transform_and_lower(
                program.exported,
                partitioner=[XnnpackPartitioner()],
                constant_methods=carried,
                compile_config=unverified,
            )
            planned = lowered.to_executorch()
    _require_known(source, planned.exported_program())
    _require_planned(source, program, planned.exported_program(), most)
    return bytes(planned.buffer)


def _require_known(source: ExportSource, planned: Any) -> None:
    """Raise if a program has an operator that ExecuTorch's runtime lacks."""
    with tracing():
        from executorch.runtime import Runtime
    known = set(Runtime.get().operator_registry.operator_names)
    for node in planned.graph.nodes:
        name = node.target.name() if isinstance(node.target, OpOverload) else ""  # type: ignore[no-untyped-call]
        if name and name not in known:
            place = place_of_node(node)
            raise RunError(
                f"{type(source.model).__name__} cannot be exported to ExecuTorch: its runtime has no operator "
                f"{name}" + (f", at {place}" if place else "") + "; compute it there with operators that "
                "it has, or use another format, such as onnx"
            )


def _require_planned(source: ExportSource, program: Program, planned: Any, most: Mapping[str, int]) -> None:
    """Raise if ExecuTorch's compiler has fixed an axis of any size to that of the example."""
    taken = set(planned.graph_signature.user_inputs)
    entries = [node.meta["spec"] for node in planned.graph.nodes if node.op == "placeholder" and node.name in taken]
    for spec, entry in zip(program.interface.inputs, entries, strict=True):
        for axis, (name, size) in enumerate(zip(spec.shape, entry.shape, strict=True)):
            if isinstance(name, str) and size < most[name]:
                raise RunError(
                    f"{type(source.model).__name__}: the {name} (axis {axis} of {spec.name}) cannot be of any size in "
                    f"ExecuTorch, whose compiler fixes it to {size}; export it with a fixed {name}"
                )


def method_of(path: Path, name: str) -> Any:
    """Return a method of a program, in the runtime of ExecuTorch."""
    if not path.is_file():
        raise ArtifactError(f"{path}: expected an ExecuTorch program, and there is no file")
    with tracing():  # its modules warn while they are imported
        from executorch.runtime import Runtime
    with raised_as(ArtifactError, f"{path}: expected an ExecuTorch program, but "):
        program = Runtime.get().load_program(path)
        method = program.load_method(name) if name in program.method_names else None
    if method is None:
        raise ArtifactError(
            f"{path}: expected an ExecuTorch program that prunekit wrote, but it has no method {name!r}"
        )
    return method
