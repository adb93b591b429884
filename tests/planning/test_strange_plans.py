"""Plans that a stranger may have written: refused when they are loaded, or usable; never an error of another kind."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from mutants import changed_arrays, changed_values, damaged_bytes, unclean
from safetensors.numpy import load_file, save_file
from torch import nn

import prunekit as pk
from prunekit.errors import ArtifactError
from prunekit.utils.files import sha256, with_checksum

Arrays = dict[str, np.ndarray[Any, Any]]


class Residual(nn.Module):
    """A branch that may go, a norm over channels, a size attribute and a budget."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.GroupNorm(1, 8)
        self.inner = nn.Sequential(nn.Conv2d(8, 6, 1), nn.ReLU(), nn.Conv2d(6, 8, 1))
        self.width = 8
        self.head = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.first(x))
        x = (x + self.inner(x)).mean((2, 3))
        found: torch.Tensor = self.head(x.view(-1, self.width))
        return found


@cache
def build() -> nn.Module:
    torch.manual_seed(0)
    return Residual().eval()


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Arrays]:
    folder = tmp_path_factory.mktemp("plan")
    pk.plan(build(), torch.randn(1, 3, 8, 8), macs=0.5).save(folder)
    return json.loads((folder / "plan.json").read_text()), load_file(folder / "plan.safetensors")


def written(folder: Path, text: Any, arrays: Arrays) -> Path:
    """Write a plan whose checksums match."""
    folder.mkdir(exist_ok=True)
    save_file({name: np.ascontiguousarray(array) for name, array in arrays.items()}, folder / "plan.safetensors")
    if isinstance(text, dict):
        text = with_checksum({**text, "sha256": sha256(folder / "plan.safetensors")})
    (folder / "plan.json").write_text(json.dumps(text))
    return folder


def use(folder: Path) -> None:
    plan = pk.load_plan(folder)
    str(plan), repr(plan), plan.widths(), plan.rows(), plan.totals(), plan.digest, plan.zeros
    with pk.masked(build(), plan):
        pass
    pk.compact(build(), plan)


def put(*keys: Any, value: Any) -> Callable[[Any], None]:
    def change(place: Any) -> None:
        for key in keys[:-1]:
            place = place[key]
        place[keys[-1]] = value

    return change


TEXTS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "no entry of stored": (lambda t: t["stored"].pop("first.weight"), "stored: expected the names in shapes"),
    "constant of MACs": (put("macs", 0, 2, value="x"), r"macs\.0\.2: Input should be a valid number, got 'x'"),
    "infinite MACs": (put("macs", 0, 2, value=1e300), r"macs\.0\.2: .* less than or equal"),
    "bytes": (put("stored", "first.weight", 0, value="x"), r"stored\.first\.weight\.0: .* valid integer"),
    "budgets": (put("provenance", "budgets", value=True), "budgets: Input should be a valid dictionary"),
    "figure": (put("provenance", "budgets", "macs", "left", value=None), r"budgets\.macs\.left: .* valid number"),
    "path": (put("activations", 0, 0, value=[1]), r"activations\.0\.0: .* valid string"),
    "shape": (
        put("shapes", "first.weight", 0, value=10**12),
        r"labels/first\.weight/0': expected 1000000000000 labels",
    ),
    "whole axis": (put("shapes", "more", value=[10**12]), "'more' is only in one of them"),
    "no shapes": (lambda t: t.pop("shapes"), "shapes: Field required"),
    "axis": (put("divided", value=[["first.weight", 9]]), "divided: there is no axis 9 of 'first.weight'"),
    "format": (put("format", value="1"), "format 1, expected 1 or 2"),
}
ARRAYS: dict[str, tuple[Callable[[Arrays], Any], str]] = {
    "label out of range": (put("labels/first.weight/0", 0, value=10**6), "expected numbers below .*, got 2 to 1000000"),
    "negative label": (put("labels/first.weight/0", 0, value=-1), "got -1 to"),
    "labels of floats": (
        lambda a: a.update({"labels/first.weight/0": a["labels/first.weight/0"].astype(np.float32)}),
        "expected whole numbers of 1 axes, got float32",
    ),
    "activation out of range": (put("activation/0", 0, value=10**6), "activation/0: expected numbers below"),
    "factor out of range": (lambda a: a["macs/0/0"].fill(99), "macs/0/0: expected numbers below"),
    "keep of two axes": (lambda a: a.update(keep=a["keep"][None]), r"keep: expected bool of one axis, got bool \(1, "),
    "keep of numbers": (lambda a: a.update(keep=a["keep"].astype(np.int64)), "keep: expected bool"),
    "nothing kept": (lambda a: a.update(keep=a["keep"][:0]), "keep: expected bool"),
    "no labels": (lambda a: a.pop("labels/first.weight/0"), "is missing in plan.safetensors, for an axis of size 8"),
    "joint": (lambda a: a.update(joint=np.zeros((1, 7), np.int64)), "joint: expected 3 or 4 columns, got 7"),
}


@pytest.mark.parametrize("name", TEXTS)
def test_a_damaged_entry_is_named(name: str, sound: tuple[dict[str, Any], Arrays], tmp_path: Path) -> None:
    text = json.loads(json.dumps(sound[0]))
    change, message = TEXTS[name]
    change(text)
    with pytest.raises(ArtifactError, match=rf"plan\.json: .*{message}"):
        pk.load_plan(written(tmp_path / "plan", text, sound[1]))


@pytest.mark.parametrize("name", ARRAYS)
def test_a_damaged_array_is_named(name: str, sound: tuple[dict[str, Any], Arrays], tmp_path: Path) -> None:
    arrays = {key: array.copy() for key, array in sound[1].items()}
    change, message = ARRAYS[name]
    change(arrays)
    with pytest.raises(ArtifactError, match=rf"plan\.json: not as prunekit writes it \(.*{message}"):
        pk.load_plan(written(tmp_path / "plan", sound[0], arrays))


def test_what_was_changed_by_hand_is_noticed(sound: tuple[dict[str, Any], Arrays], tmp_path: Path) -> None:
    folder = written(tmp_path / "plan", sound[0], sound[1])
    use(folder)
    text = (folder / "plan.json").read_text()
    (folder / "plan.json").write_text(text.replace('"l2"', '"l1"'))
    assert (folder / "plan.json").read_text() != text
    with pytest.raises(ArtifactError, match="something in it was changed"):
        pk.load_plan(folder)


@pytest.mark.slow
def test_damaged_plans_are_refused_or_usable(sound: tuple[dict[str, Any], Arrays], tmp_path: Path) -> None:
    text, arrays = sound
    folder = written(tmp_path / "plan", text, arrays)
    bits = damaged_bytes((folder / "plan.safetensors").read_bytes(), 50, seed=0)
    assert unclean(lambda one: use(written(folder, one, arrays)), changed_values(text, 200, seed=0)) == []
    assert unclean(lambda one: use(written(folder, text, one)), changed_arrays(arrays, 200, seed=0)) == []

    def read(content: bytes) -> None:
        (folder / "plan.safetensors").write_bytes(content)
        (folder / "plan.json").write_text(
            json.dumps(with_checksum({**text, "sha256": sha256(folder / "plan.safetensors")}))
        )
        use(folder)

    assert unclean(read, bits) == []
