"""Repair: exact where the removed can be had from the kept, never worse on held-out images, and masked == compact."""

from __future__ import annotations

import copy
from dataclasses import replace
from itertools import chain, repeat

import numpy as np
import pytest
import torch
from equivalence import randomized, snapshot
from torch import Tensor, nn
from torch.nn import functional as F

from prunekit.channels.trace import trace
from prunekit.compaction.compact_model import compact
from prunekit.errors import DataError, NonFiniteError
from prunekit.measure.verification import verify
from prunekit.planning.plan import Plan
from prunekit.pruning.prune import prune
from prunekit.repair.batchnorm_statistics import recalibrate_batchnorm
from prunekit.repair.held_out_images import OUTPUTS, Batch, batches_of
from prunekit.repair.held_out_images import difference as relative_difference
from prunekit.repair.layer_fit import LayerFitter
from prunekit.repair.layer_samples import LayerPass, SampleGatherer, SampleRequest
from prunekit.repair.memory_budget import kept_channels
from prunekit.repair.repair_model import repair
from prunekit.settings.calibration import RepairSettings
from prunekit.statistics.layer_graph import find_layers
from prunekit.statistics.output_error import OutputComparison

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
    model = randomized(Residual().double()).eval()
    assert isinstance(model, Residual)
    for again, of, factor in ((1, 0, 2.0), (4, 2, 0.5)):
        for tensor in (model.conv1.weight, model.bn1.running_var, model.bn1.running_mean):
            tensor[again] = tensor[of]
        for vector in (model.bn1.weight, model.bn1.bias):
            vector[again] = factor * vector[of]
        model.deep.weight[again], model.deep.bias[again] = model.deep.weight[of], factor * model.deep.bias[of]
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
    model = randomized(Residual().double()).eval()
    plan = planned(model, "conv2.weight", [0, 3, 5])
    settings = RepairSettings(fit=fit, sequential=sequential, rows=1024)  # type: ignore[arg-type]
    _, report = repair(model, plan, IMAGES, settings)
    assert all(layer.after <= layer.before for layer in report.layers)
    assert report.after < report.before or not report.kept
    named = {layer.weight: layer for layer in report.layers}
    assert named["conv2.weight"].applied == fit


def test_a_shortcut_made_later_is_corrected_by_the_branch() -> None:
    model = randomized(Residual().double()).eval()
    plan = planned(model, "conv1.weight", [2])
    together, report = repair(model, plan, IMAGES, SETTINGS)
    assert report.after < 0.5 * report.before
    compacted = compact(together, plan)
    assert difference(together, compacted) < 1e-9


def test_linear_layers_of_a_transformer() -> None:
    model = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True).double().eval()
    torch.manual_seed(0)
    randomized(model)
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
    model = randomized(nn.Sequential(nn.Conv2d(3, 48, 1), nn.ReLU(), nn.Conv2d(48, 4, 3), nn.Flatten()).double()).eval()
    plan = planned(model, "2.weight", [0, 5, 7])
    _, report = repair(model, plan, IMAGES, RepairSettings(memory_bytes=2**20))
    assert {layer.weight: layer.applied for layer in report.layers}["2.weight"] == "channel"


def test_refused_input() -> None:
    model = redundant()
    plan = planned(model, "conv2.weight", [1])
    with pytest.raises(DataError, match="at least 8 images"):
        repair(model, plan, IMAGES[:4])
    spoiled = IMAGES.clone()
    spoiled[3, 1, 2, 0] = torch.inf
    with pytest.raises(DataError, match="sample 3 holds NaN or Inf"):
        repair(model, plan, spoiled)
    with pytest.raises(DataError, match=r"output is the same for all .* images that judge"):
        repair(model, plan, torch.ones_like(IMAGES))
    deaf = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in deaf.parameters():
            parameter.zero_()
    with pytest.raises(DataError, match=r"the Residual returns the same for all .* though they differ: .*trained"):
        repair(deaf, planned(deaf, "conv2.weight", [1]), IMAGES)
    with torch.no_grad():
        model.conv1.weight[0] = torch.nan
    with pytest.raises(NonFiniteError, match="'conv1'"):
        repair(model, plan, IMAGES)


class Depthwise(nn.Module):
    """40 channels, each filtered by itself, and their mixture."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.bn1 = nn.Conv2d(3, 40, 1, bias=False), nn.BatchNorm2d(40)
        self.deep, self.bn2 = nn.Conv2d(40, 40, 3, padding=1, groups=40, bias=False), nn.BatchNorm2d(40)
        self.down = nn.Conv2d(40, 5, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu6(self.bn1(self.up(x)))
        return self.down(self.bn2(self.deep(x)).tanh()).mean((2, 3))  # type: ignore[no-any-return]


def test_depthwise_convolutions_are_fitted_tap_by_tap() -> None:
    model = randomized(Depthwise().double()).eval()
    assert isinstance(model, Depthwise)
    plan = planned(model, "down.weight", [1, 4])
    damaged, index = randomized(Depthwise().double()).eval(), plan.kept("deep.weight", 0)
    damaged.load_state_dict(model.state_dict())
    fitter = LayerFitter(model, damaged, plan, RepairSettings(ridge=1e-12))
    with torch.no_grad():
        damaged.deep.weight *= 1.5  # type: ignore[operator,union-attr]
        damaged.bn2.bias -= 0.3  # type: ignore[operator,union-attr]
    layer = next(layer for layer in find_layers(model, IMAGES[:2]) if layer.weight == "deep.weight")
    samples = []
    for each, channels in ((model, None), (damaged, kept_channels(layer, plan))):
        request = SampleRequest(layer, 10**6, channels, outputs=channels is None)
        gatherer = SampleGatherer(LayerPass(each), *batches_of((IMAGES,), 0.25, 64), lambda *_: [0])
        samples.append(gatherer.take([request], 0, ahead=True)[0])
    fitter.refit(layer, *samples)
    (done,) = fitter.reports
    assert (done.applied, done.note) == ("patch", "38 of 38 groups")
    assert done.after < 1e-9 < done.before
    torch.testing.assert_close(damaged.deep.weight[index], model.deep.weight[index], rtol=0, atol=1e-6)  # type: ignore[index,union-attr]
    torch.testing.assert_close(damaged.bn2.bias[index], model.bn2.bias[index], rtol=0, atol=1e-6)  # type: ignore[index,union-attr]


def test_recalibration_gives_each_output_what_its_norm_stands_for() -> None:
    model = randomized(Residual().double()).eval()
    assert isinstance(model, Residual)
    recalibrate_batchnorm(model, [(IMAGES, torch.zeros(len(IMAGES)))])
    plan = planned(model, "conv1.weight", [1, 3])
    settings = RepairSettings(fit="batchnorm", rows=10**6, sequential=False)
    repaired, report = repair(model, plan, IMAGES, settings)
    named = {layer.weight: layer for layer in report.layers}
    assert named["grouped.weight"].note == "no BatchNorm alone reads its output"
    assert named["conv1.weight"].applied == "batchnorm"
    assert isinstance(repaired, Residual)
    with torch.no_grad():
        stem = F.relu(repaired.bn0(model.stem(IMAGES[:56])))
        got = repaired.bn1(repaired.conv1(stem)).transpose(0, 1).flatten(1)
    torch.testing.assert_close(got.mean(1), model.bn1.bias)
    torch.testing.assert_close(got.std(1), model.bn1.weight.abs(), rtol=1e-3, atol=0)


def test_layers_are_left_as_they_were_where_the_model_is_no_better(monkeypatch: pytest.MonkeyPatch) -> None:
    errors = chain([1.0], repeat(1.5))
    monkeypatch.setattr("prunekit.repair.repair_model.difference", lambda *_: next(errors))
    model = randomized(Residual().double()).eval()
    plan = planned(model, "conv2.weight", [0, 3])
    repaired, report = repair(model, plan, IMAGES, SETTINGS)
    assert not report.kept
    assert (report.before, report.after, report.fitted) == (1.0, 1.0, 1.5)
    (note,) = report.notes
    assert note.startswith("repair: nothing is kept: with all of them the output's error on held-out samples is 1.5 ")
    assert not any(layer.applied for layer in report.layers)
    assert {layer.weight: layer for layer in report.layers}["conv2.weight"].note.startswith("patch dropped: ")
    for name, tensor in snapshot(model).items():
        kept = torch.ones_like(tensor) if plan.mask(name) is None else plan.mask(name)
        assert torch.equal(snapshot(repaired)[name], torch.where(kept.bool(), tensor, 0)) or "running_var" in name


def test_the_first_layers_are_kept_where_with_all_the_model_is_no_better(monkeypatch: pytest.MonkeyPatch) -> None:
    model = randomized(Residual().double()).eval()
    plan = planned(model, "conv2.weight", [0, 3])
    whole, _ = repair(model, plan, IMAGES, SETTINGS)
    errors = iter([1.0, 1.5, 0.5])
    monkeypatch.setattr("prunekit.repair.repair_model.difference", lambda *_: next(errors))
    repaired, report = repair(model, plan, IMAGES, SETTINGS)
    assert (report.kept, report.before, report.after, report.fitted) == (True, 1.0, 0.5, 1.5)
    kept, fitted = snapshot(repaired), snapshot(whole)
    applied = {layer.weight: layer.applied for layer in report.layers}
    assert applied["conv2.weight"] == "patch"
    assert applied["head.weight"] == applied["grouped.weight"] == ""
    assert torch.equal(kept["conv2.weight"], fitted["conv2.weight"])
    assert torch.equal(kept["bn2.running_mean"], fitted["bn2.running_mean"])
    for name in ("head.weight", "head.bias", "grouped.weight", "grouped.bias"):
        assert not torch.equal(fitted[name], model.state_dict()[name])
        assert torch.equal(kept[name], model.state_dict()[name])
    assert "with those 0.5" in report.notes[0]


@pytest.mark.parametrize(("after", "said"), [(0.00129, True), (0.001289999, True), (0.0008, False)])
def test_a_repair_without_effect_says_so(monkeypatch: pytest.MonkeyPatch, after: float, said: bool) -> None:
    model = randomized(Residual().double()).eval()
    errors = chain([0.00129], repeat(after))
    monkeypatch.setattr("prunekit.repair.repair_model.difference", lambda *_: next(errors))
    _, report = repair(model, planned(model, "conv2.weight", [0, 3]), IMAGES, SETTINGS)
    assert bool(report.notes) is said
    assert not said or "0.00129" in report.notes[0]


@pytest.mark.parametrize("mebibytes", [1, 2, 8])
def test_memory_is_stated_first_and_costs_no_more_than_time(mebibytes: int) -> None:
    model = randomized(Residual().double()).eval()
    plan = planned(model, "conv2.weight", [0, 3, 5])
    lines: list[str] = []
    settings = RepairSettings(rows=64, memory_bytes=mebibytes * 2**20)
    images = IMAGES.repeat(8, 1, 1, 1)
    _, report = repair(model, plan, images, settings, log=lines.append)
    assert lines == [f"repair: {report.memory}"]
    assert report.memory.bytes <= settings.memory_bytes
    assert report.kept
    assert report.after < 0.5 * report.before
    assert (report.memory.batch < len(images) // 4) == (mebibytes < 8)  # rows are drawn, from four batches at least


@pytest.mark.parametrize("fit", ["moments", "channel", "patch"])
def test_a_norm_that_starts_at_zero_leaves_nothing_to_fit(fit: str) -> None:
    """As the last norm of each block of an untrained residual network."""
    model = randomized(Residual()).double().eval()
    nn.init.zeros_(model.bn1.weight)
    plan = planned(model, "conv1.weight", [0, 1])
    masked, report = repair(model, plan, IMAGES, RepairSettings(fit=fit, rows=1024))  # type: ignore[arg-type]
    notes = {layer.weight: layer.note for layer in report.layers}
    assert notes["conv1.weight"] == "the norm behind it has no factor but 0"
    assert verify(masked, compact(masked, plan), plan, [(IMAGES[:4],)]).max_relative_difference < 1e-12


class Products(nn.Module):
    """No layer is a convolution or linear."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Parameter(torch.randn(12, 6)), nn.Parameter(torch.randn(12, 4))

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.einsum("...i,hi->...h", x, self.up).relu()
        return torch.einsum("...h,ho->...o", hidden, self.down)


def test_a_model_without_layers_is_masked_and_the_notes_say_so() -> None:
    torch.manual_seed(0)  # removed channels must be alive on the two samples that judge
    model, x = randomized(Products()).eval(), torch.randn(16, 6)
    plan = planned(model, "down", [], x)
    labels = plan.channel_map.labels["down"][0]
    assert labels is not None
    plan = Plan(plan.channel_map, ~np.isin(np.arange(plan.channel_map.n_labels), labels[[1, 5]]))
    masked, report = repair(model, plan, x)
    assert not report.kept
    assert report.after == report.before > 0
    assert report.notes == (
        "repair: no layer was refitted: read by einsum, not by a convolution or linear layer (2 layers)",
    )
    verify(masked, compact(masked, plan), plan, [(x,)])
    assert report.notes[0] in prune(model, calibration=x, macs=0.6).notes


def test_wide_outputs_are_compared_in_parts() -> None:
    """Outputs as wide as a vocabulary are made for a few samples at a time, and the error is that of all at once."""
    torch.manual_seed(0)
    dense, other, x = nn.Linear(4, 6), nn.Linear(4, 6), torch.randn(5, 4)
    judge = OutputComparison.of(dense, (x,))
    assert judge.each == 6
    batches = [Batch(0, (x[:3],), 1.0), Batch(1, (x[3:],), 1.0)]
    want, got = dense(x).detach().double(), other(x).detach().double()
    error = float((got - want).square().sum() / (want - want.mean(0)).square().sum())
    for each in (6, OUTPUTS // 2, OUTPUTS):  # all samples at once, two of them, each alone
        sizes: list[int] = []
        hook = other.register_forward_hook(lambda _, given, result, sizes=sizes: sizes.append(len(result)))
        assert relative_difference(dense, other, batches, replace(judge, each=each)) == pytest.approx(error)
        hook.remove()
        assert sizes == {6: [3, 2], OUTPUTS // 2: [2, 1, 2], OUTPUTS: [1] * 5}[each]
