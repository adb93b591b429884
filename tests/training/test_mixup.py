"""Training on mixed images: soft labels through the loss, and what counts as a hit."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from training_models import CPU, net, splits

from prunekit.data.augmentation import Mixing
from prunekit.data.loader import batches
from prunekit.settings.train import TrainSettings
from prunekit.tasks.classification import IMAGE_CLASSIFICATION
from prunekit.training.callbacks.callback import History
from prunekit.training.loop import fit
from prunekit.training.run_state import EpochSums

SETTINGS = TrainSettings(epochs=2, lr=0.05, mixup=0.4, cutmix=1.0)


def trained(settings: TrainSettings, workers: int = 0) -> tuple[nn.Module, History]:
    model = net()
    return model, fit(model, splits(), settings, device=CPU, seed=1, batch=16, workers=workers)


def equal(one: nn.Module, other: nn.Module) -> bool:
    pairs = zip(one.state_dict().values(), other.state_dict().values(), strict=True)
    return all(torch.equal(first, second) for first, second in pairs)


@pytest.mark.slow
def test_runs_are_bit_equal_whatever_the_number_of_workers() -> None:
    model, history = trained(SETTINGS)
    for workers in (0, 2):
        again, rows = trained(SETTINGS, workers)
        assert equal(model, again)
        assert [row.train_score for row in rows.rows] == [row.train_score for row in history.rows]
    assert not equal(model, trained(replace(SETTINGS, mixup=0.0, cutmix=0.0))[0])


def test_label_smoothing_acts_on_the_shares() -> None:
    """The first step's loss by its definition, -sum of target * log p; the target is smoothed towards 1 / classes."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(192, 4))
    expected = []
    for images, shares in batches(splits().train, 66, shuffle_seed=1, mixing=Mixing(4, 0.4)).at_epoch(1):
        target = 0.9 * shares + 0.1 / 4
        expected.append(float(-(target * F.log_softmax(model(images).detach(), 1)).sum(1).mean()))
    settings = TrainSettings(epochs=1, mixup=0.4, label_smoothing=0.1)
    history = fit(model, splits(), settings, device=CPU, seed=1, batch=66)
    assert abs(history.rows[0].train_loss - expected[0]) < 1e-5


def test_a_hit_is_the_share_of_the_class_predicted() -> None:
    shares = torch.tensor([[0.7, 0.3, 0.0], [0.7, 0.3, 0.0], [0.0, 0.4, 0.6]])
    predicted = torch.tensor([0, 1, 0])
    logits, task = F.one_hot(predicted, 3).float(), IMAGE_CLASSIFICATION
    assert abs(task.reached(task.counts(logits, shares)) - 100 * (0.7 + 0.3 + 0.0) / 3) < 1e-4
    sums = EpochSums()
    for _ in range(2):
        sums.add(1.0, task.counts(logits, torch.tensor([0, 1, 2])), 3, 3)
    assert (sums.samples, sums.counts, sums.mean_loss) == (6, [4.0, 6.0, 2.0, 2.0, 2.0], 1.0)
    assert abs(task.reached(sums.counts) - 200 / 3) < 1e-9


def test_accumulated_batches_are_mixed_each_by_itself() -> None:
    model, history = trained(replace(SETTINGS, accumulate=2))
    assert all(row.train_loss > 0 for row in history.rows)
    assert equal(model, trained(replace(SETTINGS, accumulate=2))[0])


def test_validation_is_not_mixed() -> None:
    model, history = trained(replace(SETTINGS, epochs=1))
    images, labels = splits().validation.fetch(torch.arange(20))
    with torch.no_grad():
        loss = F.cross_entropy(model.eval()(images), labels).item()
    assert abs(history.rows[0].validation_loss - loss) < 1e-6
