"""Outputs of classifiers, and models that cannot be trained."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from prunekit.errors import ModelError
from prunekit.hooks.wrappers import is_frozen, require_unfrozen
from prunekit.models.interface import auxiliary, logits
from prunekit.models.zoo import build_model
from prunekit.settings.inputs import ModelSettings


@pytest.mark.slow
@pytest.mark.parametrize(("name", "size", "weights"), [("googlenet", 64, (0.3, 0.3)), ("inception_v3", 299, (0.4,))])
def test_auxiliary_heads_count_in_training_alone(name: str, size: int, weights: tuple[float, ...]) -> None:
    model = build_model(ModelSettings(name, arguments={"init_weights": False}), num_classes=3)
    images = torch.zeros(2, 3, size, size)
    output = model(images)
    assert logits(output).shape == (2, 3)
    assert tuple(weight for weight, _ in auxiliary(output)) == weights
    assert all(head.shape == (2, 3) for _, head in auxiliary(output))
    evaluated = model.eval()(images)
    assert logits(evaluated).shape == (2, 3)
    assert auxiliary(evaluated) == ()


def test_logits_by_attribute() -> None:
    tensor = torch.zeros(2, 3)
    assert logits(tensor) is tensor
    assert logits(SimpleNamespace(logits=tensor)) is tensor


@pytest.mark.parametrize("output", [{"boxes": 1}, (torch.zeros(2, 3),), None])
def test_no_logits(output: object) -> None:
    with pytest.raises(ModelError, match=r"expected a model that returns class logits .* got"):
        logits(output)


def test_frozen() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    assert not is_frozen(model)
    model[0].requires_grad_(False)
    assert not is_frozen(model)
    require_unfrozen(model)
    model.requires_grad_(False)
    assert is_frozen(model)
    with pytest.raises(ModelError, match="Sequential: expected parameters to train, but all 4 have"):
        require_unfrozen(model)
    assert is_frozen(nn.ReLU())
