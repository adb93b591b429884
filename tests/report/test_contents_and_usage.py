"""The top of the report: a list of its sections, and commands for the model of this run."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
from markupsafe import Markup
from synthetic_run import metrics, write_run

from prunekit.report.pages.run_page import write_report
from prunekit.report.rendering import FEWEST, outlined
from prunekit.report.run_data import read_run
from prunekit.report.sections.model_tables import usage


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_run(tmp_path_factory.mktemp("it's") / "run", only=())
    (folder / "model").mkdir()
    return folder


@pytest.fixture(scope="module")
def html(run: Path) -> str:
    return write_report(run).read_text(encoding="utf-8")


def commands(run: Path) -> list[str]:
    data = usage(read_run(run))
    assert data is not None
    return [step.command for step in data["steps"]]


def test_every_section_is_in_the_contents_and_every_link_leads_to_one(html: str) -> None:
    contents = html[html.index('<nav class="contents"') : html.index("</nav>")]
    links = re.findall(r'<a href="#([^"]*)">([^<]*)</a>', contents)
    assert [anchor for anchor, _ in links] == re.findall(r'<section[^>]* id="([^"]*)"', html)
    assert ("usage", "What to do now") in links
    assert ("recipe", "Recipe") in links
    assert "<details>" in contents


def test_short_pages_have_no_contents() -> None:
    page = Markup('<section id="a"><h2>A</h2></section>') * (FEWEST - 1)
    assert outlined(page).entries == ()
    assert outlined(page).content == page


def test_sections_of_a_user_get_an_id_and_titles_stay_text() -> None:
    own = Markup('<section class="own">\n<h2><abbr title="<x>">A</abbr> &lt;b&gt;</h2></section>')
    found = outlined(own + Markup('<section id="a&amp;b"><h2>B</h2></section>') * (FEWEST - 1))
    assert found.entries[0].title == "A <b>"
    assert found.entries[1].anchor == "a&b"
    assert f'<section id="{found.entries[0].anchor}" class="own">' in found.content


def test_environment_and_recipe_are_folded(html: str) -> None:
    for name in ("environment", "recipe"):
        section = re.search(rf'<section id="{name}">.*?</section>', html, re.DOTALL)
        assert section is not None
        assert section[0].count("<details>") == 1
        assert "<details open" not in section[0]


def test_commands_have_the_paths_of_this_run(run: Path, html: str) -> None:
    load, predict, export, standalone, bench = commands(run)
    model = str(run / "model")
    assert eval(load.split("pk.load")[1]) == model
    assert shlex.split(predict) == ["prunekit", "predict", model, "photo.jpg"]
    assert shlex.split(export) == ["prunekit", "export", model, "--to", "onnx"]
    assert shlex.split(standalone)[-2:] == ["--to", "standalone"]
    assert shlex.split(bench) == ["prunekit", "bench", str(run / "recipe.yaml"), model]
    assert html.count('<pre class="command">') == 6  # and the one that makes the run again
    assert html.index('id="usage"') < html.index('id="result"')


def test_commands_fit_the_run(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", only=())
    assert usage(read_run(run)) is None
    (run / "deployed").mkdir()
    (run / "recipe.yaml").write_text("model: {zoo: own, name: net}\n")
    figures = {**metrics(), "deployment": {"folded_norms": 1}, "task": {"samples": "texts", "scores": []}}
    (run / "metrics.json").write_text(json.dumps({**figures, "task": {"samples": "texts"}}))
    load, predict, *others = commands(run)
    assert load.endswith("deployed', model=dense)")
    assert predict.endswith("deployed inputs.npz --model FILE.py:FACTORY")
    assert len(others) == 2
    assert all(command.endswith("--model FILE.py:FACTORY") for command in others)
