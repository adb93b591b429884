"""Profiles of models whose own Python has a say in which widths they can have."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from little_time import time_little
from torch import Tensor, nn
from torchvision.models import VisionTransformer

from prunekit.channels import trace
from prunekit.errors import RunError
from prunekit.planning import BudgetSettings, PruneSettings
from prunekit.planning.settings import TargetSettings
from prunekit.workflow.profiling import profile

WANTED = PruneSettings(BudgetSettings(speedup=1.5), target=TargetSettings(block=1))


def test_networks_have_the_sizes_that_only_a_trial_finds(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    time_little(monkeypatch, attempts=1)
    torch.manual_seed(0)
    model, example = VisionTransformer(32, 8, 2, 2, 32, 64).eval(), (torch.randn(1, 3, 32, 32),)
    nn.init.normal_(model.heads[0].weight, std=0.02)  # zeros, else: every class would be worth the same
    chart = trace(model, example)
    assert not any(size.name == "hidden_dim" for size in chart.sizes)
    lines = list[str]()
    found = profile(model, chart, [example], WANTED.target, WANTED, cache=tmp_path, log=lines.append)
    runtime = WANTED.target.runtime
    assert lines[0] == f"profile: 10 networks of all widths, timed in {runtime} with the dense one beside each"
    assert len(lines) == 11
    assert "hidden_dim" in {size.name for size in found.channel_map.sizes}
    widths = [size.value(sample.keep) for size in found.channel_map.sizes for sample in found.samples]
    assert len(found.samples) == 10
    assert len(set(map(str, widths))) > 5
    assert {fit["module"] for fit in found.fits(model)} >= {"conv_proj", "heads.head"}


class OneAtATime(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 32), nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        if len(x) > 1:
            raise ValueError("one at a time")
        return self.second(self.first(x).relu())  # type: ignore[no-any-return]


def test_a_network_that_does_not_run_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    time_little(monkeypatch, attempts=1)
    model, example, target = OneAtATime().eval(), (torch.randn(1, 8),), replace(WANTED.target, batch=2)
    with pytest.raises(RunError, match=r"dense: does not run in eager: ValueError: one at a time"):
        profile(model, trace(model, example), [example], target, WANTED, cache=tmp_path, log=lambda text: None)
