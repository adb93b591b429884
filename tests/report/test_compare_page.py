"""Several runs on a page: what is comparable and what is not, the Pareto front, links, text that is never markup."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
from synthetic_run import metrics, write_run

from prunekit.errors import ArtifactError, UsageError
from prunekit.report.figures.pareto import (
    Point,
    by_latency,
    by_macs,
    compared_runs,
    front,
    joined,
    letter,
    pareto,
    settings,
)
from prunekit.report.pages.compare_page import differences, write_comparison
from prunekit.report.run_data import read_run

RECIPE = "name: small\ndata: {{source: digits, split_seed: {seed}}}\nprune: {{budget: {{macs: {macs}}}}}\n"
Make = Callable[..., Path]


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Make:
    """A run of other figures; its report is a stand-in, so that it need not be drawn."""

    def build(
        name: str, *, macs: float = 0.45, top1: float = 98.52, seed: int = 0, cpu: str = "this", **facts: Any
    ) -> Path:
        folder = write_run(tmp_path_factory.mktemp("runs") / name, groups=2)
        found = metrics()
        found["pruned"] |= {"macs": int(macs * found["dense"]["macs"])}
        found["accuracy"]["pruned"] |= {"top1": top1, "low": top1 - 1, "high": top1 + 0.5}
        for row in found["latency"]:
            row["median_ms"] *= macs / 0.45 if row["model"] == "pruned" else 1 + macs / 100
        (folder / "metrics.json").write_text(json.dumps(found | facts))
        (folder / "recipe.yaml").write_text(RECIPE.format(seed=seed, macs=macs))
        (folder / "environment.json").write_text(json.dumps({"cpu": cpu, "torch": "2.15.0"}))
        (folder / "report.html").write_text("as it was")
        return folder

    return build


@pytest.fixture(scope="module")
def three(make: Make) -> list[Path]:
    return [make("a"), make("b & <i>", macs=0.6, top1=98.0), make("c", macs=0.8, top1=99.1)]


def test_the_page_holds_all_runs_and_asks_for_nothing(three: list[Path], tmp_path: Path) -> None:
    page = tmp_path / "new" / "page.html"
    result = write_comparison(three, page)
    html = page.read_text(encoding="utf-8")
    assert [run["letter"] for run in result["runs"]] == ["A", "B", "C"]
    assert result["notes"] == []
    assert len(result["latency"]) == 6
    assert result["recipes"].rows == (("prune.budget.macs", ("0.45", "0.6", "0.8")),)
    links = re.findall(r'href="([^"#][^"]*)"', html)
    assert [(page.parent / unquote(link)).read_text() for link in links] == ["as it was"] * 3
    assert not re.search(r"@import|url\((?!['\"]?#)|src=|<i>", html)
    assert "b &amp; &lt;i&gt;" in html
    for expected in ("98.52 %", "[97.52, 99.02]", "33.7 M", "45.0 %", "1.74×", "[1.69, 1.80]", "−0.37"):
        assert expected in html, expected
    assert html.count("dense A+B+C") == 3  # once in a panel
    assert html.count('role="img"') == 1


@pytest.mark.slow
def test_a_report_that_is_missing_is_written(make: Make, three: list[Path], tmp_path: Path) -> None:
    bare = make("bare", macs=0.5)
    (bare / "report.html").unlink()
    write_comparison([three[0], bare], tmp_path / "page.html")
    assert "45.0 % asked for" in (bare / "report.html").read_text(encoding="utf-8")


def test_models_that_runs_share_are_there_once(three: list[Path]) -> None:
    found = compared_runs([read_run(folder) for folder in three])
    assert [point.label for point in by_macs(found)] == ["dense A+B+C", "control A+B+C", "A", "B", "C"]
    setting = settings(found)[0]
    assert setting == "eager, cpu, batch 1, 1 thread, float32"
    dense = next(point for point in by_latency(found, setting) if point.kind == "dense")
    assert dense.cost == pytest.approx(9.1 * 1.006)  # the middle one of three
    assert [point.label for point in front(by_macs(found))] == ["A", "C"]


def test_other_test_sets_and_machines_are_told_apart(make: Make, three: list[Path], tmp_path: Path) -> None:
    folders = [three[0], make("d", seed=3, macs=0.3), make("e", cpu="another", macs=0.3)]
    found = compared_runs([read_run(folder) for folder in folders])
    assert len({point.group for point in by_macs(found)}) == 2
    assert len({point.group for point in by_latency(found, settings(found)[0])}) == 3
    notes = write_comparison(folders, tmp_path / "page.html")["notes"]
    assert notes == [
        "The test sets differ (data.split_seed): A, C | B. Scores are comparable within each alone.",
        "The machines differ (cpu): A | B | C. Latencies are comparable within each alone.",
    ]
    html = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "On the Pareto front, multiply-accumulates: C, control A+C; B, control B." in " ".join(html.split())


def test_shortfalls_and_own_samples_are_said(make: Make, tmp_path: Path) -> None:
    one, other = make("short", shortfalls=["kept <52> %"]), make("other")
    for folder in (one, other):
        (folder / "recipe.yaml").write_text("data: {source: own}\n")
    notes = write_comparison([one, other], tmp_path / "page.html")["notes"]
    assert notes[0].startswith("Samples are your own (--data)")
    assert notes[1:] == ["A fell short: kept <52> %"]
    assert "kept &lt;52&gt; %" in (tmp_path / "page.html").read_text(encoding="utf-8")


def test_runs_without_measurements_of_time_have_a_page(make: Make, tmp_path: Path) -> None:
    bare = {"latency": [], "speedup": [], "accuracy": {}, "parity": {}}
    result = write_comparison([make("f", **bare), make("g", **bare)], tmp_path / "page.html")
    html = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert result["latency"] == []
    assert "Nothing was timed." in html
    assert "not verified" in html


def test_figures_of_other_types_are_named_with_their_runs(make: Make, three: list[Path], tmp_path: Path) -> None:
    odd = make("odd")
    found = json.loads((odd / "metrics.json").read_text())
    (odd / "metrics.json").write_text(json.dumps({**found, "accuracy": {"pruned": 3}}))
    with pytest.raises(ArtifactError, match=r"odd.*: figures that are not as prunekit writes them .*of each run what"):
        write_comparison([odd, three[1]], tmp_path / "page.html")


@pytest.mark.parametrize("state", ["running", "failed"])
def test_a_run_that_has_not_finished_is_refused(make: Make, three: list[Path], tmp_path: Path, state: str) -> None:
    part, analysis = make("part"), make("analysis")
    (part / "status.json").write_text(json.dumps({"state": state}))
    (analysis / "sensitivity.json").write_text(json.dumps({"groups": []}))
    with pytest.raises(UsageError, match=rf"finished, and this one is {state}; leave it out\n.*not an analysis$"):
        write_comparison([three[0], part, analysis], tmp_path / "page.html")
    with pytest.raises(ArtifactError, match="expected the folder of a run"):
        write_comparison([three[0], tmp_path / "nothing"], tmp_path / "page.html")
    assert not (tmp_path / "page.html").exists()


@pytest.mark.parametrize(
    ("points", "expected"),
    [
        ([("a", 1, 90), ("b", 2, 91), ("c", 3, 90)], "ab"),
        ([("b", 2, 91), ("a", 1, 91)], "a"),
        ([("a", 1, 90), ("b", 1, 92)], "b"),
        ([], ""),
    ],
)
def test_the_front_is_what_nothing_beats(points: list[tuple[str, float, float]], expected: str) -> None:
    found = front([Point(label, "pruned", (), (1, 1), cost, score) for label, cost, score in points])
    assert "".join(point.label for point in found) == expected


def test_marks_at_the_same_place_share_a_label_and_others_do_not_cover_each_other() -> None:
    points = [("dense A", "dense", 75.0, 98.9), ("control A", "control", 75.0, 98.8), ("A", "pruned", 30.0, 98.7)]
    points += [("B", "pruned", 36.0, 98.6)]
    drawn = [Point(name, kind, (), (1, 1), cost, score, None, (90.0, 99.5)) for name, kind, cost, score in points]
    markup = str(pareto([("MACs", "M", drawn)], "top-1"))
    found = re.findall(r'x="([\d.]+)" y="[\d.]+"[^>]*>([^<>]*\b[AB])</text>', markup)
    assert [label for _, label in found] == ["dense A, control A", "A", "B"]
    assert abs(float(found[1][0]) - float(found[2][0])) > 9


def test_what_is_unstable_is_on_no_front() -> None:
    unstable = Point("a", "pruned", (), (1, 1), 1, 99, stable=False)
    other = Point("b", "pruned", (), (1, 1), 2, 90)
    assert front([unstable, other]) == [other]


def test_letters_go_on_after_z() -> None:
    assert [letter(index) for index in (0, 25, 26, 27, 52, 701, 702)] == ["A", "Z", "AA", "AB", "BA", "ZZ", "AAA"]


def test_recipes_of_another_version_and_sections_left_out() -> None:
    one = {"seed": 0, "output": "x", "repair": None, "finetune": {"epochs": 4, "nesterov": True}}
    other = {"seed": 1, "output": "y", "repair": {"fit": "channel"}, "finetune": {"epochs": 4}}
    found = differences([one, other])
    assert found.rows == (("seed", ("0", "1")), ("repair.fit", ("–", "channel")))
    assert found.missing == ("finetune.nesterov",)
    assert differences([one, one]).rows == ()


def test_many_runs_in_a_row_are_named_by_the_first_and_the_last() -> None:
    assert joined(["A", "B", "C"]) == "A+B+C"
    assert joined([letter(index) for index in range(24, 30)]) == "Y–AD"
    assert joined(["A", "C", "D", "E", "F", "H"]) == "A+C–F+H"
