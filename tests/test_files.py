"""Files and folders that are whole or not there, and how paths are given."""

from __future__ import annotations

import errno
import inspect
from collections.abc import Callable, Iterator
from os import PathLike
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import pytest

import prunekit
from prunekit.masks.thresholds import ActivationThresholds
from prunekit.measure.model_size import size_bytes
from prunekit.utils.files import atomic_folder, write_text

MUCH = "x" * 5000


def into_a_folder(path: Path) -> None:
    with atomic_folder(path) as temporary:
        (temporary / "text").write_text(MUCH)


@pytest.mark.parametrize("write", [lambda path: write_text(path, MUCH), into_a_folder], ids=["file", "folder"])
def test_what_a_full_disk_has_no_room_for_is_named_and_leaves_nothing(
    write: Callable[[Path], None], tmp_path: Path
) -> None:
    """Files may not grow beyond a limit: writing ends in the middle, by the kernel, which names no file."""
    resource = pytest.importorskip("resource")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
        with pytest.raises(OSError, match="File too large") as caught:
            write(tmp_path / "wanted")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert (caught.value.errno, caught.value.filename) == (errno.EFBIG, str(tmp_path / "wanted"))
    assert list(tmp_path.iterdir()) == []


def test_an_error_of_another_file_names_that(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as caught, atomic_folder(tmp_path / "wanted"):
        (tmp_path / "missing").read_text()
    assert caught.value.filename == str(tmp_path / "missing")


def _public() -> Iterator[tuple[str, Callable[..., Any]]]:
    """Public functions, and public methods of public classes."""
    for name in prunekit.__all__:
        value = getattr(prunekit, name)
        if inspect.isfunction(value):
            yield f"prunekit.{name}", value
        elif inspect.isclass(value):
            methods = inspect.getmembers(value, lambda item: inspect.isfunction(item) or inspect.ismethod(item))
            yield from ((f"prunekit.{name}.{key}", each) for key, each in methods if not key.startswith("_"))


def _parts(hint: Any) -> Iterator[Any]:
    yield hint
    for part in get_args(hint):
        yield from _parts(part)


def test_every_public_function_takes_paths_as_strings_too() -> None:
    seen = []
    for name, function in _public():
        if not any("Path" in str(hint) for hint in getattr(function, "__annotations__", {}).values()):
            continue
        hints = get_type_hints(function)
        hints.pop("return", None)
        for argument, hint in hints.items():
            parts = list(_parts(hint))
            if any(part is PathLike or get_origin(part) is PathLike or part is Path for part in parts):
                seen.append(name)
                assert str in parts, f"{name}: {argument} is {hint}; expected StrPath"
                assert Path not in parts, f"{name}: {argument} is {hint}; expected StrPath"
    assert {"prunekit.save", "prunekit.load", "prunekit.load_plan", "prunekit.profile"} <= set(seen)


def test_paths_may_be_strings(tmp_path: Path) -> None:
    thresholds = ActivationThresholds({"a": 1.0}, {"a": 0.5}, 0.5, "output", 1)
    thresholds.save(f"{tmp_path}/thresholds.json")
    assert ActivationThresholds.load(f"{tmp_path}/thresholds.json").thresholds == {"a": 1.0}
    assert size_bytes(str(tmp_path)) == (tmp_path / "thresholds.json").stat().st_size
