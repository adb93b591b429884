from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from prunekit.errors import ModelError, NonFiniteError, UsageError
from prunekit.statistics.taylor_terms import collect_gradients


class Net(nn.Module):
    """A linear layer, a scalar factor and a layer that is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.norm, self.unused = nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(2, 2)
        self.factor = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.fc(x)) * self.factor  # type: ignore[no-any-return]


def batches(count: int = 2) -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(0)
    return [(torch.randn(5, 4, generator=draw), torch.arange(5) % 3) for _ in range(count)]


def test_terms_are_weights_times_gradients_by_batch() -> None:
    torch.manual_seed(0)
    model = Net().eval()
    found = collect_gradients(model, batches(), F.cross_entropy).terms
    for number, (x, y) in enumerate(batches()):
        model.zero_grad()
        F.cross_entropy(model(x), y).backward()
        for name, parameter in model.named_parameters():
            gradient = torch.zeros(2) if parameter.grad is None else parameter.grad
            product = (parameter * gradient).detach().numpy()
            for axis in range(parameter.ndim):
                expected = product.sum(tuple(other for other in range(parameter.ndim) if other != axis))
                np.testing.assert_allclose(found[name, axis][number], expected, rtol=1e-5, atol=1e-9)
    assert found["fc.weight", 1].shape == (2, 4)
    assert found["fc.weight", 1].dtype == np.float64
    assert not found["unused.weight", 0].any()
    assert not any(name == "factor" for name, _ in found)


def test_the_model_is_left_as_it_was() -> None:
    model = Net().train()
    model.norm.eval()
    model.fc.weight.requires_grad_(False)
    kept = model.fc.bias.grad = torch.ones(3)
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    with torch.no_grad():
        found = collect_gradients(model, batches(), F.cross_entropy)
    assert found.terms["fc.weight", 0].any()  # frozen, and important nevertheless
    assert [model.training, model.norm.training, model.fc.weight.requires_grad] == [True, False, False]
    assert model.fc.bias.grad is kept
    assert torch.equal(kept, torch.ones(3))
    assert model.fc.weight.grad is None
    assert all(torch.equal(buffers[name], buffer) for name, buffer in model.named_buffers())


def test_an_error_leaves_the_model_as_it_was() -> None:
    model = Net().train()
    model.fc.weight.requires_grad_(False)
    message = r"batch 2: expected inputs and the targets that the loss needs, got float32 \(5, 4\) alone"
    with pytest.raises(UsageError, match=message):
        collect_gradients(model, [batches()[0], torch.randn(5, 4)], F.cross_entropy)
    with pytest.raises(UsageError, match="no batch was given"):
        collect_gradients(model, [], F.cross_entropy)
    assert model.training
    assert not model.fc.weight.requires_grad


@pytest.mark.parametrize(
    ("loss", "got"),
    [
        (lambda output, labels: F.cross_entropy(output, labels, reduction="none"), r"a tensor of shape \(5,\)"),
        (lambda output, labels: F.cross_entropy(output.detach(), labels), r"a tensor of shape \(\)"),
        (lambda output, labels: F.cross_entropy(output, labels).item(), "float"),
    ],
)
def test_losses_without_a_gradient(loss: Any, got: str) -> None:
    with pytest.raises(UsageError, match=f"loss: expected one number that depends on .*, got {got}"):
        collect_gradients(Net(), batches(), loss)


def test_what_is_not_finite_is_named() -> None:
    first, (x, y) = batches()
    with pytest.raises(NonFiniteError, match=r"gradient of parameter '.*' .* NaN or Inf in batch 2"):
        collect_gradients(Net(), [first, (x * torch.inf, y)], F.cross_entropy)
    model = Net()
    with torch.no_grad():
        model.unused.weight[0, 0] = torch.nan  # the loss does not depend on it
        model.fc.weight[0, 0] = torch.nan
    with pytest.raises(NonFiniteError, match=r"in batch 1"):
        collect_gradients(model, [first], F.cross_entropy)


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
    x, labels = torch.randn(2, 3, 12, 12, dtype=torch.float64), torch.tensor([3, 1])
    for parameter in again.parameters():
        parameter.grad = torch.ones_like(parameter)
    terms = [collect_gradients(model, [(x, labels)], F.cross_entropy) for model in (plain, again)]
    for axis, values in terms[0].terms.items():
        np.testing.assert_allclose(terms[1].terms[axis], values)
    assert all(torch.equal(p.grad, torch.ones_like(p)) for p in again.parameters() if p.grad is not None)
    with pytest.raises(ModelError, match="use_reentrant=False"):
        collect_gradients(again, [(x, labels)], F.cross_entropy, second_order=True)
