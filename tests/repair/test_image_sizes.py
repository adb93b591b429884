"""Repair on images of several sizes, and of detectors, whose heads are compared before boxes are selected."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.models.detection import FCOS, FasterRCNN, RetinaNet
from torchvision.models.detection.anchor_utils import AnchorGenerator, DefaultBoxGenerator
from torchvision.models.detection.backbone_utils import BackboneWithFPN
from torchvision.models.detection.faster_rcnn import FastRCNNPredictor, TwoMLPHead
from torchvision.models.detection.ssd import SSD
from torchvision.ops import MultiScaleRoIAlign

import prunekit
from prunekit.planning.plan import Plan
from prunekit.repair.layer_samples import SampleWindows, crop_windows
from prunekit.repair.repair_model import repair
from prunekit.settings.calibration import RepairSettings
from prunekit.statistics.output_error import OutputComparison
from prunekit.statistics.patches import PatchGeometry

DRAWN = torch.Generator().manual_seed(0)
SIZES = ((48, 64), (64, 48), (56, 56), (40, 64))


def drawn(count: int, sizes: tuple[tuple[int, int], ...] = SIZES) -> list[Tensor]:
    """Images with smooth shades and a bright rectangle."""
    found = []
    for i in range(count):
        height, width = sizes[i % len(sizes)]
        coarse = torch.rand(1, 3, 4, 4, generator=DRAWN)
        image = F.interpolate(coarse, (height, width), mode="bilinear", align_corners=False)[0]
        top, left = (int(torch.randint(size // 2, (), generator=DRAWN)) for size in (height, width))
        image[:, top : top + height // 3, left : left + width // 3] = torch.rand(3, 1, 1, generator=DRAWN)
        found.append(image)
    return found


class Batched(nn.Module):
    """Pads the images of a batch to the largest of them, as detectors do, and returns one value for each."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.middle, self.head = nn.Conv2d(3, 12, 3, 2, 1), nn.Conv2d(12, 12, 3, 1, 1), nn.Conv2d(12, 3, 1)

    def forward(self, images: list[Tensor]) -> Tensor:
        height, width = (max(image.shape[axis] for image in images) for axis in (1, 2))
        whole = [F.pad(each, (0, width - each.shape[2], 0, height - each.shape[1])) for each in images]
        found: Tensor = self.head(self.middle(self.stem(torch.stack(whole)).relu()).relu())
        return found.mean((2, 3))


@pytest.mark.slow
def test_two_layers_are_fitted_together_where_every_batch_has_another_size() -> None:
    torch.manual_seed(0)
    growing = tuple((16 + i // 2, 36 - i // 4) for i in range(40))
    result = prunekit.prune(Batched(), calibration=drawn(40, growing), channels=0.8, criterion="l2", progress=False)
    assert result.repair is not None
    assert any(layer.note == "together with the layer before it" for layer in result.repair.layers)
    assert result.repair.after < result.repair.before / 3


def test_cropped_windows_hold_what_both_layers_compute() -> None:
    first, second = PatchGeometry((3, 3), (2, 1), (1, 1), (1, 1)), PatchGeometry((3, 3), (1, 2), (1, 0), (1, 1))
    inputs = torch.randn(4, 2, 17, 13, dtype=torch.float64, generator=DRAWN)
    one, other = (torch.randn(5, size, 3, 3, dtype=torch.float64, generator=DRAWN) for size in (2, 5))
    hidden = F.conv2d(inputs, one, None, first.stride, first.padding).relu()
    outputs = F.conv2d(hidden, other, None, second.stride, second.padding)
    windows = SampleWindows.drawn(first, second, inputs, 20, seed=0)
    taken = {"before": windows.inputs(inputs), "there": windows.there()}
    taken["window_outputs"] = second.outputs(outputs, windows.rows())
    size = (windows.size[0] - 2, windows.size[1] - 1)
    assert min(size) > 0
    cropped, smaller = dict(taken), {"there": taken["there"]}
    crop_windows([cropped, smaller], [windows.size, size], first, second)
    made = F.conv2d(cropped["before"], one, None, first.stride).relu() * cropped["there"]
    again = F.conv2d(made, other, None, second.stride)
    assert again.shape[2:] == size
    torch.testing.assert_close(again.movedim(1, -1).reshape(-1, 5), cropped["window_outputs"])


def block(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, 2, 1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU())


class Levels(nn.Module):
    """Feature maps of two levels."""

    def __init__(self) -> None:
        super().__init__()
        self.fine, self.coarse = nn.Sequential(block(3, 12), block(12, 16), block(16, 16)), block(16, 16)
        self.out_channels = [16, 16]

    def forward(self, images: Tensor) -> OrderedDict[str, Tensor]:
        fine = self.fine(images)
        return OrderedDict(fine=fine, coarse=self.coarse(fine))


def pyramid(width: int = 16) -> BackboneWithFPN:
    body = nn.Sequential(OrderedDict(one=block(3, 12), two=block(12, 16), three=block(16, 16)))
    return BackboneWithFPN(body, {"two": "0", "three": "1"}, [16, 16], width)


def anchors(ratios: tuple[float, ...]) -> AnchorGenerator:
    return AnchorGenerator(tuple((8 * 2**i,) for i in range(3)), (ratios,) * 3)


WIDTHS = (12, 16, 24, 32)
SIDES: dict[str, Any] = {"min_size": 48, "max_size": 64}


def fcos() -> nn.Module:
    return FCOS(pyramid(32), 3, anchor_generator=anchors((1.0,)), **SIDES)


def retinanet() -> nn.Module:
    return RetinaNet(pyramid(), 3, anchor_generator=anchors((0.5, 1.0)), **SIDES)


def ssd() -> nn.Module:
    return SSD(Levels(), DefaultBoxGenerator([[2], [2]], steps=[8, 16], scales=[0.15, 0.4, 0.8]), (48, 48), 3)


def faster_rcnn() -> nn.Module:
    return FasterRCNN(
        pyramid(),
        rpn_anchor_generator=anchors((0.5, 1.0)),
        box_roi_pool=MultiScaleRoIAlign(["0", "1"], 3, 2),
        box_head=TwoMLPHead(16 * 9, 24),
        box_predictor=FastRCNNPredictor(24, 3),
        rpn_pre_nms_top_n_test=20,
        rpn_post_nms_top_n_test=8,
        box_detections_per_img=4,
        **SIDES,
    )


def calibrated(build: Any, images: list[Tensor]) -> nn.Module:
    """A detector whose channels are nearly equal in pairs, as trained ones are redundant, with norms of some images."""
    torch.manual_seed(0)
    model: nn.Module = build()
    for module in model.modules():
        if isinstance(module, (nn.Conv2d, nn.Linear)) and len(module.weight) in WIDTHS:
            half = module.weight.data[: len(module.weight) // 2]
            module.weight.data[len(half) :] = half + 0.2 * half.std() * torch.randn_like(half)
    norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
    model.eval()
    for norm in norms:
        norm.momentum = None  # type: ignore[assignment]
        norm.train()
    with torch.no_grad():
        model(images)
    return model.eval()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("build", "heads"),
    [
        (fcos, {"scores", "boxes"}),  # probabilities, and the boxes of what is likely there
        (retinanet, {"scores", "boxes"}),
        (ssd, {"scores", "boxes"}),
        (faster_rcnn, {"scores", "boxes"}),
    ],
)
def test_detectors_are_repaired_by_what_their_heads_compute(build: Any, heads: set[str]) -> None:
    images = drawn(12)
    model = calibrated(build, images)
    with torch.no_grad():
        judge = OutputComparison.of(model, (images[:3],))
    assert not judge.outputs  # of boxes, and of how many there are
    assert {weight.removesuffix(".weight").split(".")[-1] for weight in judge.weights} >= heads
    result = prunekit.prune(model, calibration=images, channels=0.6, progress=False)
    assert result.repair is not None
    assert result.repair.kept
    assert result.repair.after < result.repair.before / 3


class Picking(nn.Module):
    """Looks on at positions whose score is positive, and returns as many rows."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.score, self.head = nn.Conv2d(3, 12, 3), nn.Conv2d(12, 1, 1), nn.Linear(12, 4)

    def forward(self, x: Tensor) -> Tensor:
        features = self.stem(x).relu()
        rows: Tensor = self.head(features.permute(0, 2, 3, 1)[self.score(features)[:, 0] > 0])
        return rows


def test_channels_that_are_removed_in_front_of_a_selection_are_no_error() -> None:
    torch.manual_seed(0)
    model = Picking().double().eval()
    model.stem.weight.data[6:], model.stem.bias.data[6:] = model.stem.weight.data[:6], model.stem.bias.data[:6]  # type: ignore[index]
    images = torch.randn(16, 3, 8, 8, dtype=torch.float64, generator=DRAWN)
    chart = prunekit.trace(model, images[:2])
    keep = np.ones(chart.n_labels, dtype=bool)
    keep[chart.labels["stem.weight"][0][6:]] = False  # type: ignore[index]
    judge = OutputComparison.of(model, (images[:3],))
    assert judge.weights == ("stem.weight", "score.weight")
    report = repair(model, Plan(chart, keep), images, RepairSettings(ridge=1e-9))[1]
    assert report.before > 0.1
    assert report.after < 1e-6
    assert judge.within({"stem.weight": torch.arange(0)}).weights == ("score.weight",)


class Ranking(Picking):
    """Returns the four positions that score best, as many for every image."""

    def forward(self, x: Tensor) -> Tensor:
        features = self.stem(x).relu()
        best = self.score(features).flatten(1).topk(4).indices
        rows: Tensor = self.head(
            features.flatten(2).transpose(1, 2).gather(1, best[..., None].expand(-1, -1, features.shape[1]))
        )
        return rows


def test_a_report_says_that_the_output_is_a_selection() -> None:
    torch.manual_seed(0)
    images = torch.randn(24, 3, 8, 8, generator=DRAWN)
    found = prunekit.prune(Ranking(), calibration=images, channels=0.4, criterion="l2", progress=False)
    assert found.repair is not None
    assert found.repair.selected
    assert found.repair.after > found.repair.before / 3
    assert any("select entries of the output" in note for note in found.notes)
    assert not OutputComparison.of(Batched(), (drawn(3),)).selected
