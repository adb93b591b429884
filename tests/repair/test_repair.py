"""Repair: exact where the removed can be had from the kept, never worse on held-out images, and masked == compact."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from equivalence import randomised, snapshot
from torch import Tensor, nn
from torch.nn import functional as F

from prunekit.channels import trace
from prunekit.compaction import compact
from prunekit.errors import DataError, NonFiniteError
from prunekit.measure.verify import verify
from prunekit.planning import Plan
from prunekit.repair import RepairSettings, repair

IMAGES = torch.randn(64, 3, 6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
SETTINGS = RepairSettings(ridge=1e-12, rows=2048)


class Residual(nn.Module):
    """A residual block whose shortcut is made last, a grouped and a depthwise convolution, and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.bn0 = nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8)
        self.conv1, self.bn1 = nn.Conv2d(8, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6)
        self.deep = nn.Conv2d(6, 6, 3, padding=1, groups=6)
        self.conv2, self.bn2 = nn.Conv2d(6, 8, 1, bias=False), nn.BatchNorm2d(8, affine=False)
        self.grouped = nn.Conv2d(8, 8, 3, padding=1, groups=2)
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn0(self.stem(x)))
        out = self.bn2(self.conv2(F.relu(self.deep(F.relu(self.bn1(self.conv1(x)))))))
        x = F.relu(out + self.grouped(x))
        return self.head(x.mean((2, 3)))  # type: ignore[no-any-return]


def planned(model: nn.Module, weight: str, removed: list[int], images: Tensor = IMAGES) -> Plan:
    """A plan that removes some input channels of a layer."""
    chart = trace(model, (images[:2],))
    labels = chart.labels[weight][1]
    assert labels is not None
    assert labels[removed].all()
    keep = np.ones(chart.n_labels, dtype=bool)
    keep[labels[removed]] = False
    return Plan(chart, keep)


def difference(model: nn.Module, other: nn.Module, images: Tensor = IMAGES) -> float:
    with torch.no_grad():
        return float((model(images) - other(images)).abs().max())


@torch.no_grad()
def redundant() -> Residual:
    """Channels 1 and 4 of the inner group are multiples of 0 and 2 all the way."""
    model = randomised(Residual().double()).eval()
    assert isinstance(model, Residual)
    for copy, of, factor in ((1, 0, 2.0), (4, 2, 0.5)):
        for tensor in (model.conv1.weight, model.bn1.running_var, model.bn1.running_mean):
            tensor[copy] = tensor[of]
        for vector in (model.bn1.weight, model.bn1.bias):
            vector[copy] = factor * vector[of]
        model.deep.weight[copy], model.deep.bias[copy] = model.deep.weight[of], factor * model.deep.bias[of]
    return model


@pytest.mark.parametrize("sequential", [True, False])
@pytest.mark.parametrize("fit", ["patch", "channel"])
def test_redundant_channels_are_replaced_exactly(fit: str, sequential: bool) -> None:
    model = redundant()
    before = snapshot(model)
    plan = planned(model, "conv2.weight", [1, 4])
    settings = RepairSettings(fit=fit, sequential=sequential, ridge=1e-12)  # type: ignore[arg-type]
    repaired, report = repair(model, plan, IMAGES, settings)
    assert report.kept
    assert report.before > 1e-3
    assert difference(model, repaired) < 1e-6
    assert all(torch.equal(tensor, before[name]) for name, tensor in snapshot(model).items())
    assert not repaired.conv1.weight[[1, 4]].any()  # type: ignore[union-attr,index,operator]
    assert not repaired.conv2.weight[:, [1, 4]].any()  # type: ignore[union-attr,index,operator]
    verify(repaired, compact(repaired, plan), plan, [(IMAGES[:4],)])


@pytest.mark.parametrize("fit", ["bias", "moments", "channel", "patch"])
@pytest.mark.parametrize("sequential", [True, False])
def test_no_fit_makes_a_layer_worse_on_held_out_images(fit: str, sequential: bool) -> None:
    model = randomised(Residual().double()).eval()
    plan = planned(model, "conv2.weight", [0, 3, 5])
    settings = RepairSettings(fit=fit, sequential=sequential, rows=1024)  # type: ignore[arg-type]
    _, report = repair(model, plan, IMAGES, settings)
    assert all(layer.after <= layer.before for layer in report.layers)
    assert report.after < report.before or not report.kept
    named = {layer.weight: layer for layer in report.layers}
    assert named["conv2.weight"].applied == fit


def test_a_shortcut_made_later_is_corrected_by_the_branch() -> None:
    model = randomised(Residual().double()).eval()
    plan = planned(model, "conv1.weight", [2])
    together, report = repair(model, plan, IMAGES, SETTINGS)
    assert report.after < 0.5 * report.before
    compacted = compact(together, plan)
    assert difference(together, compacted) < 1e-9


def test_linear_layers_of_a_transformer() -> None:
    model = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True).double().eval()
    torch.manual_seed(0)
    randomised(model)
    tokens = torch.randn(32, 5, 8, dtype=torch.float64)
    chart = trace(model, (tokens[:2],))
    keep = np.ones(chart.n_labels, dtype=bool)
    for name in ("linear2.weight", "self_attn.out_proj.weight"):
        labels = chart.labels[name][1]
        assert labels is not None
        heads = chart.deciding(labels)[0]
        keep[heads[heads > 0][:1]] = False
    repaired, report = repair(model, Plan(chart, keep), tokens, RepairSettings(rows=2048))
    assert type(repaired) is type(model)
    assert report.kept
    applied = {layer.weight: layer.applied for layer in report.layers}
    assert applied["linear2.weight"] == applied["self_attn.out_proj.weight"] == "patch"


def test_dead_channels_and_few_samples_are_reported() -> None:
    model = redundant()
    with torch.no_grad():
        model.deep.weight[3], model.deep.bias[3] = 0.0, -1.0
    _, report = repair(model, planned(model, "conv2.weight", [1]), IMAGES, RepairSettings(rows=2048))
    conv2 = next(layer for layer in report.layers if layer.weight == "conv2.weight")
    assert conv2.rank < conv2.columns + 1
    assert "span" in conv2.note
    wide = planned(model, "conv1.weight", [1])
    _, report = repair(model, wide, IMAGES[:8, :, :4, :4], RepairSettings(rows=64, ridge=1e-3))
    conv1 = next(layer for layer in report.layers if layer.weight == "conv1.weight")
    assert conv1.ridge >= 1e-2
    assert conv1.rank <= 64


def test_a_gram_matrix_above_the_limit_gives_way_to_channels() -> None:
    model = randomised(nn.Sequential(nn.Conv2d(3, 48, 1), nn.ReLU(), nn.Conv2d(48, 4, 3), nn.Flatten()).double()).eval()
    plan = planned(model, "2.weight", [0, 5, 7])
    _, report = repair(model, plan, IMAGES, RepairSettings(memory_bytes=2**20))
    assert {layer.weight: layer.applied for layer in report.layers}["2.weight"] == "channel"


def test_refused_input() -> None:
    model = redundant()
    plan = planned(model, "conv2.weight", [1])
    with pytest.raises(DataError, match="at least 8 images"):
        repair(model, plan, IMAGES[:4])
    with torch.no_grad():
        model.conv1.weight[0] = torch.nan
    with pytest.raises(NonFiniteError, match="'conv1'"):
        repair(model, plan, IMAGES)


@pytest.mark.parametrize("fit", ["moments", "channel", "patch"])
def test_a_norm_that_starts_at_zero_leaves_nothing_to_fit(fit: str) -> None:
    """As the last norm of each block of an untrained residual network."""
    model = randomised(Residual()).double().eval()
    nn.init.zeros_(model.bn1.weight)
    plan = planned(model, "conv1.weight", [0, 1])
    masked, report = repair(model, plan, IMAGES, RepairSettings(fit=fit, rows=1024))  # type: ignore[arg-type]
    notes = {layer.weight: layer.note for layer in report.layers}
    assert notes["conv1.weight"] == "the norm behind it has no factor but 0"
    assert verify(masked, compact(masked, plan), plan, [(IMAGES[:4],)]).max_relative_difference < 1e-12
