"""An overall budget of activation sparsity: met exactly, spread by measured errors, never worse than one share."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from prunekit.errors import ArtifactError, DataError, ModelError, NonFiniteError, UsageError
from prunekit.hooks.hook import count_hooks
from prunekit.masks import activation_budget
from prunekit.masks.activation_budget import SharePath
from prunekit.masks.activation_masks import ActivationMasks
from prunekit.masks.thresholds import ActivationThresholds, calibrate_thresholds


class Branches(nn.Module):
    """One layer that the output hangs on, and two that hardly change it."""

    def __init__(self) -> None:
        super().__init__()
        self.main, self.aside, self.far = nn.Linear(16, 8), nn.Linear(16, 8), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.main(x) + 0.01 * self.aside(x) + 0.02 * self.far(x.sin())
        return out


def net(seed: int = 0) -> Branches:
    torch.manual_seed(seed)
    return Branches()


def data(count: int, seed: int) -> Tensor:
    return torch.randn(count, 16, generator=torch.Generator().manual_seed(seed))


PATHS = ["main", "aside", "far"]


def output_error(model: nn.Module, thresholds: Any, x: Tensor) -> float:
    with torch.no_grad():
        want = model(x)
        with ActivationMasks(model, thresholds, side="input"):
            return float((model(x) - want).square().sum() / (want - want.mean(0)).square().sum())


@pytest.mark.parametrize("overall", [0.3, 0.8])
def test_the_budget_is_met_and_the_output_changes_less_than_with_one_share(overall: float) -> None:
    model = net()
    found = calibrate_thresholds(model, data(512, 1), PATHS, overall=overall, side="input")
    assert found.overall == pytest.approx(overall, abs=0.0015)
    assert found.budget is not None
    assert found.budget.way == "spread"
    assert found.budget.weights == pytest.approx(dict.fromkeys(PATHS, 1 / 3))
    assert found.reached["main"] < overall < found.reached["aside"]
    uniform = calibrate_thresholds(model, data(512, 1), PATHS, target=overall, side="input")
    unseen = data(4096, 2)
    assert output_error(model, found, unseen) < 0.8 * output_error(model, uniform, unseen)
    assert found.budget.errors["spread"] == pytest.approx(output_error(model, found, unseen), rel=0.3)
    with ActivationMasks(model, found) as masks:
        model(unseen)
    assert found.budget_share(masks.sparsity().layers) == pytest.approx(overall, abs=0.01)
    assert count_hooks(model) == 0


def test_the_same_data_give_the_same_thresholds() -> None:
    forms = (data(48, 1), list(data(48, 1).split(24)))
    one, other = (calibrate_thresholds(net(), form, PATHS, overall=0.5, side="input") for form in forms)
    assert one.thresholds == other.thresholds
    assert one.reached == other.reached


def test_layers_weigh_by_the_macs_of_their_readers_or_by_their_values() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 4))
    x = data(256, 1)[:, :8]
    by_macs = calibrate_thresholds(model, x, ["0", "2"], overall=0.5, side="input").budget
    by_values = calibrate_thresholds(model, x, ["0", "2"], overall=0.5, by="values", side="input").budget
    assert by_macs is not None
    assert by_values is not None
    assert by_macs.weights == pytest.approx({"0": 8 * 32 / (8 * 32 + 32 * 4), "2": 32 * 4 / (8 * 32 + 32 * 4)})
    assert by_values.weights == pytest.approx({"0": 8 / 40, "2": 32 / 40})


def test_zeros_of_a_relu_count_and_a_layer_above_its_share_is_not_masked() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))
    with torch.no_grad():
        model[0].bias.fill_(-1.5)
    found = calibrate_thresholds(model, data(256, 1), ["0", "2"], overall=0.6, side="input")
    assert found.reached["2"] > 0.9
    assert found["2"] == 0
    assert found.overall == pytest.approx(0.6, abs=0.0015)
    plenty = calibrate_thresholds(model, data(256, 1), ["2"], overall=0.5, side="input")
    assert dict(plenty) == {"2": 0.0}
    assert plenty.budget is not None
    assert plenty.budget.errors == {"spread": 0.0, "uniform": 0.0}


def test_values_that_no_layer_reads_are_not_masked() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 4))
    found = calibrate_thresholds(model, data(256, 1), ["0", "2"], overall=0.4)
    assert found["0"] == 0
    assert found.budget is not None
    assert found.budget.weights == {"0": 0.0, "2": 1.0}
    assert found.reached["2"] == pytest.approx(0.4, abs=0.0015)
    with pytest.raises(UsageError, match=r"by: no convolution, linear layer .* reads the outputs of 0, so zeros there"):
        calibrate_thresholds(model, data(256, 1), ["0"], overall=0.4)
    assert calibrate_thresholds(model, data(256, 1), ["0"], overall=0.4, by="values")["0"] > 0


def test_one_share_is_used_where_it_does_better(monkeypatch: pytest.MonkeyPatch) -> None:
    """Curves that are wrong, as those of single masks may be for all of them together."""
    wrong = np.array([np.full(7, 0.0), np.linspace(1, 9, 7), np.linspace(1, 9, 7)])
    monkeypatch.setattr(activation_budget, "error_curves", lambda *_: wrong)
    model = net()
    found = calibrate_thresholds(model, data(512, 1), PATHS, overall=0.5, side="input")
    assert found.budget is not None
    assert found.budget.way == "uniform"
    assert found.reached == pytest.approx(dict.fromkeys(PATHS, 0.5), abs=0.0015)
    assert "one share for all: output error" in repr(found)


def test_steps_are_taken_by_error_per_saving() -> None:
    zeros, weights = np.array([0.0, 0.5]), np.array([0.25, 0.75])
    path = SharePath.along_errors(zeros, np.array([[1.0, 3.0, 9.0], [0.3, 1.5, 6.0]]), weights)
    # per saving: 16, 32, 96 of the first layer, and 3.2, 12.8, 48 of the second
    steps = [(0, 0.625), (0, 0.75), (0.25, 0.75), (0.5, 0.75), (0.5, 0.875), (0.75, 0.875), (1, 1)]
    assert path.points.tolist() == [[0, 0.5], *map(list, steps)]
    assert path.within(0.375, weights, zeros).tolist() == pytest.approx([0, 0.5])
    for overall in (0.4, 0.55, 0.7, 0.99):
        shares = path.within(overall, weights, np.zeros(2))
        assert float(shares @ weights) == pytest.approx(overall, abs=1e-12)
    floor = np.array([0.4, 0.6])
    shares = path.within(0.7, weights, floor)
    assert float(np.maximum(shares, floor) @ weights) == pytest.approx(0.7, abs=1e-12)
    assert SharePath.uniform(2).within(0.7, weights, floor).tolist() == pytest.approx([0.7, 0.7])
    assert (SharePath.uniform(2).within(0.3, weights, floor) < floor).all()


def test_a_curve_that_is_not_convex_is_followed_along_its_hull() -> None:
    path = SharePath.along_errors(np.zeros(2), np.array([[4.0, 4.0, 4.0], [2.0, 4.0, 6.0]]), np.full(2, 0.5))
    assert path.points[3].tolist() == [0.75, 0.0]
    full = SharePath.along_errors(np.array([1.0, 0.0]), np.array([[0.0] * 3, [1.0] * 3]), np.full(2, 0.5))
    assert full.within(0.8, np.full(2, 0.5), np.array([1.0, 0.0])).tolist() == pytest.approx([1.0, 0.6])


def test_budgets_are_saved_and_loaded_and_old_files_are_read(tmp_path: Path) -> None:
    path = tmp_path / "thresholds.json"
    found = calibrate_thresholds(net(), data(64, 1), PATHS, overall=0.5, side="input")
    found.save(path)
    assert vars(ActivationThresholds.load(path)) == vars(found)
    text = json.loads(path.read_text())
    old = {name: value for name, value in text.items() if name != "budget"}
    path.write_text(json.dumps(old))
    assert ActivationThresholds.load(path).budget is None
    wrong = {
        "overall": "half",
        "by": "flops",
        "weights": {"main": -1},
        "shares": [],
        "errors": {"spread": 0.1},
    }
    for name, value in wrong.items():
        path.write_text(json.dumps({**text, "budget": {**text["budget"], name: value}}))
        with pytest.raises(ArtifactError, match=rf"budget\.{name}[^:]*: (Input should be|expected)"):
            ActivationThresholds.load(path)
    path.write_text(json.dumps({**text, "budget": {"overall": 0.5}}))
    with pytest.raises(ArtifactError, match=r"budget\.by: Field required"):
        ActivationThresholds.load(path)
    path.write_text(json.dumps({**text, "budget": {**text["budget"], "weights": {"main": 1.0}}}))
    with pytest.raises(ArtifactError, match="expected one for each threshold"):
        ActivationThresholds.load(path)


def test_the_result_prints_both_errors_and_the_weights() -> None:
    found = calibrate_thresholds(net(), data(128, 1), PATHS, overall=0.5, side="input")
    shown = " ".join(str(found).split())
    assert "inputs of 3 modules, 50.0 % of zeros overall by MACs (budget 50.0 %), spread by errors: output" in shown
    assert "module threshold zeros of all macs" in shown
    assert [row["weight"] for row in found.rows()] == pytest.approx([1 / 3] * 3)
    with pytest.raises(UsageError, match="not found for an overall budget"):
        calibrate_thresholds(net(), data(8, 1), PATHS, target=0.5).budget_share({})


class Counted(nn.Module):
    """Returns as many rows as there are values above zero."""

    def __init__(self) -> None:
        super().__init__()
        self.act, self.layer = nn.Tanh(), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        values = self.act(x)
        out: Tensor = self.layer(values)
        return out[:, None].expand(-1, int((values != 0).sum()), -1)


def test_a_budget_that_cannot_be_spread_says_why() -> None:
    x = data(64, 1)
    for both in ({}, {"target": 0.5, "overall": 0.5}):
        with pytest.raises(UsageError, match=r"expected exactly one of target and overall, got (neither|both)"):
            calibrate_thresholds(net(), x, PATHS, **both)  # type: ignore[arg-type]
    for overall in (0.0, 1.0, math.nan):
        with pytest.raises(UsageError, match="overall: expected a share of zeros above 0 and below 1"):
            calibrate_thresholds(net(), x, PATHS, overall=overall)
    with pytest.raises(UsageError, match="by: expected 'macs' or 'values', got 'flops'"):
        calibrate_thresholds(net(), x, PATHS, overall=0.5, by="flops")  # type: ignore[arg-type]
    with pytest.raises(DataError, match="expected at least 8 samples"):
        calibrate_thresholds(net(), x[:4], PATHS, overall=0.5, side="input")
    with pytest.raises(DataError, match="output is the same for all samples"):
        calibrate_thresholds(net(), x[:1].expand(64, -1), PATHS, overall=0.5, side="input")
    with pytest.raises(ModelError, match="under a mask: their difference cannot be measured"):
        calibrate_thresholds(Counted(), x, ["act"], overall=0.5)
    broken = net()
    with torch.no_grad():
        broken.main.bias.fill_(math.inf)
    with pytest.raises(NonFiniteError, match="output is NaN or Inf"):
        calibrate_thresholds(broken, x, PATHS, overall=0.5, side="input")
    assert count_hooks(broken) == 0


@pytest.mark.slow
def test_linear_layers_of_a_vit_share_a_budget() -> None:
    timm = pytest.importorskip("timm")
    torch.manual_seed(0)
    model = timm.create_model("test_vit", pretrained=False, img_size=32, patch_size=8).eval()
    images = torch.randn(24, 3, 32, 32)
    found = calibrate_thresholds(
        model, images, ["blocks.0.*qkv", "blocks.0.*proj", "blocks.0.*fc?"], overall=0.5, side="input"
    )
    assert found.budget is not None
    assert found.overall == pytest.approx(0.5, abs=0.0015)
    macs = {path: model.get_submodule(path).weight.numel() for path in found}
    assert found.budget.weights == pytest.approx({path: count / sum(macs.values()) for path, count in macs.items()})


def test_samples_are_held_out_and_drawn_evenly() -> None:
    batches = [((part,), None) for part in torch.arange(40)[:, None].split(7)]
    held = activation_budget._Chosen(batches, activation_budget._held_out)
    rest = activation_budget._Chosen(batches, lambda numbers: ~activation_budget._held_out(numbers))
    assert [int(value) for inputs, _ in held for value in inputs[0]] == list(range(3, 40, 4))
    assert sorted(int(value) for part in (held, rest) for inputs, _ in part for value in inputs[0]) == list(range(40))
    many = activation_budget._few([((part,), None) for part in torch.arange(1024)[:, None].split(100)])
    assert [int(value) for inputs, _ in many for value in inputs[0]] == list(range(3, 1024, 4))
