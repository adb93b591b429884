"""Training on augmented images: the same for the same seed, and nothing but training steps sees them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn
from training_models import CPU, net, splits

from prunekit.data.datasets import TensorImages
from prunekit.data.splits import Splits
from prunekit.settings.train import TrainSettings
from prunekit.training.callbacks.callback import History
from prunekit.training.loop import fit

SETTINGS = TrainSettings(epochs=2, lr=0.05)


def augmented(plain: Splits) -> Splits:
    """The same images, every part with augmentation in its settings."""

    def change(part: object) -> TensorImages:
        assert isinstance(part, TensorImages)
        return replace(part, transform=replace(part.transform, augment="crop_flip"))

    return replace(plain, train=change(plain.train), validation=change(plain.validation), test=change(plain.test))


def trained(parts: Splits, settings: TrainSettings = SETTINGS, workers: int = 0) -> tuple[nn.Module, History]:
    model = net()
    return model, fit(model, parts, settings, device=CPU, seed=1, batch=16, workers=workers)


def equal(one: nn.Module, other: nn.Module) -> bool:
    pairs = zip(one.state_dict().values(), other.state_dict().values(), strict=True)
    return all(torch.equal(first, second) for first, second in pairs)


@pytest.mark.slow
def test_runs_are_bit_equal_whatever_the_number_of_workers() -> None:
    model, history = trained(augmented(splits()))
    for workers in (0, 2):
        again, rows = trained(augmented(splits()), workers=workers)
        assert equal(model, again)
        assert [row.train_loss for row in rows.rows] == [row.train_loss for row in history.rows]
    assert not equal(model, trained(splits())[0])


def test_validation_sees_the_images_as_they_are() -> None:
    model, history = trained(augmented(splits()), TrainSettings(epochs=1, lr=0.05))
    images, labels = splits().validation.fetch(torch.arange(20))
    with torch.no_grad():
        loss = nn.functional.cross_entropy(model.eval()(images), labels).item()
    assert abs(history.rows[0].validation_loss - loss) < 1e-6
