"""Top-1 accuracy and its interval."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from prunekit.errors import DataError
from prunekit.measure.accuracy import evaluate
from prunekit.tasks.classification import IMAGE_CLASSIFICATION, wilson_interval

CPU = torch.device("cpu")


class Echo(nn.Module):
    """Predicts the class that the image says; in train mode it is always wrong."""

    def forward(self, images: Tensor) -> Tensor:
        assert torch.is_inference_mode_enabled()
        return nn.functional.one_hot((images[:, 0, 0, 0].long() + self.training) % 10, 10).float()


def batches(predicted: list[int], labels: list[int], size: int) -> list[tuple[Tensor, Tensor]]:
    images = torch.tensor(predicted).float()[:, None, None, None]
    return list(zip(images.split(size), torch.tensor(labels).split(size), strict=True))


@pytest.mark.parametrize("size", [1, 3, 8])
def test_hits_are_counted(size: int) -> None:
    model = Echo()
    model.train()
    data = batches([0, 1, 2, 3, 4, 5, 6, 7], [0, 1, 2, 3, 4, 5, 0, 0], size)
    result = evaluate(model, data, IMAGE_CLASSIFICATION, CPU)
    assert (result.values["top1"], result.counts[0], result.n_test) == (75.0, 6, 8)
    assert result.interval == wilson_interval(6, 8)
    assert model.training


@pytest.mark.parametrize("size", [1, 7, 40])
def test_chance_is_what_the_most_frequent_class_gives(size: int) -> None:
    labels = [3] * 20 + [0] * 12 + [9] * 8
    constant = evaluate(Echo(), batches([3] * 40, labels, size), IMAGE_CLASSIFICATION, CPU)
    assert (constant.chance, constant.values["top1"], constant.at_chance) == (50.0, 50.0, True)
    slightly = evaluate(Echo(), batches([3] * 20 + [0] * 4 + [1] * 16, labels, size), IMAGE_CLASSIFICATION, CPU)
    assert (slightly.values["top1"], slightly.at_chance) == (60.0, True)  # [44.6, 73.7]: 24 of 40 may be luck
    knowing = evaluate(Echo(), batches(labels[:30] + [1] * 10, labels, size), IMAGE_CLASSIFICATION, CPU)
    assert (knowing.values["top1"], knowing.at_chance) == (75.0, False)
    assert knowing.figures().items() >= {"chance": 50.0, "at_chance": False, "correct": 30}.items()


def test_no_images() -> None:
    with pytest.raises(DataError, match="expected at least one image"):
        evaluate(Echo(), [], IMAGE_CLASSIFICATION, CPU)


@pytest.mark.parametrize(
    ("correct", "count", "low", "high"),
    [  # Newcombe 1998, Statistics in Medicine 17:857, table I, method 3
        (81, 263, 25.53, 36.62),
        (15, 148, 6.24, 16.05),
        (0, 20, 0.0, 16.11),
        (1, 29, 0.61, 17.18),
    ],
)
def test_published_intervals(correct: int, count: int, low: float, high: float) -> None:
    assert wilson_interval(correct, count) == pytest.approx((low, high), abs=0.006)
    mirrored = wilson_interval(count - correct, count)
    assert mirrored == pytest.approx((100 - high, 100 - low), abs=0.006)
    assert 0 <= mirrored[0] <= mirrored[1] <= 100
