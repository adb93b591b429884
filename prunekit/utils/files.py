"""Files and folders that are written whole or not at all; JSON and CSV.

They are written to a temporary beside the target, which then is renamed.
"""

from __future__ import annotations

import csv
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from numbers import Integral, Real
from pathlib import Path
from typing import Any

from prunekit.errors import ArtifactError, UsageError

StrPath = str | os.PathLike[str]
"""Type of paths that public functions take."""
_TEMPORARY = ".tmp"
"""Suffix of temporaries."""


def folder_at(path: StrPath) -> Path:
    """Return the path of a folder that a user named.

    Raises:
        UsageError: it is not a path.
    """
    if not isinstance(path, (str, os.PathLike)):
        raise UsageError(f"folder: expected a path, such as 'small', got {type(path).__name__}")
    return Path(path)


def require_replaceable(folder: Path, names: Set[str]) -> None:
    """Raise if writing a folder would destroy something else.

    Args:
        folder: to be written; need not exist.
        names: of the files in folders of its kind.

    Raises:
        UsageError: there is a file of this name, or a folder with other contents.
    """
    if folder.is_dir():
        others = sorted(path.name for path in folder.iterdir() if path.name not in names)
        if others:
            more = f" and {len(others) - 1} more" if len(others) > 1 else ""
            raise UsageError(
                f"{folder}: expected a new folder, or one to replace that has {', '.join(sorted(names))} alone; this "
                f"one also has {others[0]!r}{more}, which would be lost: name a folder inside it, such as "
                f"{str(folder / 'small')!r}"
            )
    for place in (folder, *folder.parents):
        if place.exists() and not place.is_dir():
            raise UsageError(f"{folder}: expected a folder, but {place} is a file; choose another name")


@contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """Yield a temporary path in the same folder; on success it replaces `path`, on an error it is removed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(_TEMPORARY, f".{path.name}.", path.parent)
    os.close(handle)
    temporary = Path(name)
    try:
        with _errors_name(path, temporary):
            yield temporary
            set_permissions(temporary)
            os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def atomic_folder(path: Path, *, durable: bool = False) -> Iterator[Path]:
    """Yield a temporary folder beside `path`; on success it replaces `path`, on an error it is removed.

    An old folder stays until the new one is complete.

    Args:
        path: of the folder.
        durable: whether it is synced to the disk at the end, and survives a loss of power.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(_TEMPORARY, f".{path.name}.", path.parent))
    try:
        with _errors_name(path, temporary):
            yield temporary
            for written in (temporary, *temporary.rglob("*")):
                set_permissions(written)
                if durable:
                    _sync(written)
            old = path.with_name(f".{path.name}.old-{os.getpid()}{_TEMPORARY}")
            if path.exists():
                os.replace(path, old)
            os.replace(temporary, path)
            if durable:
                _sync(path.parent)
            shutil.rmtree(old, ignore_errors=True)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


@contextmanager
def _errors_name(path: Path, temporary: Path) -> Iterator[None]:
    """Put the path into errors of the system, which name no file if the disk is full, and else the temporary."""
    try:
        yield
    except OSError as error:
        if error.strerror and (error.filename is None or str(error.filename).startswith(str(temporary))):
            error.filename = str(path)
        raise


def remove_leftovers(folder: Path) -> None:
    """Remove temporaries that killed processes left in a folder, which no other process may be writing to."""
    for left in folder.glob(f".*{_TEMPORARY}"):
        shutil.rmtree(left, ignore_errors=True) if left.is_dir() else left.unlink(missing_ok=True)


def folders_below(folder: Path, root: Path | None = None) -> Iterator[tuple[Path, list[str]]]:
    """Yield a folder and those at any depth below it, with the names of their files; links are followed.

    Each folder is visited once: a link to where it is itself in, or to what `root` holds or is in, is not followed, as
    its files are found where they are.

    Args:
        folder: where to begin.
        root: folder that others are looked for in too; None: this one.
    """
    top, seen = (root or folder).resolve(), {folder.resolve()}
    for place, inner, names in os.walk(folder, followlinks=True):
        yield Path(place), names
        here, followed = Path(place).resolve(), []
        for name in inner:
            path, real = Path(place, name), Path(place, name).resolve()
            leads_back = path.is_symlink() and (is_within(here, real) or is_within(top, real) or is_within(real, top))
            if not leads_back and real not in seen:
                followed.append(name)
                seen.add(real)
        inner[:] = followed


def is_within(path: Path, folder: Path) -> bool:
    """Return whether a path is a folder or in it; both are resolved."""
    return path == folder or folder in path.parents


def _sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk; on POSIX systems alone."""
    if os.name != "posix":
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def set_permissions(path: Path) -> None:
    """Set the permissions of a normally created file: temporaries, and safetensors' files, are private."""
    mask = os.umask(0)
    os.umask(mask)
    path.chmod((0o777 if path.is_dir() else 0o666) & ~mask)


def write_text(path: Path, text: str) -> None:
    """Write a UTF-8 text file, whole or not at all."""
    with atomic_file(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: Path, value: Any) -> None:
    """Write JSON with sorted keys; NaN and Inf raise, because they are not JSON."""
    write_text(path, json.dumps(value, indent=2, sort_keys=True, allow_nan=False) + "\n")


def write_csv(path: Path, rows: Sequence[Mapping[str, Any]], columns: Sequence[str] = ()) -> None:
    """Write rows as a CSV table, whole or not at all: None, NaN and missing values as empty cells.

    Args:
        path: of the file.
        rows: values by column.
        columns: the header of a table without rows.
    """
    names = list(dict.fromkeys(name for row in rows for name in row)) or list(columns)
    cells = [_cells([row.get(name) for row in rows]) for name in names]
    with atomic_file(path) as temporary, temporary.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([names, *zip(*cells, strict=True)])


def _cells(column: Sequence[Any]) -> Sequence[Any]:
    """Return the cells of a column; integers become floats if there are floats or gaps, as in pandas."""
    found = [None if value is None or value != value else value for value in column]
    numbers = [value for value in found if value is not None]
    if all(isinstance(value, Real) and not isinstance(value, bool) for value in numbers) and (
        len(numbers) < len(found) or not all(isinstance(value, Integral) for value in numbers)
    ):
        return [float(value) if isinstance(value, Integral) else value for value in found]
    return found


def read_json(path: Path) -> Any:
    """Read a JSON file that prunekit wrote.

    Raises:
        ArtifactError: the file is missing or is not JSON.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ArtifactError(f"{path}: cannot be read ({error.strerror or error})") from error
    except ValueError as error:
        raise ArtifactError(f"{path}: expected JSON, but {error}; the file is damaged") from error


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file as hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def flattened(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every value of nested mappings with its dotted key; an empty mapping counts as a value."""
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from flattened(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def json_values(value: Any) -> Any:
    """Return nested values as JSON reads them back: keys as text, sequences as lists, unknown types as text."""
    if isinstance(value, Mapping):
        return {str(key): json_values(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, Set)):
        return [json_values(item) for item in value]
    return value if isinstance(value, int | float | None) else str(value)
