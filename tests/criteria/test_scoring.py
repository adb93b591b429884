from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torchvision import models

from prunekit.channels.trace import trace
from prunekit.channels.tracing.channel_map import ChannelMap, group_labels
from prunekit.criteria.criterion import Evidence, register_criterion
from prunekit.criteria.scoring import normalize, score
from prunekit.errors import NonFiniteError, UsageError
from prunekit.known_names import CRITERIA
from prunekit.models.cifar import CifarResNet
from prunekit.statistics.channel_stats import ChannelStats
from prunekit.statistics.channel_stats_collector import calibrate
from prunekit.statistics.gram_matrices import collect_patches
from prunekit.statistics.layer_stats import StatsKey
from prunekit.statistics.taylor_terms import collect_gradients


class Net(nn.Module):
    """conv (3 -> 4) with norm and ReLU, flattened 2x2 into linear (16 -> 3)."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.act = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU()
        self.fc = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.act(self.norm(self.conv(x))).flatten(1))  # type: ignore[no-any-return]


def net() -> Net:
    torch.manual_seed(0)
    return Net()


MODELS: dict[str, Callable[[], nn.Module]] = {
    "resnet": lambda: CifarResNet(8),
    "mobilenet": lambda: models.mobilenet_v3_small(num_classes=5, width_mult=0.5),
}
"""Narrow ones: to eliminate channels takes by far the longest."""


def handmade_map() -> ChannelMap:
    free, three = np.arange(1, 5), np.zeros(3, np.int64)
    labels: dict[str, tuple[np.ndarray | None, ...]] = {
        "conv.weight": (free, three, None, None),
        "conv.bias": (free,),
        "norm.weight": (free,),
        "norm.bias": (free,),
        "fc.weight": (three, free.repeat(4)),
        "fc.bias": (three,),
        "norm.running_mean": (free,),
        "norm.running_var": (free,),
    }
    state = net().state_dict()
    activations = {(path, "output", 0): free for path in ("conv", "norm", "act")}
    return ChannelMap(
        labels=labels,
        shapes={name: tuple(state[name].shape) for name in labels},
        n_labels=5,
        groups=group_labels(labels, 5),
        locks=(),
        activations=activations,
        mac_terms=(),
        source=None,
    )


def slices(model: Net) -> tuple[np.ndarray, np.ndarray]:
    """By channel: its filter, and the columns that read it, flattened."""
    filters = model.conv.weight.detach().double().flatten(1).numpy()  # (4, 27)
    columns = model.fc.weight.detach().double().view(3, 4, 4).transpose(0, 1).flatten(1).numpy()  # (4, 12)
    return filters, columns


def test_l1_is_the_mean_over_slices_of_their_mean_magnitude() -> None:
    model = net()
    expected = np.mean([np.abs(part).mean(1) for part in slices(model)], axis=0)
    found = score("l1", model, handmade_map())
    assert found.dtype == np.float64
    assert found[0] == np.inf
    np.testing.assert_allclose(found[1:], expected, rtol=1e-6)


def test_l2_is_the_mean_over_slices_of_their_root_mean_square() -> None:
    model = net()
    expected = np.mean([np.sqrt((part**2).mean(1)) for part in slices(model)], axis=0)
    np.testing.assert_allclose(score("l2", model, handmade_map())[1:], expected, rtol=1e-6)


@pytest.mark.parametrize("name", ["l1", "l2"])
def test_a_channel_with_smaller_weights_scores_lower(name: str) -> None:
    model = net()
    with torch.no_grad():
        model.conv.weight[2] *= 0.01
        model.fc.weight.view(3, 4, 4)[:, 2] *= 0.01
    assert score(name, model, handmade_map()).argmin() == 3


@pytest.mark.parametrize("name", ["l1", "l2"])
def test_half_precision_neither_overflows_nor_rounds(name: str) -> None:
    model = net()
    with torch.no_grad():
        model.conv.weight *= 3000.0
    single = score(name, model, handmade_map())
    np.testing.assert_allclose(score(name, model.half(), handmade_map()), single, rtol=1e-3)


@pytest.mark.parametrize("name", ["l1", "l2"])
def test_labels_on_vectors_only_are_judged_by_those(name: str) -> None:
    chart = handmade_map()
    labels = {
        **chart.labels,
        "conv.weight": (np.array([1, 2, 3, 0]), *chart.labels["conv.weight"][1:]),
        "fc.weight": (chart.labels["fc.weight"][0], np.array([1, 2, 3, 0]).repeat(4)),
    }
    chart = dataclasses.replace(chart, labels=labels, groups=group_labels(labels, 5), n_labels=6)
    model = net()
    with torch.no_grad():
        model.conv.bias.fill_(0.5)
        model.norm.weight.fill_(2.0)
        model.norm.bias.fill_(-0.5)
    found = score(name, model, chart)
    np.testing.assert_allclose(found[1:4], score(name, model, handmade_map())[1:4])
    assert found[4] == pytest.approx(1.0)
    assert found[5] == np.inf  # lies on no parameter at all


def test_activation_is_the_mean_magnitude_behind_norms_and_activations() -> None:
    model, x = net().eval(), torch.randn(5, 3, 2, 2)
    stats = calibrate(model, [x])
    with torch.no_grad():
        normed = model.norm(model.conv(x)).double()
    behind = [part.abs().mean((0, 2, 3)).numpy() for part in (normed, normed.relu())]
    found = score("activation", model, handmade_map(), stats=stats)
    np.testing.assert_allclose(found[1:], np.mean(behind, axis=0), rtol=1e-9)
    assert found[0] == np.inf


def test_activation_falls_back_to_other_outputs_and_inputs() -> None:
    model, x = net().eval(), torch.randn(5, 3, 2, 2)
    stats, chart = dataclasses.replace(calibrate(model, [x]), reads={}), handmade_map()
    free = np.arange(1, 5)
    for path, side in (("conv", "output"), ("norm", "input")):
        only = dataclasses.replace(chart, activations={(path, side, 0): free})
        found = score("activation", model, only, stats=stats)
        np.testing.assert_allclose(found[1:], stats["conv", "output", 0].mean_abs, rtol=1e-12)


def test_activation_without_the_statistics_it_needs() -> None:
    model = net().eval()
    partial = dataclasses.replace(calibrate(model, [torch.randn(2, 3, 2, 2)], modules=["fc"]), reads={})
    with pytest.raises(UsageError, match="'activation' needs channel statistics: pass stats="):
        score("activation", model, handmade_map())
    with pytest.raises(UsageError, match=r"no statistics for 4 of 4 channels of group 'conv'; collect them over every"):
        score("activation", model, handmade_map(), stats=partial)


def test_statistics_of_another_model() -> None:
    wider = nn.Sequential(nn.Conv2d(3, 7, 1))
    seven = calibrate(wider, [torch.randn(2, 3, 2, 2)], inputs=False)["0", "output", 0]
    stats = ChannelStats({StatsKey("norm", "output", 0): seven})
    with pytest.raises(UsageError, match="output of 'norm': the channel map has 4 channels, the statistics 7"):
        score("activation", net(), handmade_map(), stats=stats)


def test_random_follows_the_seed_alone() -> None:
    model, chart = net(), handmade_map()
    first = score("random", model, chart, seed=3)
    np.testing.assert_array_equal(first, score("random", Net(), chart, seed=3))
    assert not np.array_equal(first, score("random", model, chart, seed=4))
    assert ((first[1:] >= 0) & (first[1:] < 1)).all()


def test_the_model_and_the_random_state_are_left_alone() -> None:
    model, chart = net(), handmade_map()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    numpy, torch_state = np.random.get_state()[1].copy(), torch.get_rng_state()  # type: ignore[index, union-attr]
    for name in ("l1", "l2", "random"):
        score(name, model, chart)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    np.testing.assert_array_equal(np.random.get_state()[1], numpy)  # type: ignore[index]
    assert torch.equal(torch.get_rng_state(), torch_state)


def test_unknown_criteria_and_models_that_do_not_fit() -> None:
    with pytest.raises(
        UsageError, match=r"criterion: expected the name of a criterion, .* got 'L2'; did you mean 'l2'"
    ):
        score("L2", net(), handmade_map())
    other = net()
    other.conv = nn.Conv2d(3, 6, 3)
    with pytest.raises(UsageError, match=r"'conv\.weight' of shape \(6, 3, 3, 3\) does not fit the channel map"):
        score("l2", other, handmade_map())
    with pytest.raises(UsageError, match=r"parameter 'weight' of shape \(2, 2\) does not fit"):
        score("l2", nn.Linear(2, 2), handmade_map())


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_weights_and_statistics_that_are_not_finite_are_named(value: float) -> None:
    model = net().eval()
    with torch.no_grad():
        model.conv.weight[1, 0, 0, 0] = value
    with pytest.raises(NonFiniteError, match=r"parameter 'conv\.weight' holds NaN or Inf"):
        score("l1", model, handmade_map())
    stats = calibrate(model, [torch.randn(2, 3, 2, 2)])
    with pytest.raises(NonFiniteError, match="in the output of conv"):
        score("activation", model, handmade_map(), stats=stats)


def test_registering() -> None:
    assert {"l1", "l2", "activation", "elimination", "random"} <= set(CRITERIA.declared)
    for name, declared in CRITERIA.declared.items():
        found = CRITERIA.get(name)
        facts = {key: getattr(found, key) for key in ("needs", "measures", "paper", "comparable")}
        assert (found.name, facts) == (name, {"paper": "", "comparable": False, **declared.facts})
        assert found.function.__module__ == declared.module
    with pytest.raises(ValueError, match="'l2' is registered already"):
        register_criterion("l2")(lambda evidence: np.zeros(1))
    with pytest.raises(ValueError, match="criterion 'mine': needs: 'statistics' is none; did you mean 'stats'"):
        register_criterion("mine", needs=("statistics",))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("returned", "error", "message"),
    [
        (np.array([0, 1, np.nan, 1, 1]), NonFiniteError, r"criterion 'broken': 1 of 4 scores of group 'conv' are NaN"),
        (
            np.ones(4),
            UsageError,
            r"criterion 'broken': expected a NumPy array with one number .*\(5,\), got float64 of shape",
        ),
        (np.array(["a"] * 5), UsageError, r"criterion 'broken': expected .*, got <U1 of shape \(5,\)"),
        (
            torch.ones(5),
            UsageError,
            r"criterion 'broken': .* got float32 \(5,\); return it as \.double\(\)\.cpu\(\)\.numpy",
        ),
        (None, UsageError, r"criterion 'broken': expected a NumPy array .*, got NoneType"),
    ],
)
def test_a_criterion_of_ones_own_must_give_numbers(returned: Any, error: type[Exception], message: str) -> None:
    @register_criterion("broken", needs=())
    def broken(evidence: Evidence) -> Any:
        return returned

    with pytest.raises(error, match=message):
        score("broken", net(), handmade_map())


def test_a_cell_that_runs_again_registers_anew() -> None:
    cell = "@register_criterion('cell', needs=())\ndef {}(evidence): return {} * np.ones(5)"
    for name, value in (("first", 1), ("first", 2)):
        exec(cell.format(name, value), {**globals(), "__name__": "__main__"})
        assert score("cell", net(), handmade_map())[1] == value
    with pytest.raises(ValueError, match="'cell' is registered already"):
        exec(cell.format("second", 3), {**globals(), "__name__": "__main__"})


def test_normalize_divides_by_the_mean_of_each_group() -> None:
    labels: dict[str, tuple[np.ndarray | None, ...]] = {"a": (np.array([1, 2]),), "b": (np.array([3, 4, 5, 6]),)}
    chart = dataclasses.replace(handmade_map(), labels=labels, n_labels=7, groups=group_labels(labels, 7))
    scores = np.array([np.inf, 1.0, 3.0, 10.0, 20.0, np.inf, 30.0])
    found = normalize(scores, chart)
    np.testing.assert_allclose(found, [np.inf, 0.5, 1.5, 0.5, 1.0, np.inf, 1.5])
    assert scores[1] == 1.0
    np.testing.assert_array_equal(normalize(np.array([np.inf] + [0.0] * 6), chart)[1:], np.zeros(6))


def test_normalize_does_not_care_about_scale_or_width() -> None:
    model, chart = net(), handmade_map()
    once = normalize(score("l2", model, chart), chart)
    with torch.no_grad():
        model.conv.weight *= 10
        model.fc.weight *= 10
    np.testing.assert_allclose(normalize(score("l2", model, chart), chart), once, rtol=1e-6)
    assert once[1:].mean() == pytest.approx(1.0)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_every_channel_of_a_real_model_gets_a_score(name: str) -> None:
    torch.manual_seed(0)
    model = MODELS[name]()
    x = torch.randn(2, 3, 32, 32)
    chart, stats = trace(model, (x,)), calibrate(model, [x])
    smooth = name != "mobilenet"  # whose hard sigmoid has no second derivative
    labeled = [(x, torch.tensor([0, 1]))]
    gradients = collect_gradients(model, labeled, functional.cross_entropy, second_order=smooth)
    patches = collect_patches(model, [x], norms=chart.norms, images=2, memory_bytes=2**21)  # wide ones by channels
    left_out = set() if smooth else {"taylor2", "obd"}
    left_out |= set() if name == "resnet" else {"apoz"}  # the other has linear bottlenecks
    for kind in set(CRITERIA.declared) - left_out:
        found = score(kind, model, chart, stats=stats, gradients=gradients, patches=patches)
        assert found.shape == (chart.n_labels,)
        assert np.isfinite(found[1:]).all()
        assert (found[1:] >= 0).all()
        assert found[0] == np.inf
    name, axis = chart.groups[0].slots[0]
    label = int(chart.labels[name][axis][3])  # type: ignore[index]
    before = score("l2", model, chart)
    with torch.no_grad():
        model.get_parameter(name).select(axis, 3).zero_()
    after = score("l2", model, chart)
    assert 0 < after[label] < before[label]
