"""Diagnosis of models of other tasks: by their loss, on any targets, and in their words."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

import prunekit as pk
from prunekit.errors import DataError
from prunekit.tasks.segmentation import SEGMENTATION
from prunekit.tasks.task import Score, Task, pair


class Detector(nn.Module):
    """Normalizes pixels itself, and returns its loss in train mode."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.norm, self.head = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Linear(8, 2)

    def forward(self, x: Tensor, targets: Any = None) -> Any:
        found = self.head(self.norm(self.stem((x - 0.5) / 0.25)).relu().mean((2, 3)))
        if not self.training:
            return [{"found": each} for each in found]
        return (found - torch.stack([each["wanted"] for each in targets])).square().mean()


class Silent:
    def update(self, output: Any, targets: Any) -> None: ...

    def compute(self) -> float:
        return 0.0


TASK = Task(
    "finding",
    lambda output, targets: output,
    None,
    (Score("found", "found", float),),
    metric=Silent,
    loss_inputs=lambda model, example, targets: (*example, targets),
    loss_in_train_mode=True,
    samples="photos",
)


def photos() -> tuple[Tensor, list[dict[str, Tensor]]]:
    torch.manual_seed(1)
    return torch.rand(16, 3, 8, 8).mul(0.25 * 12**0.5).add(0.07), [{"wanted": torch.rand(2)} for _ in range(16)]


def test_a_model_that_computes_its_loss_is_diagnosed_with_its_targets() -> None:
    model = Detector()
    found = pk.diagnose(model, [photos()], task=TASK, optimizer=SGD(model.parameters(), lr=0.01))
    assert found.healthy, str(found)
    assert found.skipped == {}
    assert {"loss", "sharpness", "lr"} == found.figures.keys()
    assert "(16 training photos, loss" in found.verdict
    with pytest.raises(DataError, match=r"task 'finding' cannot unpack float32 .*: expected \(inputs, targets\)"):
        pk.diagnose(model, [photos()[0]], task=TASK)


def test_inputs_that_neither_data_nor_model_normalize_are_found() -> None:
    class Plain(Detector):
        def forward(self, x: Tensor, targets: Any = None) -> Any:
            return super().forward(x * 0.25 + 0.5, targets)

    (fault,) = pk.diagnose(Plain(), [photos()], task=TASK).findings
    assert fault.kind == "input_normalization"
    assert fault.advice.startswith("subtract the mean")


def test_faults_are_said_in_the_words_of_the_task() -> None:
    texts = photos()[0].repeat(2, 1, 1, 1), photos()[1] * 2
    found = pk.diagnose(Detector(), [texts], task=TASK)
    assert [fault.kind for fault in found.findings] == ["duplicated_data"]
    assert found.findings[0].came == "16 of 32 are copies of one before"
    assert found.findings[0].expected.endswith("of the photos equal to another")


def test_pixels_that_do_not_count_are_no_wrong_labels() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 2, 1))
    masks = torch.randint(0, 2, (8, 6, 6))
    masks[:, 0] = 255
    images = torch.randn(8, 3, 6, 6)
    found = pk.diagnose(model, [(images, masks)], task="segmentation")
    assert found.healthy, str(found)
    assert found.figures["loss"] == pytest.approx(float(SEGMENTATION.loss(model(images), masks).detach()))
    with pytest.raises(DataError, match=r"masks: expected classes 0\.\.1"):
        pk.diagnose(model, [(images, masks + (masks < 2) * 5)], task="segmentation")


def test_an_embedding_that_is_always_read_at_one_row_is_no_fault() -> None:
    class Tokens(nn.Module):
        def __init__(self, stuck: bool) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.words, self.kind, self.head = nn.Embedding(20, 8), nn.Embedding(2, 8), nn.Linear(8, 3)
            if stuck:
                self.words.weight.data.fill_(0.5)

        def forward(self, ids: Tensor) -> Tensor:
            scores: Tensor = self.head((self.words(ids) + self.kind(torch.zeros_like(ids))).mean(1))
            return scores

    batch = (torch.randint(0, 20, (16, 5)), torch.arange(16) % 3)
    assert pk.diagnose(Tokens(False), [batch]).healthy
    kinds = {(fault.kind, fault.module) for fault in pk.diagnose(Tokens(True), [batch]).findings}
    assert ("constant_channels", "words") in kinds


def test_a_loss_of_ones_own_is_taken_before_that_of_the_task() -> None:
    model = nn.Linear(4, 2)
    batch = (torch.randn(8, 4), torch.arange(8) % 2)
    task = replace(SEGMENTATION, name="other", unpack=pair)
    found = pk.diagnose(model, [batch], task=task, loss=lambda output, labels: output.square().mean())
    assert found.figures["loss"] == pytest.approx(float(model(batch[0]).square().mean().detach()))
