"""The top of the report: a list of its sections, and commands for the model of this run."""

from __future__ import annotations

import html
import itertools
import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from markupsafe import Markup
from PIL import Image
from synthetic_run import metrics, write_run

from prunekit.cli import cli
from prunekit.report.pages.run_page import write_report
from prunekit.report.rendering import FEWEST, outlined
from prunekit.report.run_data import Run, read_run
from prunekit.report.sections.model_tables import FOLDERS, usage


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_run(tmp_path_factory.mktemp("it's") / "run", only=())
    (folder / "model").mkdir()
    return folder


@pytest.fixture(scope="module")
def page(run: Path) -> str:
    return write_report(run).read_text(encoding="utf-8")


def commands(run: Path) -> list[str]:
    data = usage(read_run(run))
    assert data is not None
    return [command for _, command in data["steps"]]


def test_every_section_is_in_the_contents_and_every_link_leads_to_one(page: str) -> None:
    contents = page[page.index('<nav class="contents"') : page.index("</nav>")]
    links = re.findall(r'<a href="#([^"]*)">([^<]*)</a>', contents)
    assert [anchor for anchor, _ in links] == re.findall(r'<section[^>]* id="([^"]*)"', page)
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


def test_environment_and_recipe_are_folded(page: str) -> None:
    for name in ("environment", "recipe"):
        section = re.search(rf'<section id="{name}">.*?</section>', page, re.DOTALL)
        assert section is not None
        assert section[0].count("<details>") == 1
        assert "<details open" not in section[0]


def test_commands_have_the_paths_of_this_run(run: Path, page: str) -> None:
    load, evaluate, export, standalone, bench = commands(run)
    model = str(run / "model")
    assert eval(load.split("pk.load")[1]) == model
    assert shlex.split(evaluate) == ["prunekit", "evaluate", model]
    assert shlex.split(export) == ["prunekit", "export", model, "--to", "onnx", "--output", str(run / "model.onnx")]
    assert shlex.split(standalone)[4:] == ["standalone", "--output", str(run / "standalone")]
    assert shlex.split(bench) == ["prunekit", "bench", str(run / "recipe.yaml"), model]
    assert page.count('<pre class="command">') == 6  # and the one that makes the run again
    assert page.index('id="usage"') < page.index('id="result"')


def test_commands_fit_the_run(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", only=())
    assert usage(read_run(run)) is None
    (run / "deployed").mkdir()
    (run / "recipe.yaml").write_text("model: {zoo: own, name: net}\n")
    figures = {**metrics(), "deployment": {"folded_norms": 1}, "task": {"samples": "texts", "scores": []}}
    (run / "metrics.json").write_text(json.dumps({**figures, "task": {"samples": "texts"}}))
    own = {"--model": "/their files/net.py:Net", "--data": "python:their.texts:splits"}
    head = "".join(f"#   {option} {shlex.quote(reference)}\n" for option, reference in own.items())
    (run / "recipe.yaml").write_text(f"{head}model: {{zoo: own, name: net}}\ndata: {{source: own}}\n")
    load, *others = commands(run)
    assert load.endswith("deployed', model=dense)")
    assert len(others) == 3
    assert all(shlex.split(command)[-4:] == [word for pair in own.items() for word in pair] for command in others)


NET = """\
from torch import nn


class MyNet(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(1152, 2))
"""
IMAGES = {"data": {"source": "imagefolder", "root": "my photos", "image_size": 16, "batch": 8}}
RECIPES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "zoo": ({"model": {"name": "resnet8", "zoo": "cifar"}, "data": {"source": "digits", "image_size": 8}}, []),
    "own": ({"model": {"name": "net.py:MyNet", "zoo": "own"}, **IMAGES}, ["--model", "net.py:MyNet"]),
    "torchvision": (
        {"model": {"name": "squeezenet1_1", "zoo": "torchvision"}, "data": {**IMAGES["data"], "image_size": 64}},
        [],
    ),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a user's class in `net.py`, and images."""
    home = tmp_path_factory.mktemp("their files")
    (home / "net.py").write_text(NET)
    for part in ("train", "test"):
        for kind, gray in (("cat", 60), ("dog", 190)):
            (home / "my photos" / part / kind).mkdir(parents=True)
            for number in range(8):
                place = home / "my photos" / part / kind / f"{number}.png"
                Image.new("RGB", (16, 16), (gray + number, gray, 90)).save(place)
    return home


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "job"), [("zoo", "finetune"), ("own", "finetune"), ("own", "prune"), ("torchvision", "prune")]
)
def test_all_that_is_shown_works_as_it_is_pasted(
    name: str, job: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, options = RECIPES[name]
    monkeypatch.chdir(folder)
    less: dict[str, Any] = {"baseline": {"epochs": 0}, "finetune": {"epochs": 0}, "watch": None, "control": False}
    less |= {"latency": {"batches": [1], "repeats": 5, "explain": False}, "threads": 1}
    (folder / f"{name}.yaml").write_text(json.dumps({"name": f"{name}-{job}", **recipe, **less}))
    made = CliRunner().invoke(cli, [job, f"{name}.yaml", *options])
    assert made.exit_code in (0, 1), made.output
    (run,) = (folder / "runs" / f"{name}-{job}").glob("2*")
    page = (run / "report.html").read_text(encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    shown = [html.unescape(text) for text in re.findall(r'<pre class="command">(.*?)</pre>', page, re.DOTALL)]
    assert "FILE" not in " ".join(shown)
    assert sum(text.startswith("import prunekit as pk\n") for text in shown) == 1
    kinds = {text.split()[1] for text in shown if text.startswith("prunekit ")}
    assert kinds == {"evaluate", "export", "bench", job} | ({"predict"} if "root" in recipe["data"] else set())
    for text in shown:
        if text.startswith("import "):
            found: dict[str, Any] = {}
            exec(text, found)
            assert sum(one.numel() for one in found["model"].parameters()) > 0
            continue
        _, *words = shlex.split(text)
        faster = {"bench": ["--repeats", "5", "--batch", "1"], "export": ["--no-timing"], job: ["--dry-run"]}
        done = CliRunner().invoke(cli, [*words, *faster.get(words[0], [])])
        assert done.exit_code == 0, (text, done.output)
    assert (run / "model.onnx").is_file()
    assert (run / "standalone" / "model.py").is_file()


def test_an_image_is_looked_for_in_so_many_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A recipe may name any place, such as a whole disk."""
    looked: list[int] = []

    def everywhere(root: str) -> Iterator[tuple[str, list[str], list[str]]]:
        for number in itertools.count():
            looked.append(number)
            yield f"{root}/{number}", [], ["notes.txt"]

    monkeypatch.setattr("prunekit.report.sections.model_tables.os.walk", everywhere)
    (tmp_path / "model").mkdir()
    found = usage(Run(tmp_path, recipe="data: {source: imagefolder, root: /}\n"))
    assert found is not None
    assert found["image"] is None
    assert len(looked) == FOLDERS
