"""Text, JSON, JSON lines and records from a file: regular, of bounded size, depth and numbers, checked whole.

What is wrong is an error that says where.
"""

import codecs
import io
import json
import math
import os
import stat
import sys
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from prunekit.errors import ArtifactError, PrunekitError, cut_short

T = TypeVar("T")
MOST_BYTES = 2**28
"""The largest text that is read where a caller names no other bound."""
BLOCK = 2**20
"""Bytes of a long text that are read at once."""
MOST_LEVELS = 100
"""How deep lists and mappings may lie in each other: what walks through them later is recursive."""
MOST_BITS = 128
"""The largest whole numbers, as in the states of random generators."""
_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def shown(path: os.PathLike[str] | str) -> str:
    """Return a path as text that any terminal, log or JSON file takes: bytes that are not UTF-8 are escaped."""
    return os.fspath(path).encode("utf-8", "backslashreplace").decode()


def read_bytes(
    path: Path, expected: str, raises: type[PrunekitError] = ArtifactError, *, most: int = MOST_BYTES
) -> bytes:
    """Return the content of a regular file, links followed."""
    return b"".join(_contents(path, expected, raises, most, most + 1))


def _contents(path: Path, expected: str, raises: type[PrunekitError], most: int, block: int) -> Iterator[bytes]:
    """Yield the content of a regular file, some bytes at a time."""
    try:
        # A pipe without a writer would be waited for without O_NONBLOCK, before anything can be asked of it.
        handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
        with os.fdopen(handle, "rb") as file:
            facts, done = os.fstat(handle), 0
            _require_regular(path, facts.st_mode, expected, raises)
            size = facts.st_size
            while size <= most and (content := file.read(min(block, max(size - done + 1, BLOCK)))):
                done += len(content)
                size = max(size, done)
                yield content
    except (OSError, ValueError) as error:  # ValueError: a path with a zero byte
        raise raises(f"{shown(path)}: expected {expected}, but {_unreadable(error)}") from error
    if size > most:
        raise raises(f"{shown(path)}: expected {expected} of at most {most:,} bytes, got {size:,}")


def require_file(path: Path, expected: str, raises: type[PrunekitError] = ArtifactError) -> int:
    """Return the bytes of a regular file that is opened by something else, links followed."""
    try:
        facts = os.stat(path)
    except (OSError, ValueError) as error:
        raise raises(f"{shown(path)}: expected {expected}, but {_unreadable(error)}") from error
    _require_regular(path, facts.st_mode, expected, raises)
    return facts.st_size


def _require_regular(path: Path, mode: int, expected: str, raises: type[PrunekitError]) -> None:
    if not stat.S_ISREG(mode):
        kind = _KINDS.get(stat.S_IFMT(mode), "no regular file")
        raise raises(f"{shown(path)}: expected {expected}, but it cannot be read: it is {kind}")


def _unreadable(error: OSError | ValueError) -> str:
    if isinstance(error, FileNotFoundError):
        return "there is no such file"
    return f"it cannot be read: {getattr(error, 'strerror', None) or error}"


def read_text(
    path: Path,
    expected: str = "text in UTF-8",
    raises: type[PrunekitError] = ArtifactError,
    *,
    most: int = MOST_BYTES,
) -> str:
    """Return the text of a UTF-8 file without its byte order mark, with a line feed at the end of each line."""
    return "".join(text_blocks(path, expected, raises, most=most, block=most + 1))


def text_blocks(
    path: Path,
    expected: str = "text in UTF-8",
    raises: type[PrunekitError] = ArtifactError,
    *,
    most: int = sys.maxsize,
    block: int = BLOCK,
) -> Iterator[str]:
    """Yield what `read_text` returns, some bytes of the file at a time, so that it may be larger than the memory."""
    decoder = io.IncrementalNewlineDecoder(codecs.getincrementaldecoder("utf-8-sig")(), translate=True)
    line, done = 1, 0  # of what was read
    for content in chain(_contents(path, expected, raises, most, block), [b""]):
        done += len(content)
        try:
            text = decoder.decode(content, final=not content)
        except UnicodeDecodeError as error:
            line += error.object.count(b"\n", 0, error.start)
            at = done - len(error.object) + error.start
            kind = "it is no text" if b"\0" in content[:4096] else f"byte {at} is not UTF-8; save it as UTF-8"
            raise raises(f"{shown(path)}:{line}: expected {expected}, but {kind}") from error
        if "\0" in text:
            line += text.count("\n", 0, text.index("\0"))
            raise raises(f"{shown(path)}:{line}: expected {expected}, but there is a zero byte: it is no text")
        line += text.count("\n")
        if text:
            yield text


def read_json(
    path: Path,
    expected: str = "JSON",
    raises: type[PrunekitError] = ArtifactError,
    *,
    most: int = MOST_BYTES,
    finite: bool = True,
) -> Any:
    """Return the values of a JSON file."""
    return parse_json(read_text(path, expected, raises, most=most), shown(path), expected, raises, finite=finite)


def read_json_lines(
    path: Path,
    expected: str = "a JSON value on each line",
    raises: type[PrunekitError] = ArtifactError,
    *,
    most: int = MOST_BYTES,
) -> Iterator[tuple[int, Any]]:
    """Yield the number, from 1, and the value of each line that is not blank, of a file of any size.

    A line has at most so many characters.
    """
    number, rest = 1, ""
    for block in chain(text_blocks(path, expected, raises), ["\n"]):
        *lines, rest = (rest + block).split("\n")  # others end at U+2028 too, which JSON's text has
        for line in lines:
            if line.strip():
                yield number, parse_json(line, shown(path), expected, raises, line=number)
            number += 1
        if len(rest) > most:
            raise raises(f"{shown(path)}:{number}: expected {expected} of at most {most:,} characters, got more")


def parse_json(
    text: str,
    where: str,
    expected: str = "JSON",
    raises: type[PrunekitError] = ArtifactError,
    *,
    line: int = 1,
    finite: bool = True,
) -> Any:
    """Return the values of JSON that a stranger may have written."""
    try:
        found = json.loads(text, object_pairs_hook=_mapping)
    except json.JSONDecodeError as error:
        place = f"{where}:{error.lineno + line - 1}:{error.colno}"
        raise _damage(place, expected, error.msg, raises) from error
    except ValueError as error:  # a key that is there twice; more digits than Python converts
        reason = str(error) if isinstance(error, _DuplicateKeyError) else "a number has thousands of digits"
        raise _damage(where, expected, reason, raises) from error
    except RecursionError as error:
        raise _damage(where, expected, _TOO_DEEP, raises) from error
    require_plain(found, where if line == 1 else f"{where}:{line}", expected, raises, finite=finite)
    return found


def _damage(where: str, expected: str, reason: str, raises: type[PrunekitError]) -> PrunekitError:
    """Return the error of a file that is not what was expected."""
    return raises(f"{where}: expected {expected}, but: {reason}" + "; the file is damaged" * (raises is ArtifactError))


class _DuplicateKeyError(ValueError):
    """A key is in a mapping twice, so that readers differ in what they take."""


_TOO_DEEP = f"lists and mappings lie in each other more than {MOST_LEVELS} deep"


def _mapping(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise _DuplicateKeyError(f"the key {cut_short(ascii(twice))} is there twice; keep one of them")
    return found


def require_plain(
    values: Any, where: str, expected: str, raises: type[PrunekitError] = ArtifactError, *, finite: bool = True
) -> None:
    """Raise if values of a file are so deep, large or broken that later steps would fail at them."""
    level: list[Any] = [values]
    for _ in range(MOST_LEVELS + 1):
        if not all(map(_is_sound if finite else _is_whole, level)):
            _fail(values, where, expected, raises, finite)
        level = [item for value in level if value.__class__ in (list, dict) for item in _inside(value)]
        if not level:
            return
    raise _damage(where, expected, _TOO_DEEP, raises)


def _inside(value: Any) -> Iterable[Any]:
    return (*value, *value.values()) if isinstance(value, dict) else value


def _is_sound(value: Any) -> bool:
    return math.isfinite(value) if value.__class__ is float else _is_whole(value)


def _is_whole(value: Any) -> bool:
    kind = value.__class__
    if kind is str:
        return value.isascii() or not any("\ud800" <= sign <= "\udfff" for sign in value)
    return kind is not int or value.bit_length() <= MOST_BITS


def _fail(values: Any, where: str, expected: str, raises: type[PrunekitError], finite: bool) -> NoReturn:
    """Raise the error of the first value that is not sound, with its key."""
    waiting: list[tuple[tuple[str | int, ...], Any]] = [((), values)]
    while waiting:
        path, value = waiting.pop()
        keys = list(value) if isinstance(value, Mapping) else []
        for each in (value, *keys):
            if not (_is_sound(each) if finite else _is_whole(each)):
                key = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
                at = f"{where}: {cut_short(shown(key.removeprefix('.')))}" if key else where
                raise _damage(at, expected, _reason(each), raises)
        inner = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else ()
        waiting += reversed([((*path, key), item) for key, item in inner])
    raise AssertionError("a value was not sound, and none is")


def _reason(value: Any) -> str:
    if isinstance(value, float):
        return f"the number is {value}, not finite"
    if isinstance(value, int):
        return f"a whole number has {value.bit_length():,} bits, more than {MOST_BITS}"
    return f"{cut_short(ascii(value))} is not Unicode: it has half of a surrogate pair"


def as_record(kind: type[T], values: Any, where: str) -> T:
    """Return plain values as a dataclass, or a tuple or mapping of such, with the types that it declares."""
    from pydantic import TypeAdapter, ValidationError  # `prunekit --help` reads no file

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
