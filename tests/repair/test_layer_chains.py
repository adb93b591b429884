"""What lies between a layer and the sum it goes into, and how its weight lies, make no difference to its fit."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from equivalence import randomized
from torch import Tensor, nn
from torch.nn import functional as F

from prunekit.channels.trace import trace
from prunekit.planning.plan import Plan
from prunekit.repair.held_out_images import batches_of
from prunekit.repair.layer_samples import LayerPass, SampleRequest
from prunekit.repair.repair_model import repair
from prunekit.repair.repair_report import RepairReport
from prunekit.settings.calibration import RepairSettings
from prunekit.statistics.layer_graph import find_layer_graph, find_layers

IMAGES = torch.randn(48, 4, 6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
ALL = RepairSettings(rows=10**6, held_out=0.25)


class Channels(nn.Module):
    """A stream to which two branches of two 1x1 convolutions each are added."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Conv2d(4, 6, 3, padding=1), nn.Linear(6, 3)
        self.up = nn.ModuleList(nn.Conv2d(6, 12, 1) for _ in range(2))
        self.down = nn.ModuleList(nn.Conv2d(12, 6, 1) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for i in range(2):
            x = x + self.branch(x, i)
        return self.head(x.mean((2, 3)))  # type: ignore[no-any-return]

    def branch(self, x: Tensor, i: int) -> Tensor:
        return self.down[i](F.relu(self.up[i](x)))  # type: ignore[no-any-return]


class Windows(Channels):
    """The same by linear layers over the last axis, in windows of shifted positions, with a gain."""

    def __init__(self, of: Channels) -> None:
        super().__init__()
        self.stem, self.head = of.stem, of.head
        self.gamma = nn.Parameter(torch.linspace(0.5, 2, 6).double()[:, None, None])
        self.up = nn.ModuleList(nn.Linear(6, 12).double() for _ in range(2))
        self.down = nn.ModuleList(nn.Linear(12, 6).double() for _ in range(2))
        with torch.no_grad():
            for ours, theirs in zip([*self.up, *self.down], [*of.up, *of.down], strict=True):
                ours.weight.copy_(theirs.weight.view_as(ours.weight))
                ours.bias.copy_(theirs.bias)
            for down in self.down:
                down.weight /= self.gamma[:, :, 0]
                down.bias /= self.gamma[:, 0, 0]

    def branch(self, x: Tensor, i: int) -> Tensor:
        x = x.permute(0, 2, 3, 1).roll((1, 2), (1, 2))  # (N, 6, 6, C)
        x = x.reshape(len(x), 2, 3, 2, 3, 6).transpose(2, 3).reshape(-1, 9, 6)  # windows of 3 x 3
        x = self.down[i](F.relu(self.up[i](x)))
        x = x.view(-1, 2, 2, 3, 3, 6).transpose(2, 3).reshape(-1, 6, 6, 6)
        x = torch.roll(x, shifts=(-1, -2), dims=(1, 2))[:, :, :6].contiguous()
        return self.gamma * x.permute(0, 3, 1, 2)


class Transposed(Channels):
    """The same by products with weights that lie as (inputs, outputs)."""

    def __init__(self, of: Channels) -> None:
        super().__init__()
        self.stem, self.head = of.stem, of.head
        self.up, self.down = nn.ModuleList(), nn.ModuleList()
        self.ups, self.downs = (
            nn.ParameterList(nn.Parameter(layer.weight.detach().flatten(1).T.clone()) for layer in layers)
            for layers in (of.up, of.down)
        )
        self.biases, self.others = (
            nn.ParameterList(nn.Parameter(layer.bias.detach().clone()) for layer in layers)
            for layers in (of.up, of.down)
        )

    def branch(self, x: Tensor, i: int) -> Tensor:
        tokens = x.permute(0, 2, 3, 1)
        hidden = F.relu(torch.addmm(self.biases[i], tokens.reshape(-1, 6), self.ups[i]))
        out = torch.addmm(self.others[i], hidden, self.downs[i])
        return out.view(tokens.shape).permute(0, 3, 1, 2)


class Turned(Transposed):
    """The same by products with transposes of weights that lie as (outputs, inputs)."""

    def __init__(self, of: Channels) -> None:
        super().__init__(of)
        for parameters in (self.ups, self.downs):
            for i, parameter in enumerate(parameters):
                parameters[i] = nn.Parameter(parameter.detach().T.clone())

    def branch(self, x: Tensor, i: int) -> Tensor:
        tokens = x.permute(0, 2, 3, 1)
        hidden = F.relu(torch.addmm(self.biases[i], tokens.reshape(-1, 6), self.ups[i].t()))
        out = torch.addmm(self.others[i], hidden, self.downs[i].T)
        return out.view(tokens.shape).permute(0, 3, 1, 2)


class PerPixel(Channels):
    """The same, with views that need the channels of a pixel together, or apart; what decides looks at memory."""

    def __init__(self, of: Channels) -> None:
        super().__init__()
        self.stem, self.head, self.up, self.down = of.stem, of.head, of.up, of.down

    def branch(self, x: Tensor, i: int) -> Tensor:
        out = self.down[i](F.relu(self.up[i](x)))
        pixels = out.permute(0, 2, 3, 1)
        if i or not pixels.is_contiguous():
            pixels = pixels.contiguous()
        rows = pixels.view(-1, 6).view(len(x), 36, 6).transpose(1, 2)
        apart = rows.clone(memory_format=torch.contiguous_format).view(len(x), 6 * 36).unflatten(1, (6, 6, 6))
        rows = apart.contiguous(memory_format=torch.channels_last).permute(0, 2, 3, 1).view(-1, 6)
        return rows.view(pixels.shape).permute(0, 3, 1, 2)


def pruned(model: nn.Module, weights: list[str], axis: int, removed: list[int], images: Tensor = IMAGES) -> Plan:
    """A plan that removes the same channels along an axis of some weights."""
    chart = trace(model, (images[:2],))
    keep = np.ones(chart.n_labels, dtype=bool)
    for weight in weights:
        labels = chart.labels[weight][axis]
        assert labels is not None
        assert labels[removed].all()
        keep[labels[removed]] = False
    return Plan(chart, keep)


@pytest.fixture(scope="module")
def plain() -> Channels:
    torch.manual_seed(0)
    model = randomized(Channels().double()).eval()
    assert isinstance(model, Channels)
    return model


@pytest.fixture(scope="module")
def wanted(plain: Channels) -> RepairReport:
    return repair(plain, pruned(plain, ["down.0.weight", "down.1.weight"], 1, [0, 3, 7]), IMAGES, ALL)[1]


@pytest.mark.parametrize(
    ("kind", "weights", "axis"),
    [
        (Windows, ["down.0.weight", "down.1.weight"], 1),
        (Transposed, ["downs.0", "downs.1"], 0),
        (Turned, ["downs.0", "downs.1"], 1),
        (PerPixel, ["down.0.weight", "down.1.weight"], 1),
    ],
)
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_the_fit_is_that_of_plain_convolutions(
    plain: Channels,
    wanted: RepairReport,
    kind: type[Channels],
    weights: list[str],
    axis: int,
    layout: torch.memory_format,
) -> None:
    model, images = kind(plain).eval(), IMAGES.contiguous(memory_format=layout)  # type: ignore[call-arg]
    torch.testing.assert_close(model(images), plain(IMAGES))
    _, report = repair(model, pruned(model, weights, axis, [0, 3, 7], images), images, ALL)
    assert wanted.after < 0.5 * wanted.before
    assert report.before == pytest.approx(wanted.before)
    assert report.after == pytest.approx(wanted.after, rel=1e-6)
    named = {layer.weight: layer for layer in report.layers}
    for ours, theirs in zip(weights, ("down.0.weight", "down.1.weight"), strict=True):
        expected = next(layer for layer in wanted.layers if layer.weight == theirs)
        assert (named[ours].applied, expected.applied) == ("patch", "patch")
        assert named[ours].after == pytest.approx(expected.after, rel=1e-6)


def test_what_lies_behind_a_layer_is_found(plain: Channels) -> None:
    model = Windows(plain).eval()
    found = {layer.weight: layer for layer in find_layers(model, IMAGES[:2])}
    assert found["up.0.weight"].rectified
    assert found["up.0.weight"].total is None
    last = found["down.1.weight"]
    assert len(last.moves) == 6  # a contiguous tensor is handed on
    assert last.gain is not None
    torch.testing.assert_close(last.gain, model.gamma.detach().flatten())
    assert last.ready == last.total


class Sliced(nn.Module):
    """A branch of which the stream takes but some positions, turned around."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        stream = self.one(x)
        return stream[:, 1:].transpose(0, 1) + self.two(x)[:, 1:].transpose(0, 1)


def test_the_other_summand_lands_where_the_layer_s_values_go() -> None:
    model, x = Sliced().eval(), torch.randn(8, 5, 4)
    layer = next(layer for layer in find_layers(model, x[:2]) if layer.weight == "two.weight")
    run, (batches, _) = LayerPass(model), batches_of((x,), 0.25, 8)
    run.learn((x[:2],))
    run.take([SampleRequest(layer, 10**6, outputs=True)], batches[0], None, 0, layer.ready + 1)
    others = model.one(batches[0].inputs[0]).detach()
    others[:, 0] = 0
    torch.testing.assert_close(run.taken[0].tensors["others"], others.flatten(0, 1))


class Shared(nn.Module):
    """A tied weight, a bias that is no parameter, a gain that varies within a channel, and a transposed convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.layer, self.scaled = nn.Embedding(7, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.table = nn.Parameter(torch.rand(5, 6))
        self.wide, self.up = nn.Linear(6, 8), nn.ConvTranspose1d(8, 4, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens)
        x = x + self.table * self.scaled(x)
        x = F.linear(x, self.layer.weight, self.layer.bias * 2)
        return self.up(self.wide(x).mT).mean(2) @ F.linear(x, self.words.weight).mean((0, 1))[:4, None]  # type: ignore[no-any-return]


def test_what_cannot_be_fitted_is_left_and_named() -> None:
    torch.manual_seed(0)
    model, tokens = randomized(Shared()).eval(), torch.randint(0, 7, (32, 5))
    found = find_layer_graph(model, tokens[:2])
    assert {layer.weight: layer.calls for layer in found.layers} == {
        "scaled.weight": 1, "wide.weight": 1, "words.weight": 2,
    }  # fmt: skip
    assert all(layer.gain is None and layer.total is None for layer in found.layers)
    plan = pruned(model, ["wide.weight"], 0, [1, 5], tokens)
    repaired, report = repair(model, plan, tokens, RepairSettings(rows=4096))
    notes = {layer.weight: layer.note for layer in report.layers if not layer.applied}
    assert notes["up.weight"] == "read by conv_transpose1d, not by a convolution or linear layer"
    assert notes["words.weight"] == "its weight is used 2 times in a forward pass"
    assert torch.equal(repaired.words.weight, model.words.weight)  # type: ignore[union-attr,arg-type]


class Two(nn.Module):
    """Token numbers and a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.up, self.down = nn.Embedding(9, 8), nn.Linear(8, 16), nn.Linear(16, 3)

    def forward(self, tokens: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        x = self.down(F.gelu(self.up(self.words(tokens))))
        return tokens, (x * mask[:, :, None]).sum(1) / mask.sum(1, keepdim=True)


def test_several_inputs_that_are_no_images() -> None:
    torch.manual_seed(0)
    model, tokens = randomized(Two()).eval(), torch.randint(0, 9, (64, 6))
    mask = (torch.rand(64, 6) < 0.7).float()
    mask[:, 0] = 1
    chart = trace(model, (tokens[:2], mask[:2]))
    labels, keep = chart.labels["down.weight"][1], np.ones(chart.n_labels, dtype=bool)
    assert labels is not None
    keep[labels[:8]] = False
    _, report = repair(model, Plan(chart, keep), (tokens, mask), RepairSettings(rows=4096))
    assert report.kept
    assert report.after < 0.5 * report.before
