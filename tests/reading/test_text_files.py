"""Text, JSON and JSON lines of strangers: read whole, or refused with file, place and reason."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from mutants import changed_json, unclean

from prunekit.errors import ArtifactError, DataError
from prunekit.reading.text_files import (
    parse_json,
    read_bytes,
    read_json,
    read_json_lines,
    read_text,
    require_file,
    shown,
    text_blocks,
)

SOUND: dict[str, Any] = {"name": "é", "sizes": [1, 2.5, None], "parts": [{"id": 1, "box": [0, 1, 2, 3]}], "on": True}


def test_what_was_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps(SOUND, indent=1).replace("\n", "\r\n").encode())
    assert read_json(path) == SOUND
    assert read_json(path) == json.loads(path.read_text(encoding="utf-8-sig"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"a": 1,\n "b": }', r"x\.json:2:7: expected JSON, but: Expecting value; the file is damaged"),
        ('{"a": 1, "a": 2}', r"x\.json: expected JSON, but: the key 'a' is there twice; keep one of them"),
        ('{"a": [1, NaN]}', r"x\.json: a\[1\]: expected JSON, but: the number is nan, not finite"),
        ('{"a": {"b": 1e999}}', r"x\.json: a\.b: expected JSON, but: the number is inf, not finite"),
        ('{"a": ' + "9" * 5000 + "}", r"x\.json: expected JSON, but: a number has thousands of digits"),
        ('{"a": ' + "9" * 50 + "}", r"x\.json: a: .* a whole number has 167 bits, more than 128"),
        ('["\\ud800"]', r"x\.json: \[0\]: .*'\\ud800' is not Unicode"),
        ('{"\\udcff": 1}', r"x\.json: expected JSON, but: '\\udcff' is not Unicode"),
        ("[" * 150 + "]" * 150, r"x\.json: .* more than 100 deep"),
        ("[" * 50_000, r"x\.json: .* more than 100 deep"),
        ("", r"x\.json:1:1: expected JSON, but: Expecting value"),
    ],
)
def test_broken_json_is_refused_with_its_place(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(ArtifactError, match=message):
        read_json(path)


def test_numbers_that_are_not_finite_are_read_where_they_may_be() -> None:
    assert parse_json("[NaN, Infinity, 1]", "x", finite=False)[1:] == [float("inf"), 1]
    with pytest.raises(DataError, match="bits"):
        parse_json("[NaN, " + "9" * 50 + "]", "x", raises=DataError, finite=False)


def test_lines_of_json_have_their_numbers(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text('{"a": "one\u2028line"}\n\n[1]\n', encoding="utf-8")
    assert list(read_json_lines(path)) == [(1, {"a": "one\u2028line"}), (3, [1])]
    path.write_text('{"a": 1}\n{"a": [1, }\n', encoding="utf-8")
    with pytest.raises(DataError, match=r"x\.jsonl:2:11: expected a JSON value on each line, but: Expecting value"):
        list(read_json_lines(path, raises=DataError))
    path.write_text("1\n2\n[Infinity]\n", encoding="utf-8")
    with pytest.raises(ArtifactError, match=r"x\.jsonl:3: \[0\]: .* not finite"):
        list(read_json_lines(path))


@pytest.mark.parametrize("block", [1, 2, 3, 7, 1000])
def test_blocks_are_the_text(tmp_path: Path, block: int) -> None:
    path = tmp_path / "x"
    path.write_bytes("\ufeffone é\r\n\r\ntwo\r\u2028 three \U0001f600\r".encode())
    blocks = list(text_blocks(path, block=block))
    assert "".join(blocks) == read_text(path) == "one é\n\ntwo\n\u2028 three \U0001f600\n"
    assert all(0 < len(each) <= block + 1 for each in blocks)
    for content in (b"one\r\ntwo \xc3(", b"one\r\ntwo \xc3"):
        path.write_bytes(content)
        with pytest.raises(ArtifactError, match=r"x:2: .* byte 9 is not UTF-8"):
            list(text_blocks(path, block=block))
    path.write_bytes(b"one\r\ntwo\r\n\0")
    with pytest.raises(ArtifactError, match=r"x:3: .* zero byte"):
        list(text_blocks(path, block=block))


def test_a_line_of_json_that_never_ends_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text('"a"\n"' + "b" * 3_000_000)
    with pytest.raises(DataError, match=r"x\.jsonl:2: expected a JSON value on each line of at most 1,000 characters"):
        list(read_json_lines(path, raises=DataError, most=1000))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"one\ntwo \xff", r"x:2: expected text in UTF-8, but byte 8 is not UTF-8; save it as UTF-8"),
        (b"\x89PNG\0\xff", r"x:1: expected text in UTF-8, but it is no text"),
        (b"one\ntwo\n\0", r"x:3: .* zero byte: it is no text"),
        (b"x" * 101, r"x: expected text in UTF-8 of at most 100 bytes, got 101"),
    ],
)
def test_what_is_no_text_is_refused(content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(content)
    with pytest.raises(ArtifactError, match=message):
        read_text(tmp_path / "x", most=100)


@pytest.mark.skipif(os.name != "posix", reason="needs named pipes, devices and links")
def test_only_regular_files_are_opened(tmp_path: Path) -> None:
    """A pipe that nobody writes to would be waited for, and a device never ends."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "file").write_text("text")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    assert read_text(tmp_path / "link") == "text"
    assert require_file(tmp_path / "link", "text") == 4
    wrong = {
        tmp_path / "pipe": "it is a named pipe",
        tmp_path: "directory|it is a folder",
        Path("/dev/zero"): "it is a device",
        tmp_path / "loop": "symbolic links",
        tmp_path / "missing": "no such file",
        tmp_path / "a\0b": "null byte",
        tmp_path / ("x" * 300): "too long",
    }
    for path, message in wrong.items():
        for read in (read_bytes, require_file):
            with pytest.raises(DataError, match=message):
                read(path, "text", DataError)


@pytest.mark.skipif(os.name != "posix", reason="paths are bytes on POSIX systems alone")
def test_paths_that_are_not_utf8_can_be_printed(tmp_path: Path) -> None:
    path = Path(os.fsdecode(os.fsencode(tmp_path) + b"/r\xff.json"))
    try:
        path.write_text("{")
    except OSError:
        pytest.skip("the file system takes UTF-8 alone")
    with pytest.raises(ArtifactError) as caught:
        read_json(path)
    assert str(caught.value).encode().startswith(os.fsencode(tmp_path) + rb"/r\udcff.json:1:2: expected JSON")
    assert shown("plain é") == "plain é"


@pytest.mark.slow
def test_damaged_json_is_read_or_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.json"

    def read(mutant: bytes) -> None:
        path.write_bytes(mutant)
        json.dumps(read_json(path)).encode()
        list(read_json_lines(path))

    assert unclean(read, changed_json(SOUND, 300, seed=0)) == []
