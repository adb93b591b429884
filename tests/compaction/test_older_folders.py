"""Folders that released versions wrote, as they wrote them: they load, or the error says what to do."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from torch import nn

import prunekit as pk

GOLDEN = Path(__file__).parent / "golden"
OUTPUTS = {
    "0.2.0": [0.030710071325302124, 0.32449567317962646, -0.4670906066894531, -0.056602925062179565],
    "0.3.0": [-0.02178061008453369, 0.15548601746559143, -0.1639375388622284, -0.1738722026348114],
}
"""What each version's compact model made of the first sample."""


def build() -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten(), nn.Linear(256, 4)
    return nn.Sequential(*layers).eval()


@pytest.mark.parametrize("version", OUTPUTS)
def test_model_folders_of_older_versions_load(version: str) -> None:
    x = torch.randn(2 if version == "0.3.0" else 8, 3, 4, 4, generator=torch.Generator().manual_seed(1))
    model = pk.load(GOLDEN / version, model=build)
    torch.testing.assert_close(model.eval()(x)[0], torch.tensor(OUTPUTS[version]))


def test_a_plan_of_an_older_version_is_the_plan_that_made_the_model() -> None:
    plan = pk.load_plan(GOLDEN / "0.3.0")
    assert plan.widths() == {"0": (8, 16)}
    small = pk.compact(build(), plan)
    x = torch.randn(2, 3, 4, 4, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(small(x)[0], torch.tensor(OUTPUTS["0.3.0"]))


@pytest.mark.parametrize(("file", "read"), [("prunekit.json", pk.load), ("plan.json", pk.load_plan)])
def test_what_a_newer_version_wrote_is_said_to_be_newer(file: str, read: object, tmp_path: Path) -> None:
    folder = shutil.copytree(GOLDEN / "0.3.0", tmp_path / "newer")
    text = json.loads((folder / file).read_text(encoding="utf-8")) | {"format": 99}
    (folder / file).write_text(json.dumps(text), encoding="utf-8")
    with pytest.raises(pk.PrunekitError, match=r"format 99(.|\n)*newer"):
        pk.load(folder, model=build) if read is pk.load else pk.load_plan(folder)
