"""A criterion from outside the package: registered, named by the path of its file, or in an installed package."""

from __future__ import annotations

from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import torch
from torch import nn

import prunekit
from prunekit.errors import UsageError
from prunekit.known_names import CRITERIA
from prunekit.utils.user_code import load_object

CODE = """
import numpy as np
import prunekit


@prunekit.register_criterion("by_number", needs=(), measures="the number of a label")
def by_number(evidence):
    return np.arange(evidence.channel_map.n_labels, dtype=float)


nothing = 3
"""


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "outside.py").write_text(CODE)
    monkeypatch.syspath_prepend(str(tmp_path))
    return str(tmp_path / "outside.py")


def kept(criterion: str) -> list[int]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    pruned = prunekit.prune(net, torch.randn(1, 4), channels=0.5, criterion=criterion)
    assert pruned.plan.provenance["prune"]["criterion"] == criterion
    before, after = (next(iter(model.parameters())) for model in (net, pruned.model))
    return [row for row in range(8) if any(torch.equal(before[row], left) for left in after)]


def test_registered_by_path_and_by_an_entry_point(file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert kept(f"{file}:by_number") == [4, 5, 6, 7]
    assert kept("by_number") == [4, 5, 6, 7]
    point = EntryPoint("packaged", "outside:nothing", "prunekit.criteria")
    monkeypatch.setitem(CRITERIA.__dict__, "installed", {"packaged": point})
    with pytest.raises(UsageError, match=r"criterion packaged: expected a function of .*Evidence .* got int"):
        kept("packaged")
    function = load_object(f"{file}:by_number", UsageError)
    monkeypatch.setattr(EntryPoint, "load", lambda self: function)
    assert kept("packaged") == [4, 5, 6, 7]


def test_a_function_is_registered_before_it_is_named() -> None:
    with pytest.raises(UsageError, match=r"criterion: expected .*; register it under a name first"):
        prunekit.prune(nn.Linear(4, 2), torch.randn(1, 4), macs=0.5, criterion=len)  # type: ignore[arg-type]


def test_a_wrong_name_names_the_nearest(file: str) -> None:
    kept(f"{file}:by_number")
    with pytest.raises(UsageError, match="got 'by_numer'; did you mean 'by_number'"):
        kept("by_numer")
