"""Losses, counts and scores of tasks, and batches that come apart."""

from __future__ import annotations

import pickle
from collections import OrderedDict
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from prunekit.errors import DataError, UsageError
from prunekit.measure.accuracy import evaluate
from prunekit.settings.train import DistillSettings, TrainSettings
from prunekit.tasks import task as task_module
from prunekit.tasks.classification import IMAGE_CLASSIFICATION, TEXT_CLASSIFICATION
from prunekit.tasks.segmentation import SEGMENTATION
from prunekit.tasks.task import TASKS, get_task, training_loss
from prunekit.training import run_state
from prunekit.training.callbacks.selection import task_loss
from prunekit.training.run_state import EpochSums

CPU, IGNORED = torch.device("cpu"), 255


def scores(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def masks(count: int = 7, classes: int = 4) -> Tensor:
    found = torch.randint(0, classes, (count, 6, 5), generator=torch.Generator().manual_seed(1))
    found[:, 0] = IGNORED
    return found


def straightforward(predicted: Tensor, wanted: Tensor, classes: int) -> tuple[float, float]:
    """Mean IoU and pixel accuracy, pixel by pixel."""
    pairs = [(p, w) for p, w in zip(predicted.flatten().tolist(), wanted.flatten().tolist(), strict=True) if w != 255]
    found = []
    for kind in range(classes):
        union = sum(kind in pair for pair in pairs)
        if union:
            found.append(sum(pair == (kind, kind) for pair in pairs) / union)
    return 100 * sum(found) / len(found), 100 * sum(p == w for p, w in pairs) / len(pairs)


def test_segmentation_loss_is_that_of_pixels_and_half_of_the_auxiliary_heads() -> None:
    out, aux, wanted = scores(7, 4, 6, 5), scores(7, 4, 6, 5, seed=2), masks()
    rows, kept = out.movedim(1, -1)[wanted != IGNORED], wanted[wanted != IGNORED]
    plain = -F.log_softmax(rows, 1)[torch.arange(len(kept)), kept].mean()
    assert torch.allclose(SEGMENTATION.loss(out, wanted), plain)
    assert torch.allclose(SEGMENTATION.loss(OrderedDict(out=out), wanted), plain)
    both = SEGMENTATION.loss({"out": out, "aux": aux}, wanted)
    assert torch.allclose(both, plain + 0.5 * SEGMENTATION.loss(aux, wanted))
    smoothed = training_loss(SEGMENTATION, 0.1)(out, wanted)
    assert torch.allclose(smoothed, 0.9 * plain - 0.1 * F.log_softmax(rows, 1).mean())


def test_pixels_without_a_class_count_for_nothing() -> None:
    nothing = torch.full((2, 6, 5), IGNORED)
    out = scores(2, 4, 6, 5).requires_grad_()
    loss = SEGMENTATION.loss(out, nothing)
    loss.backward()
    assert float(loss.detach()) == 0
    assert out.grad is not None
    assert not out.grad.any()
    assert not SEGMENTATION.counts(out, nothing).any()
    assert SEGMENTATION.score([0] * 12) == {"mean_iou": 0.0, "pixel_accuracy": 0.0}
    with pytest.raises(DataError, match=r"classes 0\.\.3, as many as the model has, and 255; the largest is 9"):
        SEGMENTATION.loss(out, torch.full((2, 6, 5), 9))


@pytest.mark.parametrize("sizes", [(7,), (1, 3, 3), (5, 2)])
def test_mean_iou_is_that_of_all_pixels_however_batches_fall(
    sizes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A class that is only in some batches, and means of means, would tell another figure."""
    out, wanted = scores(7, 5, 6, 5), masks()  # nobody has class 4, and it is predicted
    wanted[1:][wanted[1:] == 3] = 2
    expected = straightforward(out.argmax(1), wanted, 5)
    batches = list(zip(out.split(sizes), wanted.split(sizes), strict=True))
    found = evaluate(nn.Identity(), batches, SEGMENTATION, CPU)
    assert found.n_test == 7
    assert found.interval is None
    assert list(found.values.items()) == [
        ("mean_iou", pytest.approx(expected[0], rel=1e-12)),
        ("pixel_accuracy", pytest.approx(expected[1], rel=1e-12)),
    ]
    # The same in two processes, of which the second has had the last batch.
    shares = [batches[:-1], batches[-1:]]
    monkeypatch.setattr(task_module, "gather_values", lambda mine: [mine])
    parts = [evaluate(nn.Identity(), share, SEGMENTATION, CPU, together=True) for share in shares if share]
    both = [(part.n_test, list(part.counts), None) for part in parts] + [(0, [], None)]
    monkeypatch.setattr(task_module, "gather_values", lambda mine: both)
    assert evaluate(nn.Identity(), batches, SEGMENTATION, CPU, together=True) == found


def test_sums_of_processes_of_which_one_had_no_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = [EpochSums(3.0, 4, [1.0, 4.0]), EpochSums(), EpochSums(1.0, 2, [2.0, 2.0])]
    monkeypatch.setattr(run_state, "gather_values", lambda mine: parts)
    assert EpochSums().of_all() == EpochSums(4.0, 6, [3.0, 6.0])


def test_texts_come_apart_by_name_and_score_as_classifiers() -> None:
    ids, labels = torch.ones(4, 3, dtype=torch.int64), torch.tensor([0, 1, 1, 0])
    inputs, targets = TEXT_CLASSIFICATION.unpacking({"label": labels, "input_ids": ids, "attention_mask": ids})
    assert list(inputs) == ["input_ids", "attention_mask"]
    assert targets is labels
    output = type("Output", (), {"logits": torch.eye(2)[[0, 0, 1, 0]]})()
    assert TEXT_CLASSIFICATION.score(TEXT_CLASSIFICATION.counts(output, labels)) == {"top1": 75.0}
    assert TEXT_CLASSIFICATION.loss(output, labels) == F.cross_entropy(output.logits, labels)


@pytest.mark.parametrize(
    ("name", "batch", "expected", "came"),
    [
        ("segmentation", torch.ones(2, 3, 4, 4), "masks (B, H, W)", "float32 (2, 3, 4, 4)"),
        ("segmentation", (torch.ones(2, 3, 4, 4), torch.ones(2, 4, 4)), "whole numbers", "float32 (2, 4, 4))"),
        ("segmentation", (torch.ones(2, 3, 4, 4), torch.ones(2).long()), "masks (B, H, W)", "int64 (2,))"),
        ("text_classification", {"ids": torch.ones(2, 3).long()}, "input_ids (B, tokens)", "{ids: int64 (2, 3)}"),
        ("text_classification", (torch.ones(2, 3), torch.ones(2)), "a mapping", "(float32 (2, 3), float32 (2,))"),
        ("image_classification", {"x": torch.ones(2)}, "(inputs, targets)", "{x: float32 (2,)}"),
        ("image_classification", (torch.ones(2, 3), torch.ones(3)), "as many targets, got 2 and 3", "float32 (3,)"),
    ],
)
def test_a_batch_that_a_task_cannot_unpack(name: str, batch: Any, expected: str, came: str) -> None:
    with pytest.raises(DataError) as raised:
        get_task(name).unpacking(batch, "here")
    assert str(raised.value).startswith(f"here: task {name!r} cannot unpack ")
    assert expected in str(raised.value)
    assert came in str(raised.value)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (TrainSettings(mixup=0.2), "mix the labels of images, and the task is 'other'"),
        (TrainSettings(distill=DistillSettings()), r"task 'other' has none \(`logits`\)"),
        (TrainSettings(label_smoothing=0.1), "task 'other' has none, got 0.1"),
    ],
)
def test_what_a_task_cannot_do_is_refused(settings: TrainSettings, message: str) -> None:
    assert task_loss(IMAGE_CLASSIFICATION, settings) is not None
    other = replace(IMAGE_CLASSIFICATION, name="other", logits=None, smoothed=None, labeled_images=False)
    with pytest.raises(UsageError, match=message):
        task_loss(other, settings)


@pytest.mark.parametrize("name", TASKS.declared)
def test_a_task_can_be_pickled_as_data_that_has_it_for_another_process(name: str) -> None:
    again = pickle.loads(pickle.dumps(get_task(name)))
    assert (again.name, [score.name for score in again.scores]) == (name, [one.name for one in get_task(name).scores])
