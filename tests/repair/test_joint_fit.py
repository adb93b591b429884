"""Two layers fitted at once: derivatives against autograd, steps against dense solutions, and what it is worth."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from equivalence import randomized
from test_repair import planned
from torch import Tensor, nn
from torch.nn import functional as F

from prunekit.compaction.compact_model import compact
from prunekit.measure.verification import verify
from prunekit.repair.held_out_images import batches_of
from prunekit.repair.joint_fit import LayerPair, Linearized, conjugate_gradients, gauss_newton
from prunekit.repair.layer_samples import LayerPass, SampleGatherer, SampleRequest, SourceRequest
from prunekit.repair.repair_model import repair
from prunekit.settings.calibration import RepairSettings
from prunekit.statistics.layer_graph import find_layers
from prunekit.statistics.patches import PatchGeometry

WINDOWS, COLUMNS, HIDDEN, OUTPUTS = 40, 3, 3, 2
FIRST = PatchGeometry((3, 2), (2, 1), (0, 0), (1, 2))
SECOND = PatchGeometry((2, 3), (1, 2), (0, 0), (2, 1))


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def pair(*, rectified: bool) -> tuple[LayerPair, tuple[Tensor, Tensor]]:
    """A pair whose outputs are those of other weights, and weights to start from."""
    torch.manual_seed(0)
    inputs = drawn(WINDOWS, COLUMNS, 11, 13)
    hidden = FIRST.spatial(inputs)
    there = (torch.rand(WINDOWS, 1, *hidden) > 0.2).double()
    start = drawn(COLUMNS * FIRST.taps + 1, HIDDEN), drawn(HIDDEN * SECOND.taps + 1, OUTPUTS)
    ends = drawn(WINDOWS, OUTPUTS, *SECOND.spatial_of(hidden))
    made = LayerPair(FIRST, SECOND, inputs, there, ends, torch.zeros_like(ends), 30, rectified)
    other = tuple(weight + 0.1 * drawn(*weight.shape) for weight in start)
    return replace(made, wanted=plain(made, *other)), start


def plain(made: LayerPair, first: Tensor, second: Tensor) -> Tensor:
    hidden = F.relu(layer(made.first, made.inputs, first)) * made.there
    return made.rest + layer(made.second, hidden, second)


def layer(reading: PatchGeometry, inputs: Tensor, weight: Tensor) -> Tensor:
    """A convolution as a product with what it reads."""
    sizes = reading.spatial(inputs)
    patches = reading.patches(inputs, torch.arange(reading.rows_of(inputs)), sizes)
    return (patches @ weight[:-1] + weight[-1]).view(len(inputs), *sizes, -1).movedim(-1, 1)


@pytest.mark.parametrize("rectified", [False, True])
def test_changes_and_gradients_are_those_of_autograd(rectified: bool) -> None:
    made, start = pair(rectified=rectified)
    step, along = tuple(drawn(*weight.shape) for weight in start), torch.randn_like(made.rest)
    now = Linearized(made, start)
    end, change = torch.autograd.functional.jvp(lambda *weights: plain(made, *weights), start, step)
    counted = ((end > 0) | (made.wanted > 0)).double() if rectified else torch.ones_like(end)
    torch.testing.assert_close(now.change(step), change * counted)
    mean = along * counted * OUTPUTS / along.numel()
    _, back = torch.autograd.functional.vjp(lambda *weights: plain(made, *weights), start, mean)
    for ours, theirs in zip(now.gradient(along), back, strict=True):
        torch.testing.assert_close(ours, theirs)
    wanted, seen = (made.wanted.clamp(min=0), end.clamp(min=0)) if rectified else (made.wanted, end)
    assert now.error == pytest.approx(float((seen - wanted).square().mean()))
    assert now.bound >= now.error - 1e-12


@pytest.mark.parametrize("rectified", [False, True])
def test_steps_come_to_the_weights_that_made_the_outputs(rectified: bool) -> None:
    made, start = pair(rectified=rectified)
    weights, before, after = gauss_newton(made, start, 50)
    assert after < 1e-3 * before
    assert Linearized(made.split()[1], weights).error == pytest.approx(after)
    same, _, unmoved = gauss_newton(made, start, 0)
    assert unmoved == before
    assert all(one is other for one, other in zip(same, start, strict=True))


def test_conjugate_gradients_solve_what_a_factor_does() -> None:
    torch.manual_seed(1)
    root, right = drawn(12, 9), (drawn(2, 3), drawn(3, 1))
    matrix = root.T @ root

    def flat(step: tuple[Tensor, Tensor]) -> Tensor:
        return torch.cat([part.flatten() for part in step])

    def shaped(values: Tensor) -> tuple[Tensor, Tensor]:
        return values[:6].view(2, 3), values[6:].view(3, 1)

    inverse = torch.diag(1 / matrix.diagonal())
    found = conjugate_gradients(
        lambda step: shaped(matrix @ flat(step)), right, lambda step: shaped(inverse @ flat(step)), 30
    )
    torch.testing.assert_close(flat(found), torch.linalg.solve(matrix, flat(right)))


class Branches(nn.Module):
    """Rectified layers of which one is read once, one twice, one is summed first, and one is no layer's alone."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.bn = nn.Conv2d(3, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4)
        self.once, self.twice, self.also = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1)
        self.sum, self.head = nn.Conv2d(4, 4, 1), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn(self.stem(x)))
        x = F.relu(F.relu(self.once(x)))
        out = F.relu(self.twice(x) + x)
        return self.head(F.relu(self.sum(out) + self.also(out)).mean((2, 3)))  # type: ignore[no-any-return]


def test_only_what_one_layer_alone_reads_is_its_source() -> None:
    found = {layer.weight: layer for layer in find_layers(randomized(Branches()).eval(), torch.randn(2, 3, 6, 6))}
    sources = {name: layer.source.weight for name, layer in found.items() if layer.source is not None}
    assert sources == {"once.weight": "stem.weight"}
    assert found["once.weight"].source == found["stem.weight"]
    assert found["once.weight"].rectified


class Block(nn.Module):
    """A residual block behind a stem."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.bn0 = nn.Conv2d(3, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6)
        self.conv1, self.bn1 = nn.Conv2d(6, 8, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(8)
        self.conv2, self.short, self.head = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(6, 8, 1, 2), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn0(self.stem(x)))
        x = F.relu(self.short(x) + self.conv2(F.relu(self.bn1(self.conv1(x)))))
        return self.head(x.mean((2, 3)))  # type: ignore[no-any-return]


@pytest.mark.parametrize("size", [20, 1])
@pytest.mark.parametrize("each", [0.4, 12.0, 1000.0])
def test_what_the_layer_before_reads_makes_what_the_layer_gives(size: int, each: float) -> None:
    torch.manual_seed(2)
    model, images = randomized(Block().double()).eval(), torch.randn(20, 3, 11, 9, dtype=torch.float64)
    layer = next(found for found in find_layers(model, images[:2]) if found.weight == "conv2.weight")
    assert layer.source is not None
    source = SourceRequest(layer.source, each, torch.arange(6))
    request = SampleRequest(layer, 200, torch.arange(8), outputs=True, source=source)
    cut = layer.source.call
    gatherer = SampleGatherer(LayerPass(model), *batches_of((images,), 0.2, size, least=4), lambda *_: [cut])
    (sample,) = gatherer.take([request], 0, ahead=True)
    assert sample is not None
    assert sample.before is not None
    assert sample.there is not None
    assert sample.window_outputs is not None
    assert sample.window_others is not None
    assert len(sample.before) == {20: 8 + 4, 1: 16 + 4}[size] if each < 1 else 20
    assert each < 1000 or len(sample.window_outputs) == 20 * 6 * 5  # all of them
    conv1 = F.conv2d(sample.before, model.conv1.weight, stride=2)
    made = F.conv2d(F.relu(model.bn1(conv1)) * sample.there, model.conv2.weight, model.conv2.bias)
    torch.testing.assert_close(made.movedim(1, -1).flatten(0, -2), sample.window_outputs)
    shortcuts = model.short(F.relu(model.bn0(model.stem(images)))).movedim(1, -1).flatten(0, -2)
    at = (sample.window_others[:, None] - shortcuts).abs().amax(2) < 1e-9  # which position of all images it is of
    assert bool((at.sum(1) == 1).all())
    assert len(set(at.int().argmax(1).tolist())) == len(at)


def test_fitted_together_layers_come_nearer() -> None:
    torch.manual_seed(0)
    model = randomized(Block().double()).eval()
    images, others = (torch.randn(128, 3, 16, 16, dtype=torch.float64) for _ in range(2))
    plan = planned(model, "conv2.weight", [0, 2, 3, 5], images)
    errors = {}
    for steps in (0, 3):
        settings = RepairSettings(rows=4096, joint_steps=steps)
        masked, report = repair(model, plan, images, settings)
        assert report.kept
        joint = [layer.weight for layer in report.layers if layer.note == "together with the layer before it"]
        assert ("conv2.weight" in joint) == (steps > 0), report.layers
        small = compact(masked, plan)
        assert verify(masked, small, plan, [(images[:8],)]).max_relative_difference < 1e-9
        with torch.no_grad():
            errors[steps] = float((small(others) - model(others)).square().mean())
    assert errors[3] < 0.97 * errors[0]
