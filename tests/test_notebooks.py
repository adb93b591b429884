"""The notebooks of the guide: they run, results show themselves, bars go, and plots are inline."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest

import prunekit

FOLDER = Path(prunekit.__file__).parent / "guide" / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
PACKAGES = ("nbclient", "ipykernel", "matplotlib")
TIMEOUT = 600
"""Seconds that a cell may take: on an idle core whole notebooks take less than 20."""
EXPECTED = {
    "quickstart": {
        "model": r"top-1: 9\d\.\d%",
        "prune": r"<td>MACs<td>[\d.]+ [kM]<td>[\d.]+ k<td>(49|50)\.\d %.*relative difference \d\.\de-1\d at most",
        "small": r"dense 9\d\.\d%, pruned \d\d\.\d%\n.*one more epoch: 9\d\.\d%",
        "plan": r"<th>layer.*<td>block1\.conv1\.0<td>24 -&gt; \d+",
        "widths": r"image/png",
        "bench": r"<table.*<td>dense<td>cpu<td>eager<td>64.*<td>pruned<td>cpu",
        "save": r"\bTrue\b",
    },
    "own_loop": {
        "loop": r"top-1: \d\d\.\d%",
        "pruner": r"<caption>pruning steps so far</caption>.*<td>44<td>\d+<td>\d+<td>(39|40)\.\d %",
        "finish": r"masked and compact model agree",
        "on": r"top-1: \d\d\.\d%",
        "plan": r"criterion taylor.*<td>block1\.conv1\.0",
        "plot": r"image/png",
    },
    "look_inside": {
        "model": r"top-1: dense \d\d\.\d%, pruned \d\d\.\d%",
        "trace": r"<td>stem\.0<td>24.*output of the model",
        "summary": r"<td>block1\.conv1\.0",
        "maps": r"image/png",
        "stats": r"<td>block1\.conv1\.0",
    },
}
"""What the outputs of a cell have, by its id."""
SHOWN = {"text/html", "text/plain", "image/png", "application/vnd.jupyter.widget-view+json"}


def test_the_notebooks_are_whole_and_hold_no_outputs() -> None:
    assert {path.stem for path in NOTEBOOKS} == set(EXPECTED)
    for path in NOTEBOOKS:
        text = path.read_text(encoding="utf-8")
        book = json.loads(text)
        assert text == json.dumps(book, indent=1, ensure_ascii=False) + "\n", f"{path.name}: written another way"
        assert (book["nbformat"], book["nbformat_minor"]) == (4, 5)
        assert set(book["metadata"]) == {"kernelspec", "language_info"}
        assert book["metadata"]["language_info"] == {"name": "python"}
        names = [cell["id"] for cell in book["cells"]]
        assert len(set(names)) == len(names)
        assert all(re.fullmatch(r"[a-z0-9-]{1,64}", name) for name in names)
        for cell in book["cells"]:
            assert cell["metadata"] == {}
            if cell["cell_type"] == "code":
                assert (cell["outputs"], cell["execution_count"]) == ([], None), f"{path.name}: clear the outputs"


def test_links_of_notebooks_lead_somewhere() -> None:
    for path in NOTEBOOKS:
        for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
            if cell["cell_type"] == "markdown":
                for to in re.findall(r"\]\(([^)#]+)\)", "".join(cell["source"])):
                    assert (FOLDER / to).is_file(), f"{path.name}: {to}"


@pytest.fixture
def _jupyter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that is nobody's: no settings of a user, and none that a page or a terminal left in the environment."""
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)}; pip install -e '.[test]'")
    monkeypatch.setenv("JUPYTER_PLATFORM_DIRS", "1")  # without it jupyter_core warns
    for name in ("IPYTHONDIR", "JUPYTER_CONFIG_DIR", "JUPYTER_RUNTIME_DIR"):
        monkeypatch.setenv(name, str(tmp_path / name))
    monkeypatch.delenv("MPLBACKEND", raising=False)  # inline is what a kernel chooses
    monkeypatch.setenv("PYTHONPATH", str(Path(prunekit.__file__).parent.parent))


def executed(book: Any, folder: Path) -> Any:
    """Run a notebook in a kernel of its own; a cell that fails raises with its traceback."""
    from nbclient import NotebookClient

    return NotebookClient(
        book, timeout=TIMEOUT, kernel_name="python3", resources={"metadata": {"path": folder}}
    ).execute()


def texts(cell: Any) -> str:
    """Everything that a cell shows, and which kinds of it."""
    found = []
    for output in cell.outputs:
        if output.output_type == "stream":
            found.append(output.text)
        else:
            assert set(output.data) <= SHOWN, f"{cell.id}: {set(output.data)}"
            found += [f"{kind} {'' if kind == 'image/png' else text}" for kind, text in output.data.items()]
    return "\n".join(found)


@pytest.mark.slow
@pytest.mark.usefixtures("_jupyter")
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_and_shows_its_results(path: Path, tmp_path: Path) -> None:
    import nbformat

    book = nbformat.read(path, as_version=4)
    nbformat.validate(book)
    executed(book, tmp_path)
    cells = {cell.id: cell for cell in book.cells if cell.cell_type == "code"}
    for name, pattern in EXPECTED[path.stem].items():
        assert re.search(pattern, texts(cells[name]), re.DOTALL), f"{name}: {texts(cells[name])}"
    for cell in cells.values():
        shown = "".join(output.text for output in cell.outputs if output.get("name") == "stderr")
        assert "Warning" not in shown, shown
    assert [entry.name for entry in tmp_path.iterdir() if entry.suffix] == []  # nothing is written beside a notebook


BARS = """
from prunekit.utils.progress import reporting, stage, tracked

with reporting(None, "job"):
    stage("one")
    for _ in tracked(iter("abc"), "letters", total=5):
        pass
"""


@pytest.mark.slow
@pytest.mark.usefixtures("_jupyter")
@pytest.mark.parametrize("widgets", [True, False])
def test_bars_are_widgets_or_a_line(widgets: bool, tmp_path: Path) -> None:
    from nbformat import v4

    if widgets and importlib.util.find_spec("ipywidgets") is None:
        pytest.skip("not installed: ipywidgets")
    without = "" if widgets else "import sys\nsys.modules['ipywidgets'] = None\n"
    book = v4.new_notebook(cells=[v4.new_code_cell(without + BARS)])
    shown = texts(executed(book, tmp_path).cells[0])
    if widgets:
        states = book.metadata.widgets["application/vnd.jupyter.widget-state+json"]["state"].values()
        bars = [state["state"] for state in states if state["model_name"] == "FloatProgressModel"]
        assert len(bars) == 2
        assert all(bar["bar_style"] != "danger" for bar in bars)  # which would stay
        said = " ".join(state["state"].get("value", "") for state in states if state["model_name"] == "HTMLModel")
        assert "widget-view" in shown
        assert "job:\u2007one" in said
        assert "letters" in said
    else:
        assert "job: one" in shown
        assert "letters" not in shown  # there is no cursor that goes up
        assert "\x1b" not in shown
        assert "Warning" not in shown
