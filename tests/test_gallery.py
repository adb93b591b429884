"""The guide's gallery: its pictures are there, small and described, and its commands are commands."""

from __future__ import annotations

import importlib.util
import io
import json
import re
import shlex
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from types import ModuleType
from typing import Any

import click
import numpy as np
import pytest
from PIL import Image

from prunekit.cli import cli
from prunekit.recipe.loading import load
from prunekit.report.figures.detection_boxes import page as page_of

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "prunekit" / "guide" / "gallery" / "index.md"
PICTURES = ROOT / "benchmarks" / "results" / "gallery"
pytestmark = pytest.mark.skipif(not PICTURES.is_dir(), reason="a distribution has no gallery")
HEAD = '{"version": 2, "width": 80, "height": 24, "command": "prunekit finetune mine.yaml"}'


def module(name: str) -> ModuleType:
    """A script of the benchmarks."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "benchmarks" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    found = sys.modules.setdefault(name, importlib.util.module_from_spec(spec))
    spec.loader.exec_module(found)
    return found


@pytest.fixture(scope="module")
def page() -> str:
    return PAGE.read_text(encoding="utf-8")


def test_every_picture_is_there_and_described_and_small(page: str) -> None:
    shown = re.findall(r"!\[([^\]]*)\]\(([^)]+)\)", page)
    assert len(shown) >= 7
    assert all(len(words.split()) > 5 for words, _ in shown)
    files = [(PAGE.parent / path).resolve() for _, path in shown]
    assert all(path.parent == PICTURES and path.stat().st_size < 150_000 for path in files)
    assert sum(path.stat().st_size for path in PICTURES.iterdir()) < 1_000_000
    made = re.findall(r'yield "([\w.]+)"', (ROOT / "benchmarks" / "gallery.py").read_text(encoding="utf-8"))
    assert sorted(made) == sorted(path.name for path in files)
    for path in files:
        if path.suffix == ".svg":
            drawing = ET.parse(path).getroot()
            assert drawing.get("role") == "img"
            assert drawing.get("aria-label")
            assert "<script" not in path.read_text(encoding="utf-8")
        else:
            with Image.open(path) as image:
                assert image.width <= 1200


def test_every_picture_has_its_command_above_it(page: str) -> None:
    parts = re.split(r"^## ", page, flags=re.MULTILINE)[1:]
    assert all("```sh" in part[: part.index("![")] for part in parts)


def parsed(command: click.Command, arguments: list[str], parent: click.Context | None = None) -> dict[str, Any]:
    """The values of a command line, of its last subcommand."""
    context = command.make_context(command.name, list(arguments), parent=parent, resilient_parsing=False)
    if not isinstance(command, click.Group):
        return context.params
    name, found, rest = command.resolve_command(context, arguments)
    assert name is not None
    assert found is not None
    return parsed(found, rest, context)


def test_its_commands_parse_and_what_they_override_is_in_the_recipe(
    page: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    lines = module("gallery").commands(page)
    assert len(lines) > 6
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    for line in lines:
        program, *arguments = shlex.split(line)
        assert program == "prunekit"
        values = parsed(cli, arguments)
        recipe, overrides = values.get("recipe"), values.get("overrides", ())
        if recipe is not None:
            load(Path(recipe), overrides)


def test_a_line_that_ends_with_a_backslash_goes_on() -> None:
    page = "```sh\nprunekit prune a.yaml \\\n  name=b\nprunekit report runs  # all\n```\n```python\nx = 1\n```\n"
    assert module("gallery").commands(page) == ["prunekit prune a.yaml name=b", "prunekit report runs"]


def test_boxes_are_those_of_the_models_in_the_images_with_most(tmp_path: Path) -> None:
    colors = {"labeled": "#ff0000", "dense": "#00ff00", "pruned": "#0000ff"}
    rows = []
    for number, count in enumerate((1, 3, 2)):
        panels = [(name, np.asarray(Image.new("RGB", (96, 96), color))) for name, color in colors.items()]
        file = f"{number:02}.png"
        Image.fromarray(page_of(panels, (f"Test image {number}", "boxes"))).save(tmp_path / file)
        rows.append({"image": number, "picture": file, "boxes": {"labeled": count}})
    (tmp_path / "detections.json").write_text(json.dumps({"images": rows}), encoding="utf-8")
    with Image.open(io.BytesIO(module("gallery").boxes(tmp_path))) as image:
        found = {number: count for count, number in image.convert("RGB").getcolors(1 << 16) or []}
    assert (255, 0, 0) not in found
    assert found[0, 255, 0] == found[0, 0, 255] == 2 * 96 * 96


def test_a_chart_of_a_page_is_a_drawing_of_its_own(tmp_path: Path) -> None:
    cell = '<svg xmlns:xlink="x" viewBox="0 0 200.0 100.0" aria-hidden="true"><g id="{}"/></svg>'
    shared = '<svg width="0" height="0" class="shared" aria-hidden="true"><defs><g id="clip"/></defs></svg>'
    panels = '<div class="panels" role="img" aria-label="panels">'
    html = f'<section id="a"><figure>{panels}{cell.format("one")}{cell.format("two")}{shared}</div></figure></section>'
    path = tmp_path / "page.html"
    path.write_text(html, encoding="utf-8")
    drawing = ET.fromstring(module("gallery").chart(path, "a", 1))
    assert drawing.get("aria-label") == "panels"
    ids = [element.get("id") for element in drawing.iter() if element.get("id")]
    assert ids == ["clip", "one"]
    style = "".join(element.text or "" for element in drawing.iter() if element.tag.endswith("style"))
    assert "prefers-color-scheme:dark" in style


def test_a_recording_ends_with_what_the_terminal_ended_with(tmp_path: Path) -> None:
    pieces = [(1, "one\r\nbar  10 %"), (2, "\rbar  50 %"), (3, "\r          \rtwo\r\n\x1b[A"), (40, "\r\n<end>\r\n")]
    lines = [HEAD, *(f'[{second}.0, "o", {text!r}]' for second, text in pieces)]
    cast = tmp_path / "a.cast"
    cast.write_text("\n".join(lines).replace("'", '"').replace("\\x1b", "\\u001b"), encoding="utf-8")
    text = module("recording").draw(cast, seconds=1.0, hold=5.0)
    drawing = ET.fromstring(text)
    shown = [
        "".join(element.itertext())
        for element in drawing.iter("{http://www.w3.org/2000/svg}text")
        if "off" not in (element.get("class") or "").split()
    ]
    assert shown[:4] == ["$ prunekit finetune mine.yaml", "one", "two", "<end>"]
    assert "animation: none" in text.split("prefers-reduced-motion: reduce")[1]
    assert text.count("@keyframes") == len(set(re.findall(r"@keyframes (\w+)", text))) > 4
    assert "5x, pauses cut at 2 s" in text
    assert "<script" not in text
