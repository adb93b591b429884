"""The documentation site: it builds without a warning, its links lead somewhere, and what it says is so."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
import torch
from ruamel.yaml import YAML
from torch import nn

import prunekit

ROOT = Path(__file__).parent.parent
GUIDE = ROOT / "prunekit" / "guide"
PACKAGES = ("mkdocs", "material", "mkdocstrings")
pytestmark = pytest.mark.skipif(not (GUIDE / "index.md").is_file(), reason="no guide")


class Anchors(HTMLParser):
    """Links of a page, and the ids that links may name."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.ids: set[str] = set()
        self.feed(page.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.ids |= {str(found[key]) for key in ("id", "name") if found.get(key)}
        self.links += [str(found[key]) for key in ("href", "src") if found.get(key)]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)}; pip install -e '.[docs]'")
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [str(ROOT / ".ci" / "docs"), "build", "--site-dir", str(folder)],
        env={**os.environ, "PYTHON": sys.executable},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.mark.slow
def test_links_and_anchors_lead_somewhere_and_nowhere_else(site: Path) -> None:
    pages = {path: Anchors(path) for path in site.rglob("*.html") if path.name != "404.html"}
    assert len(pages) > 30
    wrong = []
    for page, found in pages.items():
        for link in found.links:
            to = urlsplit(link)
            if to.scheme or to.netloc:
                if to.scheme not in ("https", "mailto") or "fonts.g" in link:
                    wrong.append(f"{page.relative_to(site)}: {link}")
                continue
            target = (page.parent / unquote(to.path)).resolve() if to.path else page
            target = target / "index.html" if target.is_dir() else target
            if not target.is_file() or (to.fragment and target in pages and to.fragment not in pages[target].ids):
                wrong.append(f"{page.relative_to(site)}: {link}")
    assert wrong == []


@pytest.mark.slow
def test_every_public_name_and_command_is_there(site: Path) -> None:
    python = Anchors(site / "reference" / "python" / "index.html").ids
    for module, name in prunekit._places().values():
        assert f"{module}.{name}" in python, name
    text = (site / "reference" / "python" / "index.html").read_text(encoding="utf-8")
    assert "&gt;&gt;&gt;" in text  # examples are code
    assert "blockquote" not in text  # and not quotations
    commands = Anchors(site / "reference" / "commands" / "index.html").ids
    assert {"prunekit-finetune", "prunekit-recipe-show"} <= commands


def test_the_extras_are_those_of_the_package() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    table = re.findall(r"^\| (`.*?) \|", (GUIDE / "install.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert {name for row in table for name in re.findall(r"`([\w-]+)`", row)} == set(extras)


def texts_of_the_package() -> str:
    """Everything that the package may say, with a mark where a value comes in."""
    found: list[str] = []
    for path in (ROOT / "prunekit").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                found.append("".join(str(one.value) if isinstance(one, ast.Constant) else "\0" for one in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return "\n".join(found)


def provoked() -> str:
    """Messages that are put together from parts, as a user gets them."""
    wide, x = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)), torch.randn(2, 8)
    result = prunekit.prune(wide, x, macs=0.5)
    sgd = torch.optim.SGD(wide.parameters(), 0.1)
    calls: list[Callable[[], Any]] = [
        lambda: prunekit.prune(wide, x, macs=0.001),
        lambda: prunekit.prune(wide, x, macs=0.5, criterion="taylor"),
        lambda: prunekit.prune(wide, calibration=x, macs=0.5),
        lambda: prunekit.compact(result.model, result.plan),
    ]
    found = []
    for call in calls:
        with pytest.raises(prunekit.PrunekitError) as caught:
            call()
        found.append(str(caught.value))
    with prunekit.Pruner(wide, sgd, x, macs=0.5, steps=3) as pruner, pytest.raises(prunekit.PrunekitError) as early:
        pruner.finish()
    return "\n".join([*found, str(early.value)])


@pytest.mark.slow
def test_messages_are_those_of_the_package() -> None:
    """Headings of the page on errors, and reasons of locks, are words that the package says."""
    said = texts_of_the_package() + provoked()
    errors = (GUIDE / "troubleshooting.md").read_text(encoding="utf-8")
    locks = (GUIDE / "how_to" / "locked.md").read_text(encoding="utf-8")
    quoted = [
        text for heading in re.findall(r"^### (.*`.*)", errors, re.MULTILINE) for text in heading.split("`")[1::2]
    ]
    reasons = re.search(r"^\| reason .*?(?=^$)", locks, re.MULTILINE | re.DOTALL)
    assert reasons is not None
    first = [row.split(" | ")[0] for row in reasons[0].splitlines()[2:]]
    quoted += [text for cell in first for text in re.findall(r"`([^`]+)`", cell)]
    assert len(quoted) > 30
    parts = [part.strip(" ;:,") for text in quoted for part in re.split(r"\.\.\.|'[^']*'", text)]
    missing = [part for part in parts if part not in said]
    assert missing == []


def test_figures_are_those_of_the_rows() -> None:
    """The table of criterion, scope and repair, beside the files that it names."""
    page = (GUIDE / "choosing.md").read_text(encoding="utf-8")
    methods = ("oneshot", "oneshot-uniform", "l2-repaired", "l2-recalibrated", "l2")
    rows = [re.findall(r"\| (\d\d?\.\d\d)(?= )", line) for line in page.splitlines() if re.match(r"\| `\w+`, `", line)]
    assert len(rows) == len(methods)
    for method, row in zip(methods, rows, strict=True):
        measured = []
        for network in ("resnet56", "resnet20"):
            results = json.loads((ROOT / "benchmarks" / "results" / f"oneshot_{network}.json").read_text())["rows"]
            means = {
                one["reduction"]: one["top1_mean"] for one in results if one["method"] == method and "seeds" in one
            }
            measured += [means[reduction] for reduction in (1.5, 2.0, 3.0)]
        assert [float(figure) for figure in row] == [round(mean, 2) for mean in measured], method


def test_tests_and_files_that_contributors_are_sent_to_are_there() -> None:
    page = (GUIDE / "contributing.md").read_text(encoding="utf-8")
    for name in re.findall(r"`((?:prunekit|tests|benchmarks|\.ci|\.github)/[\w./*]+)`", page):
        assert list(ROOT.glob(name)), name


def test_workflows_and_forms_are_yaml_and_run_what_is_there() -> None:
    files = [*(ROOT / ".github").rglob("*.yml"), ROOT / ".pre-commit-config.yaml"]
    read = {path.name: YAML(typ="safe").load(path) for path in files}
    assert {"tests.yml", "docs.yml", "bug_report.yml", ".pre-commit-config.yaml"} <= set(read)
    for name in ("tests.yml", "docs.yml"):
        steps = [step for job in read[name]["jobs"].values() for step in job["steps"]]
        lines = " ".join(step.get("run", "") for step in steps)
        assert all((ROOT / script).is_file() for script in re.findall(r"\.ci/\w+", lines))
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
        assert set(re.findall(r"\.\[(\w+)\]", lines)) <= set(extras)
    assert os.access(ROOT / ".ci" / "docs", os.X_OK)
