"""`prunekit report` on one run, on several, and on what is none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from synthetic_run import write_run

from prunekit.cli import cli


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["report", *arguments])


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs whose reports are there, and stand-ins."""
    root = tmp_path_factory.mktemp("runs")
    for name in ("one", "two"):
        write_run(root / name, only=("history",))
        (root / name / "report.html").write_text("old")
    return root


def test_one_run_gets_its_report_again(runs: Path, tmp_path: Path) -> None:
    result = run(str(runs / "one"), "--output", str(tmp_path / "other.html"))
    assert result.exit_code == 0, result.output
    assert result.stdout == f"Report: {tmp_path / 'other.html'}\n"
    assert "95 % Wilson intervals" in (tmp_path / "other.html").read_text(encoding="utf-8")
    assert (runs / "one" / "report.html").read_text() == "old"
    (runs / "two" / "status.json").write_text(json.dumps({"state": "interrupted"}))  # a part of a run has a page too
    result = run(str(runs / "two"), "--json")
    assert json.loads(result.stdout)["page"] == str(runs / "two" / "report.html")
    assert "interrupted" in (runs / "two" / "report.html").read_text(encoding="utf-8")
    (runs / "two" / "status.json").write_text(json.dumps({"state": "finished"}))


@pytest.mark.slow
def test_several_runs_are_compared(runs: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    result = run(str(runs / "one"), str(runs / "two"))
    assert result.exit_code == 0, result.output
    assert result.stdout.endswith("Comparison: comparison.html\n")
    assert "98.52 % [97.10, 99.25] 98.70 % 33.7 M (44.9 %) 9.41 M (44.2 %)" in " ".join(result.stdout.split())
    assert (tmp_path / "comparison.html").is_file()
    result = run(str(runs / "one"), str(runs / "two"), "--json", "--output", "a/b.html")
    found = json.loads(result.stdout)
    assert found["page"] == "a/b.html"
    assert [row["value"] for row in found["runs"]] == [98.52, 98.52]


def test_wrong_usage_says_what_was_expected(runs: Path, tmp_path: Path) -> None:
    (runs / "one" / "model").mkdir()
    for arguments, expected in (
        ([], "expected the folder of a run, such as runs/resnet34/<time>"),
        ([tmp_path / "nothing"], "with status.json in it, and there is none"),
        ([runs / "one", runs], "but in its folders, such as"),
        ([runs / "one" / "status.json"], "and this is a file"),
        ([runs / "one" / "model"], f"did you mean {runs / 'one'}?"),
        ([runs / "one", runs / "one"], "named twice"),
        ([runs / "one", "--output", tmp_path / "page"], "expected a file whose name ends in .html"),
    ):
        result = run(*map(str, arguments))
        assert result.exit_code == 2
        assert expected in result.stderr
        assert result.stdout == ""


@pytest.mark.slow
@pytest.mark.usefixtures("drawn")
def test_figures_that_are_gone_are_missed_and_the_rest_is_shown(tmp_path: Path) -> None:
    folder, whole = (write_run(tmp_path / name / "now", only=("history",)) for name in ("resnet", "whole"))
    (folder / "report.html").write_text("with figures")
    (folder / "metrics.json").unlink()
    for content, expected in (
        (None, "metrics.json is not there, though the run has finished"),
        ('{"dense": {"top1": 98.', "metrics.json:1:22: expected JSON"),
        ("{}", "metrics.json lacks 'dense', 'pruned'"),
    ):
        if content is not None:
            (folder / "metrics.json").write_text(content)
        result = run(str(folder))
        assert result.exit_code == 1
        assert expected in result.stderr
        assert f"`prunekit finetune {folder / 'recipe.yaml'}` makes the run again" in result.stderr
        page = (folder / "report.html").read_text(encoding="utf-8")
        assert "figures are missing here" in page
        assert "Validation top-1" in page
        assert (folder / "report.old.html").read_text() == "with figures"
        several = run(str(folder), str(whole))
        assert several.exit_code != 0
        assert "metrics.json" in several.stderr


def test_a_run_that_was_killed_says_how_to_go_on(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "resnet" / "now", only=())
    (folder / "metrics.json").unlink()
    (folder / "status.json").write_text(json.dumps({"state": "running"}))
    result = run(str(folder), "--json")
    assert result.exit_code == 1
    assert f"unless it still runs, `prunekit finetune {folder / 'recipe.yaml'}` makes the run" in result.stderr
    (folder / "resume").mkdir()
    (folder / "resume" / "run.json").write_text(json.dumps({"command": "prune"}))
    result = run(str(folder), "--json")
    (missing,) = json.loads(result.stdout)["missing"]
    assert f"`prunekit prune {folder / 'recipe.yaml'} --resume {folder}` goes on with it" in missing


def test_damaged_tables_are_left_out_and_named(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "now", only=("history",))
    (folder / "history.csv").write_text("")
    (folder / "recipe.yaml").write_bytes(b"name: \xff")
    result = run(str(folder))
    assert result.exit_code == 1
    assert "history.csv: expected a CSV table" in result.stderr
    assert "recipe.yaml:1: expected text in UTF-8" in result.stderr
    assert "This run has no training history." in (folder / "report.html").read_text(encoding="utf-8")


@pytest.mark.parametrize("kind", ["sensitivity", "profile"])
def test_an_analysis_without_its_figures_says_so(kind: str, tmp_path: Path) -> None:
    folder = tmp_path / "resnet" / kind / "now"
    folder.mkdir(parents=True)
    (folder / "status.json").write_text(json.dumps({"state": "finished"}))
    (folder / "recipe.yaml").write_text("name: resnet\n")
    result = run(str(folder))
    assert result.exit_code == 1
    assert f"{kind}.json is not there, though the run has finished" in result.stderr
    assert f"`prunekit {kind} {folder / 'recipe.yaml'}` makes the run again" in result.stderr
