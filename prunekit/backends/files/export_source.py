"""A model to export with its options, which every writer is given, and the interface that its files carry.

The interface is written as text, read again, and inputs are fed by its names. Weights that a file names in other files
have to be its own, in its folder. A path in a stranger's file may lead anywhere, also by links, and to what is no file:
devices, pipes, and addresses of memory that ONNX Runtime and OpenVINO take in place of a path.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from prunekit.errors import ArtifactError, UsageError
from prunekit.models.interface import ModelInterface
from prunekit.reading.text_files import parse_json, read_json
from prunekit.utils.inputs import Keywords, split
from prunekit.utils.tensors import gather

Run = Callable[[tuple[Any, ...]], list[Tensor]]
"""From an example (float32, on the CPU) to the tensors of the output on the CPU, in the order of the interface."""


@dataclass(frozen=True)
class ExportOptions:
    """Options of an export."""

    opset: int | None = None  # version of ONNX's operators; None: the one that prunekit is tested with
    half: bool = False  # whether weights are stored in float16, where the format can; computations stay in float32
    # names of axes of any size by input and axis, besides the batch: `{"image": {2: "height"}}`
    dynamic: Mapping[str, Mapping[int, str]] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class ExportSource:
    """A model to export."""

    model: nn.Module  # a copy in eval mode on the CPU, in float32; free to be changed
    # positional and named arguments of `forward`, with at least two samples on the first axis, real ones where there
    # are any
    example: tuple[Any, ...]
    # names, dtypes and axes of inputs and outputs; task, classes and preprocessing. Axes that are not numbers are of
    # any size in the export.
    interface: ModelInterface
    options: ExportOptions = field(default_factory=ExportOptions)  # of the export
    folder: Path | None = None  # the model folder that the model was loaded from; None for others
    # further facts by name, such as the figures of the run that the model is from, for a model card
    facts: Mapping[str, Any] = field(default_factory=dict)


KEY = "prunekit"
"""Key of the interface in the metadata of a file."""


def metadata_of(interface: ModelInterface) -> dict[str, str]:
    """Return the metadata of a file: the interface as JSON, and its parts that other programs may read on their own."""
    plain = interface.as_dict()
    found = {KEY: json.dumps(plain)}
    if interface.classes:
        found["classes"] = json.dumps(plain["classes"])
    if interface.preprocessing is not None:
        found["preprocessing"] = json.dumps(plain["preprocessing"])
    if interface.task is not None:
        found["task"] = interface.task
    return found


def interface_of_json(text: str, where: str) -> ModelInterface:
    """Return an interface from the JSON of a file's metadata."""
    return ModelInterface.from_dict(parse_json(text, where, "the interface as JSON in its metadata"), where)


def beside(path: Path) -> Path:
    """Return the JSON beside a file whose format has no place for an interface."""
    return path.with_name(f"{path.name}.json")


def read_beside(path: Path) -> Any:
    """Return the mapping in the JSON beside a file."""
    file = beside(path)
    if not file.is_symlink() and not file.is_file():
        raise ArtifactError(f"{path}: expected its interface in {file.name} beside it, and there is none")
    require_own_file(path, file.name, "its interface")
    found = read_json(file, "the interface as JSON")
    if not isinstance(found, dict):
        raise ArtifactError(f"{file}: expected the interface as a JSON object, got {type(found).__name__}")
    return found


def as_exported(
    example: tuple[Any, ...], interface: ModelInterface, positional: int, named: Sequence[str]
) -> tuple[Any, ...]:
    """Return an example with its tensors by position or by name, as a program was exported with them."""
    given, keywords = split(example)
    if len(given) == positional and set(keywords) == set(named):
        return example
    if positional + len(named) != len(interface.inputs):
        return example
    tensors = fed(example, interface)
    names = [spec.name for spec in interface.inputs if spec.name not in named]
    found = tuple(tensors[name] for name in names)
    return (*found, Keywords((name, tensors[name]) for name in named)) if named else found


def fed_arrays(
    example: tuple[Any, ...], interface: ModelInterface, taken: Iterable[str]
) -> dict[str, np.ndarray[Any, Any]]:
    """Return the arrays of an example by name, for those inputs that a file takes: exporters drop unused ones."""
    tensors, names = fed(example, interface), frozenset(taken)
    return {name: tensor.contiguous().numpy() for name, tensor in tensors.items() if name in names}


def fed(example: tuple[Any, ...], interface: ModelInterface) -> dict[str, Tensor]:
    """Return the tensors of an example by the names of a model's inputs."""
    kinds = {spec.name: getattr(torch, spec.dtype, None) for spec in interface.inputs}
    found = _by_name(example, interface)
    return {
        name: tensor.to(kinds[name]) if isinstance(kinds[name], torch.dtype) else tensor
        for name, tensor in found.items()
    }


def _by_name(example: tuple[Any, ...], interface: ModelInterface) -> dict[str, Tensor]:
    positional, named = split(example)
    names = [spec.name for spec in interface.inputs]
    if named and all(isinstance(value, Tensor) and name in names for name, value in named.items()):
        rest = [name for name in names if name not in named]
        tensors = gather(positional)
        if len(rest) == len(tensors):
            return {**dict(zip(rest, tensors, strict=True)), **named}
    tensors = gather(example)
    if len(tensors) != len(names):
        wanted = ", ".join(map(str, interface.inputs)) or "none"
        raise UsageError(f"inputs: expected {wanted}; got {len(tensors)} tensors")
    return dict(zip(names, tensors, strict=True))


def require_own_data(model: Any, path: Path) -> None:
    """Raise if an ONNX model has external data anywhere but in files of its own folder."""
    for tensor in _tensors(model):
        if tensor.data_location == tensor.EXTERNAL:
            location = next((entry.value for entry in tensor.external_data if entry.key == "location"), "")
            require_own_file(path, location, f"external data of {tensor.name!r}")


def require_own_file(path: Path, location: str, what: str) -> None:
    """Raise unless a location in a file's text is that of another file in the same folder."""
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
        for part, value in one.ListFields():
            if part.message_type is not None:
                stack += [value] if hasattr(value, "DESCRIPTOR") else list(value)
