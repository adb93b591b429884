"""YAML of strangers: read whole, or refused with line, column and reason, in a time that its length bounds."""

from __future__ import annotations

from pathlib import Path

import pytest
from mutants import damaged_bytes, unclean

from prunekit.errors import DataError
from prunekit.reading.yaml_files import parse_yaml, read_yaml

SOUND = "path: here\nnc: 2\nnames: {0: cat, 1: dog}\nbase: &base {a: 1, b: [x, 1.5, null]}\nuse: {<<: *base, c: 1e-3}\n"


def bomb(levels: int, wide: int) -> str:
    """Return aliases of aliases, which stand for `wide ** levels` values."""
    rows = ["a0: &a0 [" + ",".join("x" * wide) + "]"]
    rows += [f"a{i}: &a{i} [{','.join([f'*a{i - 1}'] * wide)}]" for i in range(1, levels)]
    return "\n".join(rows)


def merges(levels: int) -> str:
    """Return merges of merges, which stand for `2 ** levels` mappings."""
    rows = ["a0: &a0 {x: 1}"]
    rows += [f"a{i}: &a{i}\n  <<: [{','.join([f'*a{i - 1}'] * 2)}]\n  k{i}: 1" for i in range(1, levels)]
    return "\n".join(rows)


def test_what_people_write_is_read() -> None:
    use = {"a": 1, "b": ["x", 1.5, None], "c": 1e-3}
    assert parse_yaml(SOUND, "x")["use"] == use
    assert parse_yaml(bomb(3, 9), "x")["a2"][8][8] == ["x"] * 9
    assert parse_yaml("[&a x, &a y, *a]", "x") == ["x", "y", "y"]
    assert parse_yaml("# nothing", "x") is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (bomb(9, 9), r"x:6:\d+: expected YAML, but: it stands for more than 131,072 values"),
        (merges(40), r"x:\d+:\d+: .* it stands for more than 131,072 values"),
        ("a: &a [1, {b: *a}]", r"x:1:15: expected YAML, but: expected plain values, got an alias to itself"),
        ("a: 1\nb: !!bool maybe", r"x:2:4: expected YAML, but: it is no bool"),
        ("a: !!float abc", r"x:1:4: .* it is no float"),
        ("a: [1, 2001-99-99]", r"x:1:8: .* it is no timestamp"),
        ("a: " + "9" * 5000, r"x:1:4: .* it is no int"),
        ("a: 0x" + "f" * 40, r"x:1:4: .* a whole number has 160 bits, more than 128"),
        ("a: " + "[" * 400 + "]" * 400, r"x:1:103: .* more than 100 deep"),
        ("- " * 150 + "x", r"x:1:201: .* more than 100 deep"),
        ('a: "\\udcff"', r"x:1:4: .* not Unicode"),
        ("? [1]\n: 2", r"x:1:3: .* a key is a list or a mapping"),
        ("a: !!set {x}", r"x:1:4: .* plain values, got tag:yaml.org,2002:set"),
        ("a: !!python/object:os.system x", r"x:1:4: .* could not determine a constructor"),
        ("a: 1\na: 2", r"x:2:1: .* duplicate key"),
        ("a: [", r"x:1:5: .* expected the node content"),
    ],
)
def test_broken_yaml_is_refused_with_its_place(text: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        parse_yaml(text, "x")


def test_files_are_bounded(tmp_path: Path) -> None:
    (tmp_path / "x.yaml").write_text("x" * (2**20 + 1))
    with pytest.raises(DataError, match=r"x\.yaml: expected YAML of at most 1,048,576 bytes"):
        read_yaml(tmp_path / "x.yaml")


@pytest.mark.slow
def test_damaged_yaml_is_read_or_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"

    def read(mutant: bytes) -> None:
        path.write_bytes(mutant)
        read_yaml(path)

    assert unclean(read, damaged_bytes(SOUND.encode(), 300, seed=0)) == []
