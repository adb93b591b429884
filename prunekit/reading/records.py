"""Plain values of a file as dataclasses, checked whole before they are used."""

import json
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from prunekit.errors import ArtifactError, cut_short

T = TypeVar("T")


def as_record(kind: type[T], values: Any, where: str) -> T:
    """Return plain values as a dataclass, or a tuple or mapping of such, with the types that it declares."""
    try:
        text = json.dumps(values)
        return TypeAdapter(kind).validate_json(text, strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        place = "".join(f".{part}" for part in first["loc"])
        got = "" if first["type"] == "missing" else f", got {cut_short(repr(first['input']))}"
        raise ArtifactError(f"{where}{place}: {first['msg']}{got}; the file is damaged") from error
    except (TypeError, ValueError, RecursionError) as error:  # tensors, and keys that are no text
        raise ArtifactError(f"{where}: expected plain values ({error}); the file is damaged") from error


def require_parts(values: Any, names: Iterable[str], where: str) -> None:
    """Raise unless values of a file are a mapping that has some names."""
    if not isinstance(values, Mapping):
        raise ArtifactError(f"{where}: expected values by name, got {type(values).__name__}; the file is damaged")
    if missing := [name for name in names if name not in values]:
        raise ArtifactError(f"{where}: {missing[0]!r} is not there; the file is damaged")
