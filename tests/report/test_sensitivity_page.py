"""The page of a sensitivity analysis, and the same errors in the report of a run whose plan was made from them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from synthetic_run import write_run

from prunekit.errors import ArtifactError
from prunekit.report.pages.run_page import write_report
from prunekit.report.sections.sensitivity_curves import heatmap, most_sensitive


def curve_rows(groups: int, *, measured: bool) -> pd.DataFrame:
    rows = []
    for index in range(groups):
        size = 8 * 2 ** (index % 3)
        for kept in range(size, 0, -1):
            gone = (size - kept) / size
            row = {"group": f"layer{index}.conv1", "module": f"layer{index}.conv1", "kept": kept, "channels": size}
            row |= {"macs_saved": 100 * (size - kept), "error_fast": gone**2 * (index + 1) / groups}
            row |= {"error_total": 16 * row["error_fast"], "error_measured": np.nan, "kl": None}
            if measured and (kept % (size // 8) == 0 or kept == 1):
                row |= {"error_measured": 3 * gone**2 * (groups - index) / groups, "kl": gone}
            rows.append(row | {"loss": None, "top1": None})
    return pd.DataFrame(rows)


def write_analysis(folder: Path, rows: pd.DataFrame) -> Path:
    folder.mkdir(parents=True)
    rows.to_csv(folder / "sensitivity.csv", index=False)
    half = dict.fromkeys(("kept_1_fast", "kept_10_fast", "half_fast", "half_total"), 0.5)
    none = dict.fromkeys(("kept_1_measured", "kept_10_measured", "half_measured"))
    groups = [{"group": name, "channels": 8, "macs": 1000, **half, **none} for name in most_sensitive(rows)]
    facts = {"name": "res<net>", "images": 64, "measured_images": 32, "dense": {"loss": 0.1, "top1": 91.5}}
    facts |= {"agreement": 0.83, "groups": groups, "seconds": 12.5}
    (folder / "sensitivity.json").write_text(json.dumps(facts))
    (folder / "status.json").write_text(json.dumps({"state": "finished", "started": "2026-11-21T20:00:00+00:00"}))
    return folder


def shown(html: str) -> list[str]:
    """Groups that the figures name, in order; text in an SVG stays text."""
    return re.findall(r">(layer\d+\.conv1) \(\d+\)<", html)


@pytest.mark.slow
def test_the_page_shows_both_ways_and_asks_for_nothing(tmp_path: Path) -> None:
    folder = write_analysis(tmp_path / "sensitivity" / "now", curve_rows(28, measured=True))
    html = write_report(folder).read_text()
    assert re.findall(r'(?:src|href)="(?!#)[^"]+"', html) == []
    assert "data:image" not in html  # the page's own policy would not show it
    assert html.count("<svg") == 2  # the table twice, once for phones
    assert "res&lt;net&gt; sensitivity" in html
    assert "res<net>" not in html
    for text in ("fast, from statistics", "measured, as masked", "91.50 %", "0.83", "12.5 s"):
        assert text in html
    assert shown(html)[:28] == [f"layer{index}.conv1" for index in range(28)]  # the table: all, as in the model
    assert shown(html) == 3 * shown(html)[:28]  # on phones above each panel of it


def test_without_measuring_there_is_one_way(tmp_path: Path) -> None:
    folder = write_analysis(tmp_path / "now", curve_rows(5, measured=False))
    html = write_report(folder, state="finished").read_text()
    assert (
        "measured"
        not in html.replace("measured_images", "").split('<section id="environment">')[0].split("<section")[1]
    )
    assert shown(html) == 2 * [f"layer{index}.conv1" for index in range(5)]


@pytest.mark.slow
def test_of_many_groups_the_most_sensitive_are_shown() -> None:
    rows = curve_rows(80, measured=False)
    svg, count, total = heatmap(rows)
    assert (count, total) == (64, 80)
    assert shown(str(svg)) == 2 * [f"layer{index}.conv1" for index in range(16, 80)]


def test_the_table_holds_the_errors_in_percent() -> None:
    rows = curve_rows(1, measured=False)
    numbers = re.findall(r">(\d[\d.]*)</text>", str(heatmap(rows)[0]))
    wanted = [100 * ((8 - kept) / 8) ** 2 for kept in range(7, 0, -1)]
    assert [float(number) for number in numbers] == pytest.approx(2 * wanted, rel=0.05)


@pytest.mark.slow
def test_a_run_whose_plan_was_made_from_curves_shows_where_it_stands(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "resnet34" / "now", groups=3)
    assert 'id="sensitivity"' not in write_report(folder).read_text()
    coupling = pd.read_csv(folder / "coupling.csv")
    coupling.assign(kept=6).to_csv(folder / "coupling.csv", index=False)
    groups = coupling.drop_duplicates("group")
    rows = curve_rows(3, measured=False).replace({f"layer{i}.conv1": name for i, name in enumerate(groups["group"])})
    rows.to_csv(folder / "sensitivity.csv", index=False)
    html = write_report(folder).read_text()
    section = html.split('<section id="sensitivity">')[1].split("</section>")[0]
    assert section.count("<svg") == 2  # the table twice
    assert section.count("<use") == str(heatmap(rows)[0]).count("<use") + 2 * 3  # a mark for each group


def test_a_damaged_table_is_named(tmp_path: Path) -> None:
    folder = write_analysis(tmp_path / "now", curve_rows(2, measured=False))
    (folder / "sensitivity.csv").write_text("group,kept\na,1\n")
    with pytest.raises(ArtifactError, match="error_fast"):
        write_report(folder)
    with pytest.raises(ArtifactError, match="expected the folder of a run"):
        write_report(tmp_path / "nowhere")
