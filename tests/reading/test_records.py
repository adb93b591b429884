"""Plain values of a file as dataclasses."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from math import isnan, nan
from typing import Any

import pytest
import torch
from mutants import changed_values, unclean

from prunekit.errors import ArtifactError
from prunekit.reading.text_files import as_record, require_parts


@dataclass(frozen=True)
class Part:
    name: str
    share: float | None = None


@dataclass(frozen=True)
class Whole:
    count: int
    share: float
    parts: tuple[Part, ...]
    by_name: dict[str, Part]


WHOLE = Whole(2, 0.5, (Part("a"), Part("b", 1.0)), {"c": Part("c")})


def test_what_was_written_comes_back() -> None:
    assert as_record(Whole, asdict(WHOLE), "x.json") == WHOLE
    assert as_record(Whole, json.loads(json.dumps(asdict(WHOLE))), "x.json") == WHOLE
    assert as_record(tuple[Part, ...], [{"name": "a"}], "x.json") == (Part("a"),)
    assert isnan(as_record(Part, {"name": "a", "share": nan}, "x.json").share or 0.0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"count": "2"}, r"^x\.json\.count: Input should be a valid integer, got '2'; the file is damaged$"),
        ({"count": True}, r"^x\.json\.count: .*integer"),
        ({"share": None}, r"^x\.json\.share: .*number, got None"),
        ({"parts": [{"share": 1.0}]}, r"^x\.json\.parts\.0\.name: Field required; the file is damaged$"),
        ({"parts": {"a": 1}}, r"^x\.json\.parts: .*array"),
        ({"by_name": {"c": []}}, r"^x\.json\.by_name\.c: "),
        ({"count": torch.ones(2)}, r"^x\.json: expected plain values \(.*Tensor"),
        ({"count": 10**5000}, r"^x\.json: expected plain values"),
    ],
)
def test_another_type_is_refused_with_its_place(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ArtifactError, match=message):
        as_record(Whole, asdict(WHOLE) | change, "x.json")


def test_parts_that_are_missing_are_named() -> None:
    require_parts({"a": 1, "b": 2}, ("a",), "x.json")
    with pytest.raises(ArtifactError, match=r"^x\.json: 'b' is not there"):
        require_parts({"a": 1}, ("a", "b"), "x.json")
    with pytest.raises(ArtifactError, match=r"^x\.json: expected values by name, got list"):
        require_parts([], (), "x.json")


def test_mutants_are_taken_or_refused() -> None:
    mutants = changed_values(json.loads(json.dumps(asdict(WHOLE))), 200, seed=50)
    assert unclean(lambda mutant: as_record(Whole, mutant, "x.json"), mutants) == []
