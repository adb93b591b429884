"""Criteria beyond plain magnitude: what they fall back on, what they refuse, and how they rank across layers."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from criteria_nets import SmallNet, data, scored, small_net
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision import models

import prunekit as pk
from prunekit.channels.trace import trace
from prunekit.criteria.activation import ACTIVATIONS
from prunekit.criteria.criterion import CRITERIA
from prunekit.criteria.scoring import score
from prunekit.errors import NonFiniteError, UsageError
from prunekit.statistics.channel_stats_collector import calibrate
from prunekit.statistics.taylor_terms import TaylorTerms


class Gated(nn.Module):
    """A factor on every channel that conv2 reads: its gradient is what Taylor terms of those columns estimate."""

    def __init__(self, net: SmallNet) -> None:
        super().__init__()
        self.net, self.gate = net, nn.Parameter(torch.ones(6, 1, 1, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        net = self.net
        x = net.conv2(self.gate * net.relu1(net.norm1(net.conv1(x))))
        return net.fc(net.relu2(net.norm2(x)).flatten(1))  # type: ignore[no-any-return]


def test_taylor_terms_of_columns_are_the_gradient_of_a_gate() -> None:
    model = small_net()
    net, gated = scored(model, data()), Gated(model)
    for number, (images, labels) in enumerate(data()):
        (gate,) = torch.autograd.grad(F.cross_entropy(gated(images), labels), [gated.gate])
        np.testing.assert_allclose(net.gradients.terms["conv2.weight", 1][number], gate.flatten().numpy(), rtol=1e-9)


def test_a_channel_that_nothing_reads_scores_zero_by_taylor_and_counts_as_dead_by_apoz() -> None:
    model = small_net()
    with torch.no_grad():
        model.conv2.weight[:, 2] = 0
        model.norm1.weight[4], model.norm1.bias[4] = 0, -1
    net = scored(model, data())
    assert net.along("taylor", "conv1.weight")[2] == 0
    assert net.along("apoz", "conv1.weight")[4] == 0


def test_subclasses_of_activation_functions_are_ones_and_attention_is_none() -> None:
    class Rectifier(nn.ReLU):
        pass

    plain, own = small_net(), small_net()
    own.relu1, own.relu2 = Rectifier(), Rectifier()
    for name in ("activation", "apoz"):
        np.testing.assert_array_equal(scored(own, data())(name), scored(plain, data())(name))
    assert not issubclass(nn.MultiheadAttention, ACTIVATIONS)
    assert issubclass(nn.ReLU6, ACTIVATIONS)


def test_a_functional_relu_is_judged_by_what_reads_its_output() -> None:
    module, functional = scored(small_net(), data()), scored(small_net(functional=True), data())
    read = functional.along("apoz", "conv1.weight")
    np.testing.assert_allclose(read, module.along("apoz", "conv1.weight"), rtol=1e-12)
    assert len(np.unique(read)) == 6


def test_apoz_refuses_a_model_without_rectifiers() -> None:
    model, x = nn.Sequential(nn.Conv2d(3, 4, 1), nn.Conv2d(4, 3, 1)), torch.randn(2, 3, 32, 32)
    stats = calibrate(model, [x])
    with pytest.raises(UsageError, match=r"'apoz': no zeros .* of group '.*'; score by 'activation' or 'taylor'"):
        score("apoz", model, trace(model, (x,)), stats=stats)


def test_apoz_of_channels_behind_no_rectifier_is_one_and_their_size_tells_them_apart() -> None:
    torch.manual_seed(0)
    model, x = models.mobilenet_v2(num_classes=4).eval(), torch.randn(2, 3, 32, 32)
    stats, chart = calibrate(model, [x]), trace(model, (x,))
    apoz, size = (score(name, model, chart, stats=stats) for name in ("apoz", "activation"))
    linear = chart.labels["features.1.conv.1.weight"][0]
    assert linear is not None
    assert ((apoz[linear] > 1) & (apoz[linear] <= 1.001)).all()
    np.testing.assert_array_equal(np.argsort(apoz[linear]), np.argsort(size[linear]))
    hidden = chart.labels["features.2.conv.0.0.weight"][0]
    assert hidden is not None
    assert (apoz[hidden] < 1).all()


def test_labels_without_norm_or_filter_are_scored_by_magnitude() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.Conv2d(4, 5, 1), nn.Conv2d(5, 2, 1)).double().eval()
    chart = trace(model, (torch.randn(2, 3, 4, 4).double(),))
    scales, magnitudes = score("bn_scale", model, chart), score("l2", model, chart)
    normed, free = chart.labels["1.weight"][0], chart.labels["2.weight"][0]
    assert normed is not None
    assert free is not None
    np.testing.assert_allclose(scales[normed], model[1].weight.detach().numpy())
    np.testing.assert_array_equal(scales[free], magnitudes[free])
    only_read = (None, *chart.labels["2.weight"][1:])
    columns = dataclasses.replace(chart, labels={**chart.labels, "2.weight": only_read})
    distances = score("fpgm", model, columns)
    np.testing.assert_array_equal(distances[free], score("l2", model, columns)[free])
    assert (distances[normed] != magnitudes[normed]).all()


def test_a_group_is_on_norms_as_a_whole() -> None:
    model = models.densenet121(num_classes=4)
    chart = trace(model, (torch.randn(1, 3, 32, 32),))
    norms = [f"{path}.weight" for path, module in model.named_modules() if isinstance(module, nn.BatchNorm2d)]
    carried = np.unique(np.concatenate([chart.labels[name][0] for name in norms]))  # type: ignore[arg-type]
    assert {np.isin(group.labels, carried).mean() for group in chart.groups} <= {0.0, 1.0}


def test_filters_alike_are_the_least_important_by_fpgm() -> None:
    model = small_net()
    with torch.no_grad():
        mean = model.conv1.weight.mean(0)
        model.conv1.weight[1] = mean
    assert scored(model, data()).along("fpgm", "conv1.weight").argmin() == 1
    filters = torch.ones(6, 3, 3, 3, dtype=torch.float64)
    model.conv1.weight.data = filters
    np.testing.assert_array_equal(scored(model, data()).along("fpgm", "conv1.weight"), np.zeros(6))


def test_filters_of_transposed_convolutions_lie_on_the_second_axis() -> None:
    model = nn.Sequential(nn.ConvTranspose2d(3, 4, 2), nn.Conv2d(4, 2, 1)).double()
    chart = trace(model, (torch.randn(1, 3, 4, 4).double(),))
    filters = model[0].weight.detach().movedim(1, 0).flatten(1)
    expected = torch.cdist(filters, filters).mean(1) / 12**0.5
    labels = chart.labels["0.weight"][1]
    assert labels is not None
    np.testing.assert_allclose(score("fpgm", model, chart)[labels], expected.numpy(), rtol=1e-9)


def test_lamp_keeps_the_largest_of_every_layer_whatever_its_scale() -> None:
    assert CRITERIA.get("lamp").comparable
    model = small_net()
    with torch.no_grad():
        model.norm2.weight *= 1e-3
        model.conv2.weight *= 1e-3
        model.fc.weight *= 1e-3
    net = scored(model, data())
    assert {net("lamp")[group.labels].max() for group in net.chart.groups} == {1.0}
    for group in net.chart.groups:
        order = np.argsort(net("l2")[group.labels])
        np.testing.assert_array_equal(order, np.argsort(net("lamp")[group.labels]))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    np.testing.assert_array_equal(net("lamp")[1:], 0)


def test_missing_and_foreign_evidence() -> None:
    net = scored(small_net(), data())
    with pytest.raises(UsageError, match=r"'taylor' needs gradients of the loss .*: pass gradients=collect_gradients"):
        score("taylor", net.model, net.chart, stats=net.stats)
    with pytest.raises(UsageError, match="'apoz' needs channel statistics: pass stats="):
        score("apoz", net.model, net.chart, gradients=net.gradients)
    terms = {**net.gradients.terms, ("conv1.weight", 0): np.zeros((3, 7))}
    with pytest.raises(UsageError, match=r"parameter 'conv1\.weight' for 6 indices along axis 0, got 7"):
        score("taylor", net.model, net.chart, gradients=TaylorTerms(terms))
    with pytest.raises(UsageError, match=r"parameter 'conv1\.weight' for 6 indices along axis 0, got none"):
        score("taylor", net.model, net.chart, gradients=TaylorTerms({}))


@pytest.mark.parametrize("name", ["lamp", "fpgm", "bn_scale"])
def test_weights_that_are_not_finite_are_named(name: str) -> None:
    net = scored(small_net(), data())
    parameter = "norm1.weight" if name == "bn_scale" else "conv1.weight"
    with torch.no_grad():
        net.model.get_parameter(parameter)[1] = torch.nan
    with pytest.raises(NonFiniteError, match=f"parameter '{parameter}' holds NaN or Inf"):
        net(name)


def test_heads_are_scored_where_the_stream_that_they_read_stays() -> None:
    """No layer reads the channels of queries and keys: their size counts, whatever the layers that make them read."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
    x = torch.randn(16, 5, 16)
    result = pk.prune(layer, calibration=x, params=0.8, criterion="wanda")  # its input and output keep their size
    assert result.plan.totals()["parameters"][1] < result.plan.totals()["parameters"][0]
    assert result.max_relative_difference < 1e-9
