"""Numbers as people read them."""

from __future__ import annotations

from typing import Any

import pytest

from prunekit.utils import display as numbers


@pytest.mark.parametrize(
    ("form", "value", "expected"),
    [
        ("digits", 0.01234, "0.0123"),
        ("digits", 9.996, "10.0"),
        ("digits", 1240.4, "1240"),
        ("digits", 0, "0"),
        ("digits", None, "–"),
        ("digits", float("nan"), "–"),
        ("digits", True, "–"),
        ("count", 999, "999"),
        ("count", 2.5, "2.50"),
        ("count", 999_600, "1.00 M"),
        ("count", 21_289_802, "21.3 M"),
        ("count", 3_663_761_408, "3.66 G"),
        ("size", 512, "512 B"),
        ("size", 85_230_000, "85.2 MB"),
        ("size", None, "–"),
        ("percent", 98.61, "98.6 %"),
        ("share", 0.552, "55.2 %"),
        ("signed", -0.37, "−0.37"),
        ("signed", 0.2, "+0.20"),
        ("signed", -0.001, "0.00"),
        ("factor", 2.305, "2.31×"),
        ("scientific", 3.14e-15, "3.1e-15"),
        ("scientific", 0.0, "0"),
        ("duration", 50.04, "50.0 s"),
        ("duration", 174.2, "2 min 54 s"),
    ],
)
def test_one_value(form: str, value: Any, expected: str) -> None:
    assert getattr(numbers, form)(value) == expected


@pytest.mark.parametrize(("before", "after", "expected"), [(100, 45, "−55.0 %"), (0, 3, "–"), (None, 3, "–")])
def test_relative_change(before: Any, after: Any, expected: str) -> None:
    assert numbers.change(before, after) == expected


def test_an_interval_needs_both_ends() -> None:
    assert numbers.interval(97.2, 99.123) == "[97.20, 99.12]"
    assert numbers.interval(None, 99) == ""
