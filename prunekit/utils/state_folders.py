"""State folders: nested states without pickle, as safetensors and JSON with checksums."""

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
from torch import Tensor

from prunekit.errors import ArtifactError, ResumeError, cut_short, reraise_shortage
from prunekit.reading.array_files import read_tensors
from prunekit.reading.text_files import read_json
from prunekit.utils.files import atomic_folder, sha256

FORMAT = 1
TENSORS, TEXT = "tensors.safetensors", "state.json"
_TAG = "$"
"""Key of JSON objects that encode what JSON cannot represent."""
_ABSENT = object()


def write_state(folder: Path, state: Mapping[str, Any]) -> None:
    """Write a state as a folder, whole or not at all, and synced to the disk.

    A state is tensors, numbers, text, booleans, None, and lists, tuples and dicts of them; keys are text or whole
    numbers. Tensors come back equal bit by bit, in the same order in memory and on the CPU; those that share memory
    come back apart. Where an `OSError` is raised, because the disk is full, the old folder is still there.
    """
    plain, tensors = encode_state(state)
    body = {"format": FORMAT, "state": plain}
    with atomic_folder(folder, durable=True) as temporary:
        save_tensors(temporary / TENSORS, tensors)
        body["tensors"] = sha256(temporary / TENSORS)
        text = json.dumps(body, allow_nan=False)
        (temporary / TEXT).write_text(json.dumps({"sha256": _digest(text), "body": body}), encoding="utf-8")


def read_state(folder: Path) -> dict[str, Any]:
    """Read what `write_state` wrote; tensors are on the CPU."""
    found = read_json(folder / TEXT)
    body = found.get("body") if isinstance(found, dict) else None
    if not isinstance(body, dict) or _digest(json.dumps(body)) != found.get("sha256"):
        raise ArtifactError(f"{folder / TEXT}: not as prunekit wrote it (checksum differs); the file is damaged")
    if body.get("format") != FORMAT:
        raise ResumeError(
            f"{folder / TEXT}: expected format {FORMAT}, got {body.get('format')}; resume it with the version that "
            "wrote it"
        )
    path = folder / TENSORS
    if not path.is_file() or sha256(path) != body.get("tensors"):
        raise ArtifactError(f"{path}: missing, or not as prunekit wrote it (checksum differs)")
    try:
        state = decode_state(body.get("state"), read_tensors(path)[0])
    except (LookupError, TypeError, ValueError, RuntimeError) as error:  # tags without their values
        reraise_shortage(error)
        raise ArtifactError(f"{folder}: a state that prunekit did not write ({error}); the file is damaged") from error
    if not isinstance(state, dict):
        raise ArtifactError(f"{folder / TEXT}: expected a state, got {type(state).__name__}; the file is damaged")
    return state


def encode_state(state: Mapping[str, Any]) -> tuple[Any, dict[str, Tensor]]:
    """Return a state as JSON values, and its tensors by name: contiguous copies on the CPU."""
    tensors: dict[str, Tensor] = {}
    return _encoded(state, "", tensors), tensors


def save_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write a safetensors file; the tensors are contiguous and share no memory."""
    safetensors.torch.save_file(dict(tensors), path)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _encoded(value: Any, where: str, tensors: dict[str, Tensor]) -> Any:
    """Return a value as JSON values; tensors are put into `tensors` under their place in the state."""
    if isinstance(value, Tensor):
        return _tensor(value, where, tensors)
    if value is None or type(value) in (bool, int, str):
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {_TAG: "float", "value": repr(value)}
    if isinstance(value, list):
        return [_encoded(item, _at(where, index), tensors) for index, item in enumerate(value)]
    if isinstance(value, tuple):
        return {_TAG: "tuple", "items": [_encoded(item, _at(where, i), tensors) for i, item in enumerate(value)]}
    if isinstance(value, Mapping):
        if wrong := [key for key in value if type(key) not in (str, int)]:
            raise TypeError(f"state, at {where!r}: expected text and whole numbers as keys, got {wrong[0]!r}")
        items = [[key, _encoded(item, _at(where, key), tensors)] for key, item in value.items()]
        if all(isinstance(key, str) for key in value) and _TAG not in value:
            return dict(items)
        return {_TAG: "dict", "items": items}
    raise TypeError(
        f"state, at {where!r}: expected tensors, numbers, text, and lists, tuples and dicts of them, got "
        f"{type(value).__name__}"
    )


def _at(where: str, key: Any) -> str:
    return f"{where}/{key}" if where else str(key)


def _tensor(value: Tensor, where: str, tensors: dict[str, Tensor]) -> dict[str, Any]:
    name = where
    while name in tensors:  # keys may have slashes of their own
        name += "'"
    # The order of the axes in memory: fused optimizers expect a parameter and its momentum to lie alike.
    order = sorted(range(value.ndim), key=value.stride, reverse=True)
    # A clone each: safetensors refuses tensors that share memory.
    tensors[name] = value.detach().permute(order).to("cpu", copy=True).contiguous()
    return {_TAG: "tensor", "name": name, "order": order}


def decode_state(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Return the state that `encode_state` encoded."""
    if isinstance(value, list):
        return [decode_state(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    match value.get(_TAG):
        case "tensor":
            order = value["order"]
            return tensors[value["name"]].permute([order.index(axis) for axis in range(len(order))])
        case "float":
            return float(value["value"])
        case "tuple":
            return tuple(decode_state(item, tensors) for item in value["items"])
        case "dict":
            return {key: decode_state(item, tensors) for key, item in value["items"]}
    return {key: decode_state(item, tensors) for key, item in value.items()}


def differences(there: Any, here: Any, where: str = "") -> Iterator[str]:
    """Yield a sentence for each difference between two plain values: its place, and both values."""
    if isinstance(there, Mapping) and isinstance(here, Mapping):
        for key in [*there, *(key for key in here if key not in there)]:
            place = f"{where}.{key}" if where else str(key)
            yield from differences(there.get(key, _ABSENT), here.get(key, _ABSENT), place)
    elif there != here:
        shown = ["nothing" if value is _ABSENT else cut_short(repr(value)) for value in (there, here)]
        yield f"{where}: {shown[0]} there, {shown[1]} here"
