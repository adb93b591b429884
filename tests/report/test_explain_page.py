"""The page of an explanation: bars, causes and operators, all of it escaped, with nothing from elsewhere."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from prunekit.report.sections.explanation import BARS, OTHERS, OUTSIDE, module_times, write_explanation


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
        "pruned_operators_ms": 15.0, "rows": [*rows, row("", None, 3.0)], "causes": [cause], "notes": ["noisy: <very>"],
    }  # fmt: skip


def test_the_page_stands_alone(tmp_path: Path) -> None:
    page = write_explanation(tmp_path / "new", result()).read_text()
    assert page.count("<script") == 1  # the page's own
    for text in ("&lt;script&gt;", "widths &lt;off&gt;", "a &amp; b", "noisy: &lt;very&gt;", "layer&lt;0&gt;"):
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
