"""`prunekit prune FOLDER`: a decoder in a folder, pruned block by block on a text."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from tiny_language import llama, text, write_model

import prunekit as pk
from prunekit.cli import cli

transformers = pytest.importorskip("transformers")


def run(*arguments: object) -> Result:
    return CliRunner().invoke(cli, ["prune", *map(str, arguments)])


@pytest.fixture
def dense(tmp_path: Path) -> Path:
    (tmp_path / "text.txt").write_text(text())
    return write_model(tmp_path / "dense", llama())


@pytest.mark.slow
def test_the_folder_is_that_of_the_call_with_the_windows_of_the_text(dense: Path, tmp_path: Path) -> None:
    given = ("--params", 0.8, "--text", tmp_path / "text.txt", "--windows", "12x16")
    result = run(dense, *given, "--out", tmp_path / "out", "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["folder"] == str(tmp_path / "out")
    assert len(found["blocks"]) == 2
    ids = transformers.PreTrainedTokenizerFast(tokenizer_file=str(dense / "tokenizer.json"))(text())["input_ids"]
    windows = [ids[start : start + 16] for start in range(0, 12 * 16, 16)]
    pk.prune_folder(dense, windows, params=0.8, out=tmp_path / "called")
    names = {path.name for path in (tmp_path / "called").iterdir()}
    assert "tokenizer.json" in names
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == {
        name: (tmp_path / "called" / name).read_bytes() for name in names
    }
    shown = run(dense, *given, "--out", tmp_path / "third")
    assert "masked against compact" in shown.stdout


def test_what_is_missing_or_too_much_is_said(dense: Path, tmp_path: Path) -> None:
    words, out = ("--text", tmp_path / "text.txt", "--windows", "12x16"), ("--out", tmp_path / "out")
    for arguments, message in (
        ((dense, "--params", 0.8), "expected --params 0.8 --text FILE --out DIR"),
        ((dense, "--params", 0.8, *words, *out, "--windows", "many"), "such as 32x128, got 'many'"),
        ((dense, "--params", 0.8, *words, *out, "--windows", "128"), "such as 32x128"),
        ((dense, "--params", 0.8, *words, *out, "--windows", "2x3x4"), "of windows and of the tokens"),
        ((dense, "--params", 0.8, *words, *out, "--windows", "9000x64"), "text.txt has 3,000 tokens"),
        ((dense, "--params", 80, *words, *out), "in (0, 1), got 80"),
        ((dense, "--params", 0.8, *words, *out, "--max-drop", 0.1), "without max-drop"),
        ((dense, "--params", 0.8, *words, *out, "prune.scope=global"), "without overrides"),
        ((tmp_path, "--params", 0.8, *words, *out), "for a folder with a config.json"),
    ):
        result = run(*arguments)
        assert result.exit_code == 2, result.output
        assert message in result.output
    (dense / "tokenizer.json").unlink()
    result = run(dense, "--params", 0.8, *words, *out)
    assert result.exit_code == 2
    assert "expected its tokenizer.json beside the weights" in result.output
    assert not (tmp_path / "out").exists()
