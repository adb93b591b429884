"""Measured sensitivity by the loss and the scores of any task, also of models that select what they return."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import prunekit as pk
from prunekit.channels.trace import trace
from prunekit.compaction.compact_model import compact
from prunekit.measure.group_sensitivity import measure_sensitivity
from prunekit.planning.plan import Plan
from prunekit.planning.sensitivity_curves import keep_in_group
from prunekit.tasks.segmentation import SEGMENTATION, mean_iou, pixels
from prunekit.tasks.task import Score, Task

CLASSES = 3


class Segmenter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.head = nn.Conv2d(2, 8, 3, padding=1), nn.Conv2d(8, CLASSES, 1)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"out": self.head(self.stem(x).relu())}


def scenes() -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(1)
    masks = torch.randint(0, CLASSES, (12, 6, 6), generator=draw)
    masks[:, 0] = 255
    return torch.randn(12, 2, 6, 6, generator=draw, dtype=torch.float64), masks


def test_points_have_the_loss_and_the_scores_of_the_task() -> None:
    model = Segmenter().double().eval()
    images, masks = scenes()
    chart = trace(model, images[:2])
    (group,) = chart.groups
    found = measure_sensitivity(
        model, chart, {"stem": group.labels}, list(zip(images.split(5), masks.split(5), strict=True)), task=SEGMENTATION
    )["stem"]
    with torch.no_grad():
        for point in found:
            plan = Plan(chart, keep_in_group(chart, group.labels, point.kept))
            want, got = (net(images)["out"] for net in (model, compact(model, plan).eval()))
            assert point.scores["mean_iou"] == pytest.approx(mean_iou(pixels(got, masks).double()))
            parts = [
                F.cross_entropy(*part, ignore_index=255) for part in zip(got.split(5), masks.split(5), strict=True)
            ]
            means = sum(float(part) * count for part, count in zip(parts, (5, 5, 2), strict=True)) / 12
            assert point.loss == pytest.approx(means)
            kl = F.kl_div(got.log_softmax(1), want.log_softmax(1), log_target=True, reduction="none").sum(1).mean()
            assert point.kl == pytest.approx(float(kl), abs=1e-12)
    assert list(found[0].row()) == ["kept", "error", "kl", "loss", "mean_iou", "pixel_accuracy"]


class Picker(nn.Module):
    """Scores places, and returns those above a limit: as many for each image as there are."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.score = nn.Conv2d(2, 8, 3, padding=1), nn.Conv2d(8, 1, 1)

    def forward(self, x: Tensor, targets: Any = None) -> Any:
        scores = self.score(self.stem(x).relu())
        if self.training:
            assert targets is not None, "training needs targets"
            return {"loss": scores.square().mean()}
        return [{"places": (each[0] > 0).nonzero().float(), "scores": each[0][each[0] > 0]} for each in scores]


class Share:
    """The share of images of which the right number of places is found."""

    def __init__(self) -> None:
        self.right: list[bool] = []

    def update(self, output: Any, targets: Any) -> None:
        self.right += [len(each["places"]) == want["count"] for each, want in zip(output, targets, strict=True)]

    def compute(self) -> float:
        return sum(self.right) / len(self.right)


PICKING = Task(
    "picking",
    lambda output, targets: output["loss"],
    None,
    (Score("found", "found", lambda share: 100 * float(share)),),
    metric=Share,
    loss_inputs=lambda model, example, targets: (*example, targets),
    loss_in_train_mode=True,
    samples="images",
)


def test_models_that_select_what_they_return_are_compared_before_that() -> None:
    model = Picker().eval()
    images = scenes()[0].float()
    with torch.no_grad():
        targets = [{"count": len(each["places"])} for each in model(images)]
    chart = trace(model, images[:3])
    (group,) = chart.groups
    found = measure_sensitivity(
        model, chart, {"stem": group.labels}, [(images[:6], targets[:6]), (images[6:], targets[6:])], task=PICKING
    )["stem"]
    assert (found[0].error, found[0].scores, found[0].loss) == (0.0, {"found": 100.0}, None)
    small = pruned(model, chart, group.labels, found[-1].kept)
    maps = [net.score(net.stem(images).relu()).detach() for net in (model, small)]
    error = (maps[1] - maps[0]).square().mean() / maps[0].var(correction=0)
    assert found[-1].error == pytest.approx(float(error), rel=1e-4)
    assert found[-1].scores["found"] < 50


def pruned(model: nn.Module, chart: Any, labels: Any, kept: int) -> Any:
    return compact(model, Plan(chart, keep_in_group(chart, labels, kept))).eval()


def test_sensitivity_of_a_task_in_one_call() -> None:
    images, masks = scenes()
    loader = [{"picture": images.float(), "classes": masks}]
    task = replace(SEGMENTATION, name="mine", unpack=lambda batch: (batch["picture"], batch["classes"]))
    found = pk.sensitivity(Segmenter(), loader, measured_on=loader, task=task)
    (points,) = found.measured.values()
    assert points[0].scores.keys() == {"mean_iou", "pixel_accuracy"}
    assert {"mean_iou", "loss"} < found.points()[0].keys()
    assert "top1" not in found.points()[0]
