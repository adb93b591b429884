"""Files and folders that are written whole or not at all; JSON and CSV.

They are written to a temporary beside the target, which then is renamed.
"""

import csv
import ctypes
import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, suppress
from numbers import Integral, Real
from pathlib import Path
from types import NoneType
from typing import Any

from safetensors import SafetensorError

from prunekit.errors import ArtifactError, UsageError
from prunekit.reading.text_files import shown

StrPath = str | os.PathLike[str]
"""Type of paths that public functions take."""
_TEMPORARY = ".tmp"
"""Suffix of temporaries."""
_OLD = ".old-"
"""The part before the process in the hidden name of what is being replaced."""


def folder_at(path: StrPath) -> Path:
    """Return the path of a folder that a user named."""
    if not isinstance(path, (str, os.PathLike)):
        raise UsageError(f"folder: expected a path, such as 'small', got {type(path).__name__}")
    return Path(path)


def require_replaceable(folder: Path, names: Set[str]) -> None:
    """Raise if writing a folder would destroy something else."""
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
    with _errors_name(path, path.with_name(f".{path.name}.")):
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

    An old folder stays until the new one is complete: the two exchange their names at once. Where the system cannot do
    that, a process that is killed in between leaves the old folder under a hidden name, which the next one to write
    there, or `remove_leftovers`, gives back.
    """
    with folder_beside(path) as temporary:
        yield temporary
        for written in (temporary, *temporary.rglob("*")):
            set_permissions(written)
            if durable:
                sync(written)
        replace_folder(temporary, path)
        if durable:
            sync(path.parent)


@contextmanager
def folder_beside(path: Path) -> Iterator[Path]:
    """Yield a temporary folder beside `path`, and remove it at the end; errors of the system name `path` itself."""
    with _errors_name(path, path.with_name(f".{path.name}.")):
        path.parent.mkdir(parents=True, exist_ok=True)
        _restore(path)
        temporary = Path(tempfile.mkdtemp(_TEMPORARY, f".{path.name}.", path.parent))
    try:
        with _errors_name(path, temporary):
            yield temporary
    finally:
        _remove(temporary)


def replace_folder(new: Path, path: Path) -> None:
    """Move a folder to a path on the same file system; what was there gets the new folder's old name."""
    if not os.path.lexists(path):
        os.replace(new, path)
    elif not exchange(new, path):
        aside = path.with_name(f".{path.name}{_OLD}{os.getpid()}{_TEMPORARY}")
        os.replace(path, aside)
        try:
            os.replace(new, path)
        except BaseException:
            _restore(path)
            raise
        os.replace(aside, new)


def exchange(one: Path, other: Path) -> bool:
    """Exchange the names of two files or folders of one file system at once; return False where nothing can do that."""
    library: Any = ctypes.CDLL(None) if os.name == "posix" else None
    paths = os.fsencode(one), os.fsencode(other)
    if hasattr(library, "renameat2"):  # Linux
        failed = library.renameat2(_HERE, paths[0], _HERE, paths[1], _EXCHANGE)
    elif hasattr(library, "renamex_np"):  # macOS
        failed = library.renamex_np(*paths, _EXCHANGE)
    else:
        return False
    return not failed


_HERE, _EXCHANGE = -100, 2
"""AT_FDCWD, and RENAME_EXCHANGE of Linux, which is RENAME_SWAP of macOS too."""


def _restore(path: Path) -> None:
    """Rename what a killed process was replacing back to its path, unless something is there."""
    for left in replaced(path):
        if not os.path.lexists(path):
            os.replace(left, path)


def replaced(path: Path) -> list[Path]:
    """Return the hidden names under which killed processes left what they were replacing, the newest first."""
    found = [left for left in path.parent.glob(f".*{_OLD}*{_TEMPORARY}") if _name_before(left) == path.name]
    return sorted(found, key=lambda left: left.lstat().st_mtime, reverse=True)


def _name_before(left: Path) -> str | None:
    """Return the former name of a folder that a killed process was replacing; None for any other file."""
    found = re.fullmatch(rf"\.(.+){re.escape(_OLD)}\d+{re.escape(_TEMPORARY)}", left.name, re.DOTALL)
    return found and found[1]


@contextmanager
def _errors_name(path: Path, temporary: Path) -> Iterator[None]:
    """Put a path into errors of the system that name the temporary or, if the disk is full, no file at all."""
    try:
        yield
    except SafetensorError as error:  # safetensors turns every error of the system into one
        found = re.search(r"os error (\d+)", str(error))
        if found is None:
            raise
        raise OSError(int(found[1]), os.strerror(int(found[1])), str(path)) from error
    except OSError as error:
        if error.strerror and (error.filename is None or str(error.filename).startswith(str(temporary))):
            error.filename = str(path)
        raise


def remove_leftovers(folder: Path) -> None:
    """Remove temporaries that killed processes left in a folder, which no other process may be writing to.

    What such a process was replacing gets its former name back, unless something else has that name.
    """
    for left in sorted(folder.glob(f".*{_TEMPORARY}")):
        if (name := _name_before(left)) is not None:
            _restore(folder / name)
        _remove(left)


def _remove(path: Path) -> None:
    """Remove a file, a link or a folder, if it is there and can be removed."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink(missing_ok=True)


def require_writable(path: Path, *, folder: bool = False, option: str | None = None) -> None:
    """Raise if a file, or files in a folder, cannot be written: before there is something to lose."""
    whole, by = path.absolute(), "" if option is None else f" with {option}"
    there = next(place for place in (whole, *whole.parents) if os.path.lexists(place))
    if there == whole and not folder:
        there = whole.parent
    if not there.is_dir():
        raise UsageError(f"{path}: expected a folder, but {there} is a file; choose another{by}")
    if not os.access(there, os.W_OK | os.X_OK):
        raise UsageError(f"{path}: {there} cannot be written to; choose another folder{by}")


def user_cache(name: str) -> Path:
    """Return a folder of the user's cache, which all runs share: in `PRUNEKIT_CACHE`, or in `~/.cache/prunekit`."""
    own = os.environ.get("PRUNEKIT_CACHE")
    user = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(own or Path(user, "prunekit")).expanduser() / name


def keep_newest(folder: Path, name: re.Pattern[str], limit: int) -> None:
    """Remove the folders in a cache that were used longest ago until the rest takes `limit` bytes; the newest stays.

    Links, and folders whose names are not of the cache's form, stay too.
    """
    own = [each for each in folder.iterdir() if name.fullmatch(each.name) and each.is_dir() and not each.is_symlink()]
    own.sort(key=lambda each: each.stat().st_mtime, reverse=True)
    taken = 0
    for index, each in enumerate(own):
        taken += sum(file.stat().st_size for file in each.iterdir())
        if index and taken > limit:
            _remove(each)


def sync(path: Path) -> None:
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
    """Write a UTF-8 text file, whole or not at all; what is not Unicode, as in paths of other bytes, is escaped."""
    with atomic_file(path) as temporary:
        temporary.write_text(text, encoding="utf-8", errors="backslashreplace")


def write_json(path: Path, value: Any) -> None:
    """Write JSON with sorted keys, as `read_json` reads it; NaN and Inf raise, because they are not JSON."""
    text = json.dumps(value, indent=2, sort_keys=True, allow_nan=False)
    if "\\ud" in text:  # half a surrogate pair, as in paths that are not UTF-8; or a character beyond 16 bits
        text = json.dumps(_printable(value), indent=2, sort_keys=True, allow_nan=False)
    write_text(path, text + "\n")


def _printable(value: Any) -> Any:
    """Return nested values with what is not Unicode escaped in their text."""
    if isinstance(value, Mapping):
        return {_printable(key): _printable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_printable(item) for item in value]
    return shown(value) if isinstance(value, str) else value


def write_csv(path: Path, rows: Sequence[Mapping[str, Any]], columns: Sequence[str] = ()) -> None:
    """Write rows as a CSV table, whole or not at all: None, NaN and missing values as empty cells."""
    names = list(dict.fromkeys(name for row in rows for name in row)) or list(columns)
    write_columns(path, {name: [row.get(name) for row in rows] for name in names})


def write_columns(path: Path, columns: Mapping[str, Sequence[Any]]) -> None:
    """Write columns of equal lengths as `write_csv` writes rows."""
    cells = map(_cells, columns.values())
    with (
        atomic_file(path) as temporary,
        temporary.open("w", encoding="utf-8", newline="", errors="backslashreplace") as file,
    ):
        csv.writer(file, lineterminator="\n").writerows([list(columns), *zip(*cells, strict=True)])


def _cells(column: Sequence[Any]) -> Sequence[Any]:
    """Return the cells of a column; integers become floats if there are floats or gaps, as in pandas."""
    found: list[Any] = [None if value is None or value != value else value for value in column]
    kinds = set(map(type, found))  # few, where a table has a million cells
    numbers = kinds - {NoneType}
    whole = {kind for kind in numbers if issubclass(kind, Integral)}
    if whole and whole != kinds and bool not in kinds and all(issubclass(kind, Real) for kind in numbers):
        return [float(value) if type(value) in whole else value for value in found]
    return found


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file as hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


CHECKSUM = "checksum"
"""Key of an object's own checksum in a JSON file."""


def with_checksum(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a JSON object with a checksum of them all, which `require_checksum` compares."""
    others = {key: value for key, value in values.items() if key != CHECKSUM}
    return {**others, CHECKSUM: _json_digest(others)}


def require_checksum(path: Path, values: Mapping[str, Any]) -> None:
    """Raise if the values of a JSON file are not those that it was written with; files of older versions have none."""
    others = {key: value for key, value in values.items() if key != CHECKSUM}
    if CHECKSUM in values and values[CHECKSUM] != _json_digest(others):
        raise ArtifactError(
            f"{path}: something in it was changed after prunekit wrote it (its {CHECKSUM} differs), so that its model "
            f"may give other answers; write it again, or remove the entry {CHECKSUM!r} if the change is meant"
        )


def _json_digest(values: Any) -> str:
    """Return the SHA-256 of JSON values, whatever the layout of their file."""
    plain = json.loads(json.dumps(values))  # keys that are numbers become text, which sorts in another way
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()


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
