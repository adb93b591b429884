"""Repair where another batch makes other calls, weights that are used several times, and what values select."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from equivalence import randomized
from torch import Tensor, nn
from torch.nn import functional as F

from prunekit.channels.trace import trace
from prunekit.planning.plan import Plan
from prunekit.repair.repair_model import repair
from prunekit.repair.repair_report import RepairReport
from prunekit.settings.calibration import RepairSettings

IMAGES = torch.randn(48, 3, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
SETTINGS = RepairSettings(ridge=1e-9, rows=10**6, joint_steps=0, held_out=0.25)


def repaired(model: nn.Module, weight: str, settings: RepairSettings = SETTINGS, x: Tensor = IMAGES) -> RepairReport:
    """Without every third input channel of a layer."""
    model = randomized(model.double()).eval()
    chart = trace(model, (x[:2],))
    labels, keep = chart.labels[weight][1], np.ones(chart.n_labels, dtype=bool)
    assert labels is not None
    assert labels[::3].all()
    keep[labels[::3]] = False
    return repair(model, Plan(chart, keep), x, settings)[1]


def errors(report: RepairReport) -> dict[str, float]:
    return {layer.weight: layer.after for layer in report.layers if layer.applied}


class Block(nn.Module):
    """Cuts and flips samples one by one, or all at once, also between a branch and the sum that it ends in."""

    def __init__(self, *, looping: bool) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 9, 3, padding=1), nn.BatchNorm2d(9)
        self.branch, self.last = nn.Conv2d(9, 9, 3, padding=1), nn.Conv2d(9, 4, 3)
        self.looping = looping

    def turned(self, x: Tensor) -> Tensor:
        return torch.stack([each.flip(1) * 2 for each in x]) if self.looping else x.flip(2) * 2

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.stem(self.turned(x))))
        branch = self.branch(x)
        return self.last(F.relu(branch + self.turned(x))).mean((2, 3))  # type: ignore[no-any-return]


def test_looping_over_samples_changes_nothing() -> None:
    looped, whole = (repaired(Block(looping=looping), "last.weight") for looping in (True, False))
    assert looped.kept
    assert looped.before == pytest.approx(whole.before)
    assert looped.after == pytest.approx(whole.after, rel=1e-6)
    assert errors(looped) == pytest.approx(errors(whole), rel=1e-6)


def test_batches_of_any_size_are_looped_over() -> None:
    report = repaired(Block(looping=True), "last.weight", RepairSettings(memory_bytes=2**20, held_out=0.2))
    assert 2 < report.memory.batch < 38
    assert 38 % report.memory.batch
    assert report.after < 0.5 * report.before
    assert len(errors(report)) == 2


class Twice(nn.Module):
    """A tower for an image and its negative: one after the other, as one batch, or image by image."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 9, 3, padding=1), nn.BatchNorm2d(9)
        self.two, self.out = nn.Conv2d(9, 9, 3, padding=1), nn.Conv2d(9, 5, 3)
        self.how = how

    def tower(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.stem(x)))
        return self.out(F.relu(self.two(x) + x)).mean((2, 3))  # type: ignore[no-any-return]

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "each":
            return torch.cat([self.tower(image[None]) for image in x])
        if self.how == "after":
            return self.tower(x) - self.tower(-x)
        return torch.sub(*self.tower(torch.cat([x, -x])).chunk(2))


def test_calls_of_a_weight_are_fitted_as_one() -> None:
    one, other = (repaired(Twice(how), "out.weight") for how in ("after", "together"))
    assert one.kept
    assert one.after < 0.5 * one.before
    assert set(errors(one)) == {"stem.weight", "two.weight", "out.weight"} & set(errors(other))
    assert one.before == pytest.approx(other.before)
    assert one.after == pytest.approx(other.after, rel=0.2)  # held-out rows lie elsewhere


@pytest.mark.slow
def test_a_model_that_takes_its_samples_one_by_one_gets_them_so() -> None:
    report = repaired(Twice("each"), "out.weight")
    assert report.memory.batch == 1
    assert report.kept
    assert report.after < 0.5 * report.before


class Refined(nn.Module):
    """A cell that goes over its own state again and again."""

    def __init__(self) -> None:
        super().__init__()
        self.start, self.cell, self.step, self.out = (nn.Linear(*s) for s in ((8, 12), (24, 18), (18, 12), (12, 3)))

    def forward(self, x: Tensor) -> Tensor:
        start = state = torch.tanh(self.start(x))
        for _ in range(3):
            state = state + self.step(F.relu(self.cell(torch.cat([start, state], 1)))) / 4
        return self.out(state)  # type: ignore[no-any-return]


def test_cells_are_fitted_to_what_the_dense_model_s_state_is() -> None:
    x = torch.randn(512, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    report = repaired(Refined(), "step.weight", x=x)
    assert {"cell.weight", "step.weight"} & set(errors(report))
    assert report.after < 0.5 * report.before


class Proposals(nn.Module):
    """Two stages: of all positions those that score best go through further layers; only these are returned."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.scores = nn.Conv2d(3, 9, 3, padding=1), nn.Conv2d(9, 1, 1)
        self.up, self.down = nn.Linear(9, 12), nn.Linear(12, 4)

    def forward(self, x: Tensor) -> list[Tensor]:
        x = F.relu(self.stem(x))
        scores, rows = self.scores(x).flatten(1), x.flatten(2).mT
        found = []
        for score, row in zip(scores, rows, strict=True):
            likely = row[score > score.mean()]
            found.append(self.down(F.relu(self.up(likely))))
        return found


@pytest.mark.slow
@pytest.mark.parametrize("weight", ["scores.weight", "down.weight"])
def test_behind_a_selection_layers_are_fitted_to_what_the_dense_model_selects(weight: str) -> None:
    report = repaired(Proposals(), weight)
    changed = {layer.weight: layer for layer in report.layers if layer.applied}
    behind = changed["up.weight" if weight == "scores.weight" else "down.weight"]
    assert report.kept
    assert behind.note == "at what values select in the dense model"
    assert behind.after < 0.6 * behind.before
    assert (report.before == 0) is (weight == "down.weight")  # nothing before the selection was pruned


class Fickle(nn.Module):
    """Looks as often as values say, and so otherwise under masks."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.out = nn.Linear(8, 12), nn.Linear(12, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.down(F.relu(self.up(x)))
        looks = range(1, 2 + int(x.abs().mean() * 1000) % 7)
        return torch.stack([self.out(x * each) for each in looks]).sum(0)


class Counted(Fickle):
    """Returns a list for each sample, of which one is as long as values say."""

    def forward(self, x: Tensor) -> list[Tensor]:
        x = self.down(F.relu(self.up(x)))
        looks = 2 + int(x.abs().mean() * 1000) % 7
        return [*x.T, *(each.mean() for each in self.out(x.mean(0).expand(looks, -1)))]


def test_what_has_another_length_under_masks_is_not_compared() -> None:
    x = torch.randn(64, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    report = repaired(Counted(), "down.weight", x=x)
    assert report.kept
    assert 0 < report.after < 0.5 * report.before


def test_another_path_under_masks_is_named() -> None:
    x = torch.randn(64, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    report = repaired(Fickle(), "down.weight", x=x)
    assert report.notes == ("repair: out not refitted: the model takes another path under masks",)
    assert "down.weight" in errors(report)
