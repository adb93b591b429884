"""Colors of pages: text is legible in the light and in the dark (WCAG 2.1: 4.5 for text, 3 for what is drawn)."""

from __future__ import annotations

import re
from importlib.resources import files

import pytest

STYLE = files("prunekit.report").joinpath("templates", "style.html").read_text(encoding="utf-8")
TEXT = (("ink", "paper"), ("soft", "paper"), ("soft", "pale"), ("ink", "warn"), ("teal", "paper"), ("teal", "pale"),
        ("on", "teal"), ("on", "amber"))  # fmt: skip
DRAWN = ("teal", "orange", "gold", "slate", "violet", "rose", "blue", "lime")


def themes() -> dict[str, dict[str, str]]:
    light, dark = (dict(re.findall(r"--(\w+): (#\w+)", block)) for block in re.findall(r":root \{(.*?)\}", STYLE))
    return {"light": light, "dark": light | dark}


def luminance(color: str) -> float:
    digits = color[1:] if len(color) == 7 else "".join(2 * digit for digit in color[1:])
    parts = [int(digits[index : index + 2], 16) / 255 for index in (0, 2, 4)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_the_formula_is_that_of_the_guidelines() -> None:
    assert contrast("#000", "#ffffff") == pytest.approx(21)
    assert contrast("#777777", "#fff") == pytest.approx(4.48, abs=0.01)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_colors_stand_out(theme: str) -> None:
    colors = themes()[theme]
    found = {pair: contrast(colors[pair[0]], colors[pair[1]]) for pair in TEXT}
    assert {pair: round(value, 2) for pair, value in found.items() if value < 4.5} == {}
    drawn = {name: contrast(colors[name], colors["paper"]) for name in DRAWN}
    assert {name: round(value, 2) for name, value in drawn.items() if value < 3} == {}
