"""The page of an explanation: bars, causes and operators, all of it escaped, with nothing from elsewhere."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from prunekit.report.rendering import rendered
from prunekit.report.run_data import read_run
from prunekit.report.sections.explanation import (
    BARS,
    OTHERS,
    OUTSIDE,
    explained,
    explanation,
    module_times,
    of_report,
    verdict,
    write_explanation,
)


def row(module: str, dense: float | None, pruned: float | None) -> dict[str, Any]:
    sides = [
        None if ms is None else {"ms": ms, "calls": 1, "macs": 1e6, "bytes": 10, "intensity": 4.0}
        for ms in (dense, pruned)
    ]
    return {"module": module, "operator": "convolution", "dense": sides[0], "pruned": sides[1]} | {
        "speedup": dense / pruned if dense and pruned else None, "ideal": 2.0, "share": 0.1, "excess_ms": 0.0
    }  # fmt: skip


def result(modules: int = 3) -> dict[str, Any]:
    rows = [row(f"layer<{index}>", 2.0 + index, 1.0) for index in range(modules)]
    cause = {"name": "widths <off>", "ms": 1.25, "evidence": "a & b", "fix": "prune.round_to=8", "modules": []}
    return {
        "pruned": "<script>alert(1)</script>", "dense": "its dense model", "device": "cpu", "batch": 1, "threads": 2,
        "dense_ms": 20.0, "pruned_ms": 16.0, "speedup": {"median": 1.25, "low": 1.2, "high": 1.3}, "macs_ratio": 2.0,
        "shortfall_ms": 6.0, "dense_outside_ms": 2.0, "pruned_outside_ms": 1.0, "dense_operators_ms": 18.0,
        "pruned_operators_ms": 15.0, "rows": [*rows, row("", None, 3.0)], "causes": [cause], "notes": ["odd: <very>"],
    }  # fmt: skip


def test_the_page_stands_alone(tmp_path: Path) -> None:
    page = write_explanation(tmp_path / "new", result()).read_text()
    assert page.count("<script") == 1  # the page's own
    for text in ("&lt;script&gt;", "widths &lt;off&gt;", "a &amp; b", "odd: &lt;very&gt;", "layer&lt;0&gt;"):
        assert text in page
    assert not re.findall(r'(?:src|href)="(?!#)', page)
    assert "default-src 'none'" in page
    for text in ("1.25×", "2.00×", "62 % of it was reached", "6.00 ms are missing", "2 CPU threads", "(root)"):
        assert text in page
    assert page.count("<svg") == 2  # one for phones


def test_nothing_found_and_nothing_missing(tmp_path: Path) -> None:
    found = {**result(), "causes": [], "notes": [], "shortfall_ms": -1.0}
    page = write_explanation(tmp_path, found).read_text()
    assert "None was found" in page
    assert 'shortfalls">' not in page
    faster = {**result(), "shortfall_ms": -1.0}
    assert "Nothing is missing from the ideal" in write_explanation(tmp_path, faster).read_text()


def test_a_page_of_a_run_has_the_speedup_of_its_latencies_alone() -> None:
    row = {"device": "cpu", "batch": 1, "threads": 2, "runtime": "eager", "dtype": "float32", "stable": True}
    rows = [
        {**row, "batch": 8, "median": 9.0, "low": 8.0, "high": 9.9},
        {**row, "median": 1.6, "low": 1.55, "high": 1.7},
    ]
    found = of_report(result(), rows)
    assert verdict(found) == "1.60× [1.55, 1.70] the dense model's speed, 80 % of the ideal 2.00×, the ratio of MACs"
    assert found["shortfall_ms"] == pytest.approx(16.0 * (1 - 1.6 / 2.0))
    shown = [f"{tile.value} {tile.detail}" for tile in explained(found)["tiles"]]
    assert [text.split()[0] for text in shown[:2]] == ["1.60×", "2.00×"]
    assert not re.search(r"1\.25|20\.0 ms", " ".join(shown))  # what those rounds say of the whole
    more = of_report(result(), [{**rows[1], "median": 2.57}])
    assert verdict(more).endswith("the dense model's speed, no less than the ideal 2.00×, the ratio of MACs")
    assert not any("%" in tile.detail for tile in explained(more)["tiles"][1:2])
    assert of_report(result(), rows[:1])["speedup"]["median"] == 1.25  # of another batch


@pytest.mark.parametrize(
    ("row", "own"),
    [({"stable": False, "doubts": ["crowded <; to settle it: an idle machine"]}, {}), ({}, {"doubts": ["crowded <"]})],
)
def test_nothing_is_concluded_from_unstable_times(row: dict[str, Any], own: dict[str, Any], tmp_path: Path) -> None:
    place = {"device": "cpu", "batch": 1, "threads": 2, "runtime": "eager", "dtype": "float32", "stable": True}
    rows = [{**place, "median": 1.6, "low": 1.2, "high": 2.7, **row}]
    (tmp_path / "metrics.json").write_text(json.dumps({"explanation": {**result(), **own}, "speedup": rows}))
    run = read_run(tmp_path)
    page = rendered("sections/explanation.html", **(explanation(run) or {}))
    assert "unstable, so that nothing is said about what is faster, or why: crowded &lt;" in page
    for conclusion in ("×", "reached", "Causes", "missing", "<table"):
        assert conclusion not in page


def test_bars_show_the_slowest_modules_and_the_rest_together() -> None:
    times = module_times(result(BARS + 5))
    assert len(times) == BARS + 2
    assert next(iter(times)) == f"layer<{BARS + 4}>"
    assert times[OUTSIDE] == (2.0, 1.0)
    assert times[f"{OTHERS} (6)"] == (pytest.approx(sum(2.0 + index for index in range(5)) + 0), 8.0) or (
        times[f"{OTHERS} (6)"][0] == pytest.approx(sum(2.0 + index for index in range(6)))
    )
    whole = [sum(pair[side] for pair in times.values()) for side in (0, 1)]
    assert whole == [pytest.approx(2.0 + sum(2.0 + index for index in range(BARS + 5))), pytest.approx(BARS + 5 + 4)]
    assert OUTSIDE not in module_times({**result(), "dense_outside_ms": 0.0, "pruned_outside_ms": 0.0})
