"""Criteria that look at what layers read, and at second derivatives: each against its paper, written down directly."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest
import torch
from criteria_nets import Scored, data, scored, small_net
from torch import Tensor, nn
from torch.nn import functional as F

from prunekit.channels.trace import trace
from prunekit.criteria.scoring import score
from prunekit.errors import NonFiniteError, UsageError
from prunekit.statistics.channel_stats_collector import calibrate
from prunekit.statistics.layer_stats import StatsKey
from prunekit.statistics.taylor_terms import collect_gradients

READS = {"conv1.weight": ("conv2", 1), "conv2.weight": ("fc", 4)}
"""In `SmallNet`: a weight, the layer that reads its channels, and how many of its inputs one channel is."""


@pytest.fixture(scope="module")
def net() -> Scored:
    return scored(small_net(), data())


def inputs(net: Scored, path: str) -> np.ndarray:
    """(channels, positions) What a layer reads on all the data."""
    seen: list[Tensor] = []
    module = net.model.get_submodule(path)
    handle = module.register_forward_pre_hook(lambda m, args: seen.append(args[0].movedim(1, 0).flatten(1)))
    with torch.no_grad():
        for images, _ in data():
            net.model(images)
    handle.remove()
    return torch.cat(seen, 1).numpy()


def columns(net: Scored, path: str) -> np.ndarray:
    """(channels, outputs x taps)"""
    weight: np.ndarray = net.model.get_parameter(f"{path}.weight").detach().numpy()
    return weight.swapaxes(0, 1).reshape(weight.shape[1], -1)


def check(net: Scored, criterion: str, value: Callable[[np.ndarray, np.ndarray, np.ndarray], float]) -> None:
    """Compares with `value`, which gets an input, the weight that reads it, and the indices of one channel."""
    for name, (path, size) in READS.items():
        x, w = inputs(net, path), columns(net, path)
        expected = [value(x, w, np.arange(first, first + size)) for first in range(0, len(x), size)]
        np.testing.assert_allclose(net.along(criterion, name), expected, rtol=1e-7, atol=1e-9 * max(expected))


def test_wanda_is_sun_et_al_2024(net: Scored) -> None:
    def value(x: np.ndarray, w: np.ndarray, index: np.ndarray) -> float:
        norms = np.linalg.norm(x, axis=1) / np.sqrt(x.shape[1])
        return float((np.abs(w) * norms[:, None])[index].mean())

    check(net, "wanda", value)


def hessian(net: Scored, images: Tensor, labels: Tensor) -> tuple[dict[str, slice], Tensor, Tensor, Tensor]:
    """Where each parameter lies in the vector of all, that vector, and gradient and Hessian of the loss."""
    shapes = {name: p.shape for name, p in net.model.named_parameters()}
    flat = torch.cat([p.detach().flatten() for p in net.model.parameters()])
    places, start = {}, 0
    for name, shape in shapes.items():
        places[name] = slice(start, start + shape.numel())
        start += shape.numel()

    def loss(vector: Tensor) -> Tensor:
        weights = {name: vector[place].view(shapes[name]) for name, place in places.items()}
        return F.cross_entropy(torch.func.functional_call(net.model, weights, (images,)), labels)

    gradient = torch.func.grad(loss)(flat)
    return places, flat, gradient, torch.func.jacrev(torch.func.grad(loss))(flat)


def test_second_order_taylor_is_molchanov_et_al_2019(net: Scored) -> None:
    squares = []
    for images, labels in data():
        places, w, g, h = hessian(net, images, labels)
        terms = (g * w - w * (h @ w) / 2)[places["conv1.weight"]].view(6, -1).sum(1)
        reads = (g * w - w * (h @ w) / 2)[places["conv2.weight"]].view(5, 6, -1).sum((0, 2))
        squares.append((terms**2 + reads**2) / 2)
    expected = torch.stack(squares).mean(0).numpy()
    np.testing.assert_allclose(net.along("taylor2", "conv1.weight"), expected, rtol=1e-7, atol=1e-12)


def test_obd_is_lecun_et_al_1990_on_average(net: Scored) -> None:
    images, labels = data()[0]
    places, w, _, h = hessian(net, images, labels)
    exact = (h.diagonal() * w**2)[places["fc.weight"]].view(4, 20).sum(0).numpy()
    many = [
        collect_gradients(net.model, [(images, labels)], F.cross_entropy, second_order=True, seed=seed)
        for seed in range(60)
    ]
    found = np.array([terms.diagonal["fc.weight", 1][0] for terms in many])  # type: ignore[index]
    error = found.std(0) / len(many) ** 0.5
    assert (np.abs(found.mean(0) - exact) <= 4 * error + 1e-12).all()


def test_obd_is_exact_where_the_hessian_is_diagonal() -> None:
    class Scales(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.tensor([[1.0, -2.0, 0.5]], dtype=torch.float64))

        def forward(self, x: Tensor) -> Tensor:
            return self.weight * x

    x = torch.tensor([[1.0, 2.0, 3.0]], dtype=torch.float64)
    terms = collect_gradients(Scales(), [(x, torch.zeros(1))], lambda out, _: (out**2).sum() / 2, second_order=True)
    assert terms.diagonal is not None
    np.testing.assert_allclose(terms.diagonal["weight", 1][0], [1, 16, 2.25])


def test_dead_and_constant_channels_are_scored() -> None:
    model = small_net()
    with torch.no_grad():
        model.norm1.weight[[1, 4]] = 0
        model.norm1.bias[1], model.norm1.bias[4] = -1, 2
    net = scored(model, data())
    along = net.along("wanda", "conv1.weight")
    assert along[1] == pytest.approx(0, abs=1e-9 * along.max())
    assert np.isfinite(along).all()


def test_what_other_channels_make_up_for_does_not_count_for_wanda() -> None:
    alone, paired = small_net(), small_net()
    with torch.no_grad():
        for model in (alone, paired):
            model.norm1.bias += 2  # so that all channels are seen
        for module in (paired.conv1, paired.norm1):
            for tensor in (*module.parameters(), *module.buffers()):
                if tensor.ndim:
                    tensor[3] = tensor[2]
    before, after = scored(alone, data()), scored(paired, data())
    assert after.along("wanda", "conv1.weight")[2] == before.along("wanda", "conv1.weight")[2]


class Encoder(nn.Module):
    """A transformer block with its own attention, between two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.out = nn.Linear(5, 12), nn.Linear(12, 3)
        self.block = nn.TransformerEncoderLayer(12, 3, 20, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.block(self.stem(x)).mean(1))  # type: ignore[no-any-return]


def test_attention_heads_and_mlp_widths() -> None:
    torch.manual_seed(0)
    model, draw = Encoder().double().eval(), torch.Generator().manual_seed(0)
    tokens = [torch.randn(7, 6, 5, dtype=torch.float64, generator=draw) for _ in range(2)]
    chart = trace(model, (tokens[0],))
    stats = calibrate(model, tokens)
    joint = chart.labels["block.self_attn.out_proj.weight"][1]
    assert joint is not None
    labels, positions = chart.deciding(joint)  # whole heads, and positions in all of them
    weight = model.block.self_attn.out_proj.weight.detach().numpy()
    rms = stats["block.self_attn.out_proj", "input", 0].rms
    expected = (np.abs(weight).mean(0) * rms).reshape(3, 4).mean(1).repeat(4)
    found = score("wanda", model, chart, stats=stats)
    np.testing.assert_allclose(found[labels], expected)
    np.testing.assert_allclose(found[positions], np.tile((np.abs(weight).mean(0) * rms).reshape(3, 4).mean(0), 3))
    np.testing.assert_allclose(
        score("activation_rms", model, chart, stats=stats)[labels], rms.reshape(3, 4).mean(1).repeat(4)
    )
    labeled = [(batch, torch.arange(7) % 3) for batch in tokens]
    gradients = collect_gradients(model, labeled, F.cross_entropy, second_order=True)
    for name in ("l2", "fpgm", "activation", "activation_rms", "wanda", "taylor", "taylor2", "obd"):
        scores = score(name, model, chart, stats=stats, gradients=gradients)
        heads, widths = scores[labels], scores[chart.labels["block.linear1.weight"][0]]  # type: ignore[index]
        assert len(np.unique(heads)) == 3, name
        assert len(np.unique(widths)) > 10, name


def test_what_attention_hides_is_measured() -> None:
    torch.manual_seed(0)
    model, draw = Encoder().double().eval(), torch.Generator().manual_seed(0)
    tokens = [torch.randn(4, 6, 5, dtype=torch.float64, generator=draw) for _ in range(2)]
    chart = trace(model, (tokens[0],))
    stats = calibrate(model, tokens)
    joint = chart.labels["block.self_attn.out_proj.weight"][1]
    assert joint is not None
    heads, positions = chart.deciding(joint)
    read = stats["block.self_attn.out_proj", "input", 0]
    found = score("activation", model, chart, stats=stats)
    np.testing.assert_allclose(found[heads], read.mean_abs.reshape(3, 4).mean(1).repeat(4))
    np.testing.assert_allclose(found[positions], np.tile(read.mean_abs.reshape(3, 4).mean(0), 3))
    apoz = score("apoz", model, chart, stats=stats)
    assert ((apoz[heads] >= 1) & (apoz[heads] <= 1.001)).all()
    np.testing.assert_array_equal(np.argsort(apoz[heads]), np.argsort(found[heads]))
    widths = chart.labels["block.linear1.weight"][0]
    assert widths is not None
    np.testing.assert_allclose(apoz[widths], 1 - stats["block.linear2", "input", 0].zero_fraction)


def test_each_says_what_it_needs(net: Scored) -> None:
    first = dataclasses.replace(net.gradients, curvature=None, diagonal=None)
    cases = {
        "wanda": r"'wanda' needs channel statistics: pass stats=",
        "taylor2": r"'taylor2' needs second derivatives beside gradients .*labeled.*second_order=True\)",
        "obd": r"'obd' needs second derivatives",
    }
    for name, message in cases.items():
        stats = None if name == "wanda" else net.stats
        with pytest.raises(UsageError, match=message):
            score(name, net.model, net.chart, stats=stats, gradients=first)
    layers = net.stats.layers
    few = dataclasses.replace(net.stats, layers={key: each for key, each in layers.items() if key.module == "conv2"})
    with pytest.raises(UsageError, match="'wanda': no input was measured for 5 of 5 channels of group 'conv2'"):
        score("wanda", net.model, net.chart, stats=few)
    read = StatsKey("conv2", "input", 0)
    foreign = dataclasses.replace(net.stats, layers={read: layers[StatsKey("fc", "input", 0)]})
    with pytest.raises(UsageError, match="input of 'conv2': the channel map has 6 channels, the statistics 20"):
        score("wanda", net.model, net.chart, stats=foreign)


def test_operators_without_second_derivative_are_refused() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Hardsigmoid(), nn.Linear(4, 2))
    with pytest.raises(UsageError, match="second_order: an operator of the model has no second derivative"):
        collect_gradients(model, [(torch.randn(2, 3), torch.tensor([0, 1]))], F.cross_entropy, second_order=True)


def test_weights_that_are_not_finite_are_named(net: Scored) -> None:
    broken = scored(small_net(), data())
    with torch.no_grad():
        broken.model.get_parameter("conv2.weight")[1] = torch.nan
    with pytest.raises(NonFiniteError, match=r"parameter 'conv2\.weight' holds NaN or Inf"):
        broken("wanda")
