"""Files and folders that are whole or not there, and how paths are given."""

from __future__ import annotations

import errno
import inspect
import multiprocessing
import os
import re
import signal
from collections.abc import Callable, Iterator
from os import PathLike
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import pytest
import torch
from safetensors.torch import save_file

import prunekit
from prunekit.errors import UsageError
from prunekit.masks.thresholds import ActivationThresholds
from prunekit.measure.model_size import size_bytes
from prunekit.reading.text_files import read_json, shown
from prunekit.utils import files
from prunekit.utils.files import (
    atomic_file,
    atomic_folder,
    exchange,
    keep_newest,
    remove_leftovers,
    replaced,
    require_writable,
    user_cache,
    write_csv,
    write_json,
    write_text,
)

MUCH = "x" * 5000


def into_a_folder(path: Path) -> None:
    with atomic_folder(path) as temporary:
        (temporary / "text").write_text(MUCH)


def tensors_into_a_file(path: Path) -> None:
    with atomic_file(path) as temporary:
        save_file({"x": torch.zeros(5000)}, temporary)


@pytest.mark.parametrize(
    "write",
    [lambda path: write_text(path, MUCH), into_a_folder, tensors_into_a_file],
    ids=["file", "folder", "tensors"],
)
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


@pytest.mark.parametrize("write", [lambda path: write_text(path, MUCH), into_a_folder], ids=["file", "folder"])
@pytest.mark.parametrize("number", [errno.EROFS, errno.ENOSPC])
def test_a_temporary_that_cannot_be_made_is_not_named(
    number: int, write: Callable[[Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(suffix: str, prefix: str, folder: Path) -> None:
        raise OSError(number, os.strerror(number), f"{folder}/{prefix}abc{suffix}")

    monkeypatch.setattr(files.tempfile, "mkstemp", refused)
    monkeypatch.setattr(files.tempfile, "mkdtemp", refused)
    with pytest.raises(OSError, match=os.strerror(number)) as caught:
        write(tmp_path / "wanted")
    assert (caught.value.errno, caught.value.filename) == (number, str(tmp_path / "wanted"))


def test_a_place_that_cannot_be_written_to_is_refused_as_it_was_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    for writable in ("file", "new", "deep/new"):
        require_writable(tmp_path / writable)
    with pytest.raises(UsageError, match=r"file/page: expected a folder, but .*file is a file; choose another$"):
        require_writable(tmp_path / "file" / "page")
    with pytest.raises(UsageError, match=r"file: expected a folder"):
        require_writable(tmp_path / "file", folder=True)
    monkeypatch.setattr("os.access", lambda path, mode: False)  # the tests may run as root, who may write anywhere
    with pytest.raises(UsageError, match=rf"deep/new: {tmp_path} cannot be written to; choose another folder$"):
        require_writable(tmp_path / "deep" / "new")


def _write_and_die(path: Path, at: int) -> None:
    """Replace a folder, in a process that is killed right after some call of the system that renames something."""
    count = 0

    def killed(call: Callable[..., Any]) -> Callable[..., Any]:
        def renamed(*paths: Path) -> Any:
            nonlocal count
            found = call(*paths)
            count += 1
            if count == at:
                os.kill(os.getpid(), signal.SIGKILL)
            return found

        return renamed

    os.replace, files.exchange = killed(os.replace), killed(files.exchange)  # type: ignore[assignment]
    with atomic_folder(path) as temporary:
        (temporary / "text").write_text("new")


@pytest.mark.skipif(os.name != "posix", reason="needs fork")
@pytest.mark.parametrize("exchanges", [True, False], ids=["exchange", "two renames"])
@pytest.mark.parametrize("at", [1, 2, 3, 4])
def test_a_folder_whose_replacement_is_killed_is_the_old_one_or_the_new(
    at: int, exchanges: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "folder"
    path.mkdir()
    (path / "text").write_text("old")
    if not exchanges:
        monkeypatch.setattr(files, "exchange", lambda one, other: False)
    elif not exchange(tmp_path / "folder", tmp_path / "folder"):
        pytest.skip("this file system cannot exchange names")
    process = multiprocessing.get_context("fork").Process(target=_write_and_die, args=(path, at))
    process.start()
    process.join()
    if not path.exists():
        assert not exchanges
        assert [left.name for left in replaced(path)] == [f".folder.old-{process.pid}.tmp"]
    remove_leftovers(tmp_path)
    assert [left.name for left in tmp_path.iterdir()] == ["folder"]
    assert (path / "text").read_text() in ("old", "new")
    into_a_folder(path)
    assert (path / "text").read_text() == MUCH


def test_what_was_being_replaced_gets_its_name_back_before_it_is_replaced_again(tmp_path: Path) -> None:
    left = tmp_path / ".folder.old-123.tmp"
    left.mkdir()
    (left / "text").write_text("old")
    with pytest.raises(ValueError, match="fails"), atomic_folder(tmp_path / "folder"):
        raise ValueError("fails")
    assert (tmp_path / "folder" / "text").read_text() == "old"
    assert replaced(tmp_path / "folder") == []


def test_a_link_to_a_folder_is_replaced_and_not_what_it_points_to(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "folder").symlink_to(tmp_path / "other")
    into_a_folder(tmp_path / "folder")
    assert sorted(one.name for one in tmp_path.iterdir()) == ["folder", "other"]
    assert not (tmp_path / "folder").is_symlink()
    assert list((tmp_path / "other").iterdir()) == []


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


@pytest.mark.skipif(os.name != "posix", reason="paths are bytes on POSIX systems alone")
def test_folders_whose_names_are_not_utf8_hold_all_that_others_do(tmp_path: Path) -> None:
    """Python has such a name with half surrogates, which no UTF-8 file takes and safetensors does not open."""
    folder = Path(os.fsdecode(os.fsencode(tmp_path) + b"/r\xff"))
    try:
        folder.mkdir()
    except OSError:
        pytest.skip("the file system takes UTF-8 alone")
    write_text(folder / "text", f"in {folder}\n")
    assert (folder / "text").read_text(encoding="utf-8") == f"in {shown(folder)}\n"
    write_json(folder / "json", {str(folder): [str(folder), "\U0001f600", 1]})
    assert read_json(folder / "json") == {shown(folder): [shown(folder), "\U0001f600", 1]}
    write_csv(folder / "csv", [{"where": str(folder)}])
    assert (folder / "csv").read_text(encoding="utf-8") == f"where\n{shown(folder)}\n"
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    x = torch.randn(2, 4)
    result = prunekit.prune(model, x, macs=0.5)
    for compress in (False, True):
        saved = prunekit.save(result, folder / "small", compress=compress)
        assert torch.equal(prunekit.load(saved, model=model)(x), result.model.eval()(x))
        assert prunekit.load_plan(saved).digest == result.plan.digest
    prunekit.calibrate(model, [x]).save(folder / "statistics")
    assert len(prunekit.ChannelStats.load(folder / "statistics")) == len(prunekit.calibrate(model, [x]))


def test_where_the_users_cache_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PRUNEKIT_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/there")
    assert user_cache("latency") == Path("/there/prunekit/latency")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert user_cache("latency") == Path.home() / ".cache/prunekit/latency"
    monkeypatch.setenv("PRUNEKIT_CACHE", "~/own")
    assert user_cache("latency") == Path.home() / "own/latency"


def test_a_cache_keeps_what_was_used_last_and_touches_nothing_else(tmp_path: Path) -> None:
    for age, name in enumerate(("c", "b", "a", "mine")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_bytes(bytes(100))
        os.utime(tmp_path / name, (1000 - age, 1000 - age))
    (tmp_path / "d").symlink_to(tmp_path / "mine")
    keep_newest(tmp_path, re.compile("[a-d]"), 250)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["b", "c", "d", "mine"]
    keep_newest(tmp_path, re.compile("[a-d]"), 0)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c", "d", "mine"]
    assert (tmp_path / "mine" / "file").is_file()
