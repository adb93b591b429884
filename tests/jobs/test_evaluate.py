"""Accuracy of a target on the test split, and what cannot be evaluated."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from prunekit.data.sources import load_splits
from prunekit.errors import ModelError, UsageError
from prunekit.jobs.analyses.evaluate import evaluate
from prunekit.jobs.run.command_subject import Subject
from prunekit.settings.inputs import DataSettings

CPU = torch.device("cpu")
DATA = DataSettings(image_size=8, batch=100)


class Constant(nn.Module):
    """Says the same class for every image."""

    def __init__(self, answer: int, classes: int = 10) -> None:
        super().__init__()
        scores = torch.zeros(classes)
        scores[answer] = 1
        self.scores = nn.Parameter(scores)

    def forward(self, images: Tensor) -> Tensor:
        return self.scores.expand(len(images), -1) * 1.0


def test_the_test_split_and_nothing_else_is_counted() -> None:
    splits = load_splits(DATA)
    right = int((splits.test.labels == 3).sum())
    result = evaluate(Subject(Constant(3), "constant", (3, 8, 8)), DATA, CPU).figures()
    assert (result["correct"], result["n_test"]) == (right, len(splits.test))
    assert result["top1"] == pytest.approx(100 * right / len(splits.test))
    assert result["low"] < result["top1"] < result["high"]
    assert (result["model"], result["params"], result["macs"], result["device"]) == ("constant", 10, 0, "cpu")


def test_a_target_with_images_of_its_own_is_tested_on_them() -> None:
    splits = load_splits(DATA)
    result = evaluate(Subject(Constant(0), "constant", (3, 8, 8), splits), None, CPU).figures()
    assert result["n_test"] == len(splits.test)


def test_the_images_decide_the_shape_that_macs_are_counted_for() -> None:
    model = nn.Sequential(nn.Conv2d(3, 10, 1, bias=False), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    assert evaluate(Subject(model, "conv", (3, 224, 224)), DATA, CPU).figures()["macs"] == 3 * 10 * 8 * 8


@pytest.mark.parametrize(
    ("target", "data", "error", "expected"),
    [
        (Subject(Constant(0), "mine", (3, 8, 8)), None, UsageError, "mine: expected images to test on"),
        (Subject(Constant(0), "mine", (3, 8, 8), trained=False), DATA, ModelError, "expected trained weights"),
        (Subject(Constant(0, 7), "mine", (3, 8, 8)), DATA, ModelError, "expected 10 scores, .* got 7"),
        (Subject(nn.Conv2d(1, 2, 1), "mine", (3, 8, 8)), DATA, ModelError, "does not run on an input of 1x3x8x8"),
    ],
)
def test_what_cannot_be_evaluated(
    target: Subject, data: DataSettings | None, error: type[Exception], expected: str
) -> None:
    with pytest.raises(error, match=expected):
        evaluate(target, data, CPU)
