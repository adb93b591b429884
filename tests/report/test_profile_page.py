"""The page of a latency profile: its fits, its predictions and its table, escaped, with nothing from elsewhere."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from prunekit.errors import ArtifactError
from prunekit.report.pages.profile_page import MAX_PANELS, fitted, layers, predictions, together
from prunekit.report.pages.run_page import write_report

KEPT = ((64, 32), (40, 32), (64, 8), (17, 16))


def layer(module: str, ms: float = 1e-4, widths: int = 2, constant: float = 0.01) -> dict[str, Any]:
    """A fit that holds exactly: ms * up(first, 8) * second."""
    names = [{"name": name, "channels": KEPT[0][i]} for i, name in enumerate(("output channels", "input channels"))]
    terms = [{"ms": ms, "widths": list(range(widths)), "steps": [8, 1][:widths]}]
    found = {"module": module, "constant_ms": constant, "widths": names[:widths], "terms": terms}
    kept = np.array(KEPT, dtype=float)[:, :widths]
    measured = [
        {"kept": [int(one) for one in row], "ms": float(value)}
        for row, value in zip(kept, fitted(found, kept), strict=True)
    ]
    return found | {"measured": measured}


def write_profile_folder(folder: Path, fits: list[dict[str, Any]]) -> Path:
    folder.mkdir(parents=True)
    setting = {"runtime": "eager", "device": "cpu", "batch": 2, "threads": 1, "dtype": "float32"}
    rows = [
        {"predicted_ms": ms * (1 + error), "measured_ms": ms, "macs_left": ms / 4, "held_out": held, "error": error}
        for ms, error, held in ((4.0, 0.01, False), (2.0, -0.02, False), (1.0, 0.04, True))
    ]
    table = {"dense_ms": 0.5, "share": 0.5, "constant_ms": 0.0125, "steps": "1 8", "changes_at": "432", "error": None}
    facts = {"name": "res<net>", "setting": setting | {"memory_format": "contiguous"}, "networks": 3, "seconds": 12.5}
    facts |= {"dense_ms": 4.0, "error": 0.04, "checks": [rows[2]], "notes": ["noisy: <very>"]}
    facts |= {"layers": [table | {"module": one["module"]} for one in fits]}
    pd.DataFrame(rows).to_csv(folder / "networks.csv", index=False)
    (folder / "profile.json").write_text(json.dumps(facts))
    (folder / "fits.json").write_text(json.dumps({"layers": fits}))
    (folder / "status.json").write_text(json.dumps({"state": "finished", "started": "2026-11-22T07:00:00+00:00"}))
    return folder


def test_the_page_shows_all_three_and_asks_for_nothing(tmp_path: Path) -> None:
    folder = write_profile_folder(tmp_path / "now", [layer("conv<1>"), layer("", 2e-4), layer("fc", 1e-5, widths=0)])
    html = write_report(folder).read_text()
    assert re.findall(r'(?:src|href)="(?!#)[^"]+"', html) == []
    assert html.count("<script") == 1  # the page's own
    assert "data:image" not in html  # the page's own policy would not show it
    assert html.count('role="img"') == 2
    for text in ("res&lt;net&gt; latency profile", "noisy: &lt;very&gt;", "conv&lt;1&gt;", "(root)", "12.5 s"):
        assert text in html
    assert "conv<1>" not in html
    headline = html.split('class="tiles"')[1].split("</div>")[0]
    assert "Median error" in headline
    assert "4.0 %" in headline
    for text in (
        "held out",
        "fitted to",
        "dense",
        "other widths at 25 %",
        "1 of 3 networks",
        "eager, cpu, batch 2",
        ">432<",
    ):
        assert text in html


def test_a_fit_counts_widths_in_its_steps_and_adds_its_constant() -> None:
    one = {
        "constant_ms": 0.5,
        "terms": [{"ms": 2.0, "widths": [0, 1], "steps": [8, 1]}, {"ms": 1.0, "widths": [1], "steps": [4]}],
    }
    kept = np.array([[8.0, 3.0], [9.0, 3.0], [16.0, 5.0]])
    assert fitted(one, kept).tolist() == [0.5 + 48 + 4, 0.5 + 96 + 4, 0.5 + 160 + 8]


def test_a_fit_holds_within_its_spans() -> None:
    slow = {"ms": 2.0, "widths": [1], "steps": [1], "spans": [[0, 0.0, 9.0]]}
    fast = {"ms": 1.0, "widths": [1], "steps": [1], "spans": [[0, 9.0, None], [1, 4.0, None]]}
    one = {"constant_ms": 0.5, "terms": [slow, fast]}
    kept = np.array([[8.0, 3.0], [9.0, 3.0], [16.0, 5.0]])
    assert fitted(one, kept).tolist() == [0.5 + 6, 0.5, 0.5 + 5]


@pytest.mark.slow
def test_layers_that_share_a_fit_share_a_panel_and_the_costliest_come_first() -> None:
    fits = [layer("alone", 1.5e-4), layer("a"), layer("b"), layer("no width", 1.0, widths=0)]
    assert [[one["module"] for one in group.layers] for group in together(fits)] == [["a", "b"], ["alone"]]
    first = together(fits)[0]
    kept, ms = first.points
    assert np.allclose(first.at(kept), ms)
    assert first.main == 1  # 32 to 1 saves more than 64 to 1, which counts as 8
    assert np.allclose(first.others(kept), [1, 40 / 64, 1, 17 / 64] * 2)
    svg, shown, total = layers([layer(f"layer{index}", 1e-4 * (index + 1)) for index in range(MAX_PANELS + 3)])
    assert (shown, total) == (MAX_PANELS, MAX_PANELS + 3)
    assert re.findall(r">(layer\d+): ", str(svg)) == [f"layer{index}" for index in range(MAX_PANELS + 2, 2, -1)]
    assert "a and 1 alike" in str(layers(fits)[0])


def test_every_network_is_a_mark_of_its_kind() -> None:
    rows = [{"predicted_ms": 2.0, "measured_ms": 2.0, "macs_left": 1.0, "error": 0.0, "held_out": False}] * 4
    rows += [rows[0] | {"held_out": True}] * 2
    marks = re.findall(r'<g id="PathCollection_\d+">(.*?)\n   </g>', str(predictions(rows)), re.DOTALL)
    assert [mark.count("<use ") for mark in marks] == [1] * 3 + [3, 2, 1] * 2  # the legend is first


def test_a_run_that_came_to_nothing_says_so_and_a_damaged_one_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "profile" / "now"
    folder.mkdir(parents=True)
    (folder / "status.json").write_text(json.dumps({"state": "failed", "error": "RunError: <it>"}))
    html = write_report(folder).read_text()
    for text in ("no predictions", "no layers whose width", "RunError: &lt;it&gt;"):
        assert text in html
    (folder / "networks.csv").write_text("error\n0.1\n")
    with pytest.raises(ArtifactError, match="predicted_ms"):
        write_report(folder)
