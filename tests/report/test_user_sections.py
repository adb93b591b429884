"""Sections that users add to the pages of runs: shown, escaped, said on the terminal, and named where they raise."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from efforts import DRAWN
from markupsafe import Markup
from synthetic_run import write_run

import prunekit as pk
from prunekit.cli import cli
from prunekit.errors import ArtifactError, UsageError
from prunekit.measure.measurement_effort import current_effort, effort_of
from prunekit.report.pages.run_page import lines, write_report
from prunekit.report.run_data import Run, read_run
from prunekit.report.sections.section import SECTIONS, Section, ordered

OWN = '''
from markupsafe import Markup

class Energy:
    """Joules."""

    def read(self, run):
        return run.metrics["seconds"]

    def html(self, data):
        return Markup('<section id="energy"><h2>{}</h2></section>').format(f"<{data} J>")

class Breaks(Energy):
    def html(self, data):
        return data["joules"]

energy = 3
'''


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A run beside a file of sections; what is registered is forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(OWN)
    before = dict(SECTIONS._items)
    yield write_run(tmp_path / "runs" / "own", groups=2)
    for name in set(SECTIONS._items) - set(before) - set(SECTIONS.declared):
        del SECTIONS._items[name]


def sections_of(page: Path) -> list[str]:
    return re.findall(r'<section id="([a-z]+)">', page.read_text(encoding="utf-8"))


def test_every_section_of_prunekit_says_what_it_shows_and_has_a_place_of_its_own() -> None:
    facts = [declared.facts for declared in SECTIONS.declared.values()]
    assert len({one["order"] for one in facts}) == len(facts) >= 16
    assert all(one["about"] for one in facts)
    assert [one.name for one in ordered()][:3] == ["usage", "result", "latency"]


def test_a_registered_one_is_on_the_page_and_the_terminal(run: Path) -> None:
    @pk.register_section("names", about="what the run is called", order=15)
    class Names:
        def read(self, run: Run) -> str | None:
            return run.folder.name

        def html(self, data: str) -> str:
            return f"<b>{data}</b>"

        def text(self, data: str) -> list[str]:
            return [f"Called: {data}"]

    page = write_report(run).read_text(encoding="utf-8")
    shown = page.index("&lt;b&gt;own&lt;/b&gt;")  # text is escaped, Markup is not
    assert page.index('id="result"') < shown < page.index('id="latency"')
    assert "<b>own</b>" not in page
    said = lines(read_run(run).metrics | {"speedup": []}, run)
    assert said == ["Budget MACs 45.0 % left, at most 45.0 % asked for", "Called: own", *said[2:]]


@pytest.mark.slow
def test_one_without_data_is_not_there(run: Path) -> None:
    before = sections_of(write_report(run))

    @pk.register_section("none", about="nothing")
    class Nothing:
        def read(self, run: Run) -> None:
            return None

        def html(self, data: Any) -> str:
            return Markup('<section id="none"></section>')

    assert sections_of(write_report(run)) == before


@pytest.mark.slow
def test_report_takes_one_from_a_file(run: Path) -> None:
    whole = sections_of(write_report(run))
    found = CliRunner().invoke(cli, ["report", str(run), "--section", "mine.py:Energy"])
    assert found.exit_code == 0, found.output
    page = run / "report.html"
    assert sections_of(page) == [*whole[:-2], "energy", *whole[-2:]]  # before environment and recipe
    assert "<h2>&lt;174.2 J&gt;</h2>" in page.read_text(encoding="utf-8")
    assert sections_of(write_report(run)) == whole  # it was asked for once


@pytest.mark.slow
def test_one_that_raises_is_named_and_loses_nothing_else(run: Path) -> None:
    whole = sections_of(write_report(run))
    found = CliRunner().invoke(cli, ["report", str(run), "--section", "mine.py:Breaks"])
    said = "Section 'mine.py:Breaks' raised TypeError: 'float' object is not subscriptable; it is missing here"
    assert found.exit_code == 1
    assert said in found.output
    assert sections_of(run / "report.html") == whole
    assert said.replace("'", "&#39;") in (run / "report.html").read_text(encoding="utf-8")


def test_a_damaged_file_of_a_section_of_prunekit_is_an_error(run: Path) -> None:
    (run / "detections").mkdir()
    (run / "detections" / "detections.json").write_text("[]")
    with pytest.raises(ArtifactError, match="expected an object with images and models"):
        write_report(run)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("mine.py:energy", r"mine\.py:energy: expected a class with the methods read\(run\) and html\(data\), got int"),
        ("latncy", "report section: expected the name of a report section.* did you mean 'latency'"),
    ],
)
def test_what_is_no_section_is_refused(run: Path, name: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        write_report(run, sections=[name])


def test_bad_options_are_refused(run: Path) -> None:
    found = CliRunner().invoke(cli, ["report", str(run), "--section", "mine.py:Enrgy"])
    assert found.exit_code == 2
    assert "--section: mine.py: there is no function or class 'Enrgy' here; did you mean 'Energy'" in found.output


def test_lines_of_the_terminal_are_read_without_figures() -> None:
    """Drawing takes longer than all else, and nobody would see it."""
    drawn: list[bool] = []

    def read(run: Run) -> dict[str, Any]:
        drawn.append(current_effort().figures)
        return {"said": ["1.5 J"]}

    with effort_of(DRAWN):
        assert Section("energy", read, lines={"said": "Energy:"}).text(Run(Path())) == ["Energy: 1.5 J"]
    assert drawn == [False]
