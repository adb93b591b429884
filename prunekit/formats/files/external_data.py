"""Weights that a file names in other files: they have to be its own, in its folder.

A path in a stranger's file may lead anywhere, also by links, and to what is no file: devices, pipes, and addresses of
memory that ONNX Runtime and OpenVINO take in place of a path.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from prunekit.errors import ArtifactError


def require_own_data(model: Any, path: Path) -> None:
    """Raise if an ONNX model has external data anywhere but in files of its own folder."""
    for tensor in _tensors(model):
        if tensor.data_location == tensor.EXTERNAL:
            location = next((entry.value for entry in tensor.external_data if entry.key == "location"), "")
            require_own_file(path, location, f"external data of {tensor.name!r}")


def require_own_file(path: Path, location: str, what: str) -> None:
    """Raise unless a location is that of a file in the folder of another one."""
    problem = "the model's own folder, and it leads elsewhere"
    if location and "\0" not in location and not Path(location).is_absolute() and ".." not in Path(location).parts:
        found = (path.parent / location).resolve()
        if any(found.is_relative_to(folder) for folder in (path.parent.resolve(), path.resolve().parent)):
            if found.is_file():
                return
            problem = "a file, and there is none"
    raise ArtifactError(f"{path}: {what} is at {location!r}: expected {problem}")


def _tensors(message: Any) -> Iterator[Any]:
    """Yield every tensor of an ONNX model: of graphs, their attributes and nested graphs, and of functions."""
    stack = [message]
    while stack:
        one = stack.pop()
        if one.DESCRIPTOR.name == "TensorProto":
            yield one
            continue
        for field, value in one.ListFields():
            if field.message_type is not None:
                stack += [value] if hasattr(value, "DESCRIPTOR") else list(value)
