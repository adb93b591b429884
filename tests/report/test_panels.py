"""Panels of figures that a page lays out itself, and labels of marks that cover nothing."""

from __future__ import annotations

import re
from itertools import combinations

import pytest

from prunekit.report.figures.canvas import NARROW, WIDTH, canvas, stacked, svg, wide_and_narrow
from prunekit.report.figures.pareto import Point, letter, pareto

CELL = re.compile(r'<svg [^>]*viewBox="([-0-9. ]+)" aria-hidden="true">(.*?)</svg>', re.DOTALL)


def test_each_panel_is_an_element_of_the_same_size() -> None:
    with canvas(2, 2, 5.0, "test", used=3) as (figure, panels):
        for index, axes in enumerate(panels[:3]):
            axes.plot([0, 10 ** (2 * index)], label="line")
            axes.set(title=f"panel {index}", xlabel="x" if index == 2 else "")
        figure.legend(*panels[0].get_legend_handles_labels(), loc="outside upper right")
        html = str(stacked(figure, "<three> panels", 3))
    legend, *cells = CELL.findall(html)
    assert "line" in legend[1]
    assert [re.findall(r">(panel \d)<", body) for _, body in cells] == [["panel 0"], ["panel 1"], ["panel 2"]]
    assert len({tuple(box.split()[2:]) for box, _ in cells}) == 1
    assert html.count('role="img"') == 1
    assert 'aria-label="&lt;three&gt; panels"' in html
    used, made = set(re.findall(r"url\(#([^)]*)\)", html)), re.findall(r'<clipPath id="([^"]*)"', html)
    assert used
    assert used <= set(made)
    assert len(made) == len(set(made))


def test_a_figure_of_one_panel_is_there_for_wide_screens_and_for_phones() -> None:
    widths: list[float] = []

    def draw(width: float) -> str:
        widths.append(width)
        with canvas(1, 1, 2.0, "one", width=width) as (figure, (axes,)):
            axes.plot([0, 1])
            return svg(figure, "one")

    html = str(wide_and_narrow(draw))
    assert widths == [WIDTH, NARROW]
    assert html.startswith('<div class="roomy"><svg')
    names = re.findall(r'<clipPath id="([^"]*)"', html)
    assert len(names) == len(set(names)) == 2


@pytest.mark.parametrize("runs", [2, 10])
def test_labels_of_many_runs_cover_no_other_label(runs: int) -> None:
    names = [letter(index) for index in range(runs)]
    points = [
        Point(name, "pruned", (), (1, 1), 30 + (index % 4) * 1.7, 95 + (index % 3) * 0.3, None, (93.0, 98.0))
        for index, name in enumerate(names)
    ]
    points += [
        Point(f"control {name}", "control", (), (1, 1), 75.0, 96 + index * 0.15, None, (94.0, 99.0))
        for index, name in enumerate(names)
    ]
    points.append(Point(f"dense {'+'.join(names)}", "dense", (), (1, 1), 75.0, 95.5, None, (94.0, 99.0)))
    html = str(pareto([("MACs", "M", points)], "top-1"))
    found = re.findall(r'<text style="([^"]*)" x="([\d.]+)" y="([\d.]+)"[^>]*>([^<]*\b[A-J])</text>', html)
    assert {name for *_, text in found for name in re.findall(r"\b[A-J]\b", text)} == set(names)
    boxes = []
    for style, x, y, text in found:
        right, width = "text-anchor: end" in style, 4.8 * len(text)
        left = float(x) - width if right else float(x)
        boxes.append((left, left + width, float(y) - 8, float(y)))
    for one, other in combinations(boxes, 2):
        beside = one[1] <= other[0] + 1 or other[1] <= one[0] + 1  # widths are estimates
        assert beside or one[3] <= other[2] or other[3] <= one[2]
