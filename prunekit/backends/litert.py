"""LiteRT, formerly TensorFlow Lite: files for phones and small devices are written, opened and timed on the CPU."""

from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from prunekit.backends.backend import DeviceBackend, Loaded, register_backend
from prunekit.backends.files.export_source import KEY, ExportSource, fed, interface_of_json, metadata_of
from prunekit.backends.files.program import exporting, forward_of_tensors, program_of, tracing
from prunekit.errors import ArtifactError, raised_as
from prunekit.models.interface import ModelInterface
from prunekit.reading.text_files import require_file
from prunekit.utils.tensors import gather

MARK = b"TFL3"
"""Identifier of the files, from byte 4 on."""


@register_backend(
    format="litert",
    runtime="litert",
    about="LiteRT (TensorFlow Lite) model with a fixed batch, for phones and small devices",
    runs="LiteRT's interpreter with XNNPACK's kernels, on the exported file",
    suffix=".tflite",
    packages=("litert_torch", "ai_edge_litert", "flatbuffers"),
    install="pip install 'prunekit[litert]'",
)
class LiteRt(DeviceBackend):
    """Files that litert-torch converts; their interface is an entry of the file's own metadata.

    Integers of 64 bits are of 32 in the file: the converter stores them so.
    """

    fixes_batch = True
    loader = "LiteRT"

    def write(self, source: ExportSource, path: Path) -> list[str]:
        """Write a model for inputs of fixed sizes."""
        self.require_writable(source, "a LiteRT model stores weights")
        self.require_sizes(source)
        program = program_of(source, flat=True)
        advice = "compute it there with operators that LiteRT has, or use another format, such as onnx"
        with (
            tracing(),
            redirect_stdout(StringIO()),  # where the converter prints its progress
            exporting(source.model, "exported to LiteRT", advice),
            forward_of_tensors(source.model, program.example),
        ):
            import litert_torch

            litert_torch.convert(source.model, tuple(gather(program.example))).export(str(path))
            path.write_bytes(with_metadata(path.read_bytes(), metadata_of(program.interface)))
        return program.notes

    def code_in(self, path: Path) -> str:
        """Return that there is nothing: LiteRT verifies a file, and knows no operators but its own."""
        return ""

    def load(self, path: Path, threads: int) -> Loaded:
        """Load a file in an interpreter with this number of threads."""
        from ai_edge_litert.interpreter import Interpreter

        interface = self.interface(path)
        with raised_as(ArtifactError, f"{path}: LiteRT cannot load it: "):
            interpreter = Interpreter(str(path), num_threads=threads)
            interpreter.allocate_tensors()
            signature = interpreter.get_signature_runner()
            taken = signature.get_input_details()
            results = [signature.get_output_details()[f"output_{at}"] for at in range(len(interface.outputs))]

        def feed(example: tuple[Any, ...]) -> dict[int, Any]:
            tensors = enumerate(fed(example, interface).values())
            entries = {f"args_{at}": tensor.contiguous().numpy() for at, tensor in tensors}
            return {one["index"]: entries[name].astype(one["dtype"]) for name, one in taken.items()}

        def forward(arrays: dict[int, Any]) -> None:
            for index, array in arrays.items():
                interpreter.set_tensor(index, array)
            interpreter.invoke()

        def tensors(_: None) -> list[Tensor]:
            found = [torch.from_numpy(interpreter.get_tensor(one["index"])) for one in results]
            return [one.to(getattr(torch, spec.dtype)) for one, spec in zip(found, interface.outputs, strict=True)]

        return Loaded(feed, forward, tensors)

    def interface(self, path: Path) -> ModelInterface:
        """Return the interface in a file's metadata."""
        from ai_edge_litert import schema_py_generated as schema

        require_file(path, "a LiteRT model")
        content, text = path.read_bytes(), None
        with raised_as(ArtifactError, f"{path}: expected a LiteRT model, but "):
            if content[4:8] != MARK:
                raise ValueError("it is a file of something else")
            model = schema.Model.GetRootAs(content, 0)
            for entry in map(model.Metadata, range(model.MetadataLength())):
                if entry.Name() == KEY.encode():
                    text = model.Buffers(entry.Buffer()).DataAsNumpy().tobytes().decode()
        if text is None:
            raise ArtifactError(f"{path}: expected a LiteRT model that prunekit wrote, but it carries no interface")
        return interface_of_json(text, str(path))


def with_metadata(content: bytes, entries: dict[str, str]) -> bytes:
    """Return a file with further entries in its metadata."""
    import flatbuffers
    from ai_edge_litert import schema_py_generated as schema

    model = schema.ModelT.InitFromObj(schema.Model.GetRootAs(content, 0))
    model.metadata = list(model.metadata or [])
    for name, text in entries.items():
        buffer, entry = schema.BufferT(), schema.MetadataT()
        buffer.data = np.frombuffer(text.encode(), np.uint8)
        entry.name, entry.buffer = name, len(model.buffers)
        model.buffers.append(buffer)
        model.metadata.append(entry)
    builder = flatbuffers.Builder(len(content))
    builder.Finish(model.Pack(builder), MARK)
    return bytes(builder.Output())
