"""Saliency against captum, and against a model whose gradient is known."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from captum.attr import Saliency
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torchvision import models

from prunekit.errors import ModelError, UsageError
from prunekit.inspection.visualize.class_maps import class_activation_map, saliency
from prunekit.statistics.taylor_terms import collect_gradients


def images(size: int = 32) -> Tensor:
    return torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def test_saliency_is_captums_largest_channel(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model, x = models.resnet18(num_classes=4).double().eval(), images()
    found = saliency(model, x, target=[2, 0])
    expected = Saliency(model).attribute(x.clone().requires_grad_(), target=torch.tensor([2, 0]), abs=True).amax(1)
    torch.testing.assert_close(found.values, expected)
    assert found.layer is None
    assert all(parameter.grad is None for parameter in model.parameters())


class Squares(nn.Module):
    """Sums of squares, one for each class: the gradient at x is 2 x."""

    def forward(self, x: Tensor) -> Tensor:
        return x.square_().flatten(2).sum(2)  # overwrites what it is given


def test_images_that_a_model_overwrites_are_left_alone() -> None:
    x = images(8)
    torch.testing.assert_close(saliency(Squares(), x, target=1).values, 2 * x[:, 1].abs())
    assert torch.equal(x, images(8))


def test_models_without_a_gradient_and_wrong_images_are_refused() -> None:
    with pytest.raises(ModelError, match="no gradient with respect to the image"):
        saliency(nn.Sequential(nn.Flatten(), nn.Linear(192, 3)).double().apply(_detach), images(8))
    with pytest.raises(ModelError, match="expected a model of image_classification, which returns logits"):
        saliency(nn.Flatten(2), images(8))
    with pytest.raises(UsageError, match=r"images: expected one or more, \(B, C, H, W\), got .*\(3, 8, 8\)"):
        saliency(Squares(), images(8)[0])


def _detach(module: nn.Module) -> None:
    module.register_forward_pre_hook(lambda _, inputs: tuple(value.detach() for value in inputs))


class Checkpointed(nn.Module):
    """Computes its stages again while the backward pass runs, in the way that refuses `torch.autograd.grad`."""

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.stem, self.head, self.reentrant = nn.Conv2d(3, 8, 3), nn.Linear(8, 4), reentrant
        self.stage = nn.Sequential(nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.stem(x))
        x = checkpoint(self.stage, x, use_reentrant=True) if self.reentrant else self.stage(x)
        return self.head(x.mean((2, 3)))  # type: ignore[no-any-return]


def test_reentrant_checkpointing_changes_no_gradient() -> None:
    torch.manual_seed(0)
    plain, again = Checkpointed(reentrant=False).double(), Checkpointed(reentrant=True).double()
    again.load_state_dict(plain.state_dict())
    x, labels = images(12), torch.tensor([3, 1])
    for parameter in again.parameters():
        parameter.grad = torch.ones_like(parameter)
    want, got = (saliency(model, x).values for model in (plain, again))
    torch.testing.assert_close(got, want)
    want, got = (class_activation_map(model, x, "stem").values for model in (plain, again))
    torch.testing.assert_close(got, want)
    terms = [collect_gradients(model, [(x, labels)], nn.functional.cross_entropy) for model in (plain, again)]
    for axis, values in terms[0].terms.items():
        np.testing.assert_allclose(terms[1].terms[axis], values)
    assert all(torch.equal(p.grad, torch.ones_like(p)) for p in again.parameters() if p.grad is not None)
    with pytest.raises(ModelError, match="use_reentrant=False"):
        collect_gradients(again, [(x, labels)], nn.functional.cross_entropy, second_order=True)
