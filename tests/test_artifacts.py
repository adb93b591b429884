"""Files and folders that are whole or not there."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path

import pytest

from prunekit.artifacts import atomic_folder, write_text

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
