"""Memory formats: the fastest where a model computes the same in it, and the given one everywhere else."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from equivalence import assert_unchanged, snapshot
from torch import Tensor, nn
from torch.nn import functional as F

import prunekit
from prunekit.deploy.deployment_transform import transform_of
from prunekit.errors import UsageError, VerificationError
from prunekit.jobs.stages.deployment_stage import require_deployable
from prunekit.measure.causes.experiments import with_channels_last
from prunekit.measure.memory_format import in_fastest_format
from prunekit.settings.deployment import DeploySettings

IMAGES = torch.rand(32, 3, 8, 8, generator=torch.Generator().manual_seed(0))


class Net(nn.Module):
    """Two convolutions and a classifier, between which `flat` makes vectors of the feature maps."""

    def __init__(self, flat: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.a, self.b, self.head = nn.Conv2d(3, 16, 3), nn.Conv2d(16, 12, 3), nn.Linear(12 * 16, 5)
        self.flat = flat

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.flat(F.relu(self.b(F.relu(self.a(x))))))  # type: ignore[no-any-return]


class Counting(Net):
    """A network that counts its calls."""

    calls: Tensor

    def __init__(self, flat: Callable[[Tensor], Tensor]) -> None:
        super().__init__(flat)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x)


class ViewFirst(nn.Module):
    """An MLP on images."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(192, 32), nn.Linear(32, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(F.relu(self.a(x.view(-1, 192))))  # type: ignore[no-any-return]


def viewed(x: Tensor) -> Tensor:
    return x.view(x.size(0), -1)


def as_stored(x: Tensor) -> Tensor:
    return x.as_strided((len(x), x[0].numel()), (x[0].numel(), 1))


def by_strides(x: Tensor) -> Tensor:
    return x.flatten(1) * (1.0 if x.stride(1) > x.stride(3) else 2.0)


UNLIKE: dict[str, Callable[[Tensor], Tensor]] = {"view": viewed, "as_strided": as_stored, "strides": by_strides}


@pytest.mark.parametrize("flat", UNLIKE.values(), ids=UNLIKE)
def test_a_format_that_a_model_does_not_take_is_not_used(flat: Callable[[Tensor], Tensor]) -> None:
    model = Counting(flat)
    before = snapshot(model)
    assert in_fastest_format(model, IMAGES) is IMAGES
    assert_unchanged(model, before)


def test_models_that_take_it_get_it() -> None:
    model = Counting(lambda x: x.flatten(1))
    before, state = snapshot(model), torch.get_rng_state()
    laid = in_fastest_format(model, (IMAGES,))[0]
    assert laid.is_contiguous(memory_format=torch.channels_last)
    assert in_fastest_format(model, laid) is laid
    assert_unchanged(model, before)
    assert torch.equal(torch.get_rng_state(), state)
    assert model.training


def test_models_without_kernels_are_not_tried() -> None:
    model = ViewFirst()
    model.forward = None  # type: ignore[assignment, method-assign]
    assert in_fastest_format(model, IMAGES) is IMAGES


@pytest.mark.parametrize("criterion", [None, "l2", "wanda"])
@pytest.mark.parametrize("make", [lambda: Net(viewed), lambda: Net(as_stored), ViewFirst])
def test_models_are_pruned_by_samples(make: Callable[[], nn.Module], criterion: str | None) -> None:
    torch.manual_seed(0)
    model = make().eval()
    found = prunekit.prune(model, calibration=IMAGES, macs=0.6, criterion=criterion)
    assert found.max_relative_difference < 1e-9
    assert found.model(IMAGES[:4]).shape == (4, 5)


def test_layers_are_measured_alike_in_both_formats() -> None:
    torch.manual_seed(0)
    model, other = Net(viewed), Net(lambda x: x.flatten(1))
    other.load_state_dict(model.state_dict())
    first, second = (prunekit.prune(each, calibration=IMAGES, macs=0.6).model for each in (model, other))
    torch.testing.assert_close(first(IMAGES), second(IMAGES), rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("flat", [viewed, as_stored])
def test_what_asks_for_the_format_says_that_a_model_does_not_take_it(flat: Callable[[Tensor], Tensor]) -> None:
    model, wanted = Net(flat).eval(), DeploySettings(channels_last=True)
    with pytest.raises(VerificationError, match="changed copy"):
        prunekit.channels_last(model, IMAGES[:2])
    with pytest.raises(UsageError, match=r"deploy\.channels_last: .* Net does not: .*; use flatten or reshape"):
        transform_of(model, (IMAGES[:2],), wanted)
    prepared: Any = SimpleNamespace(job=SimpleNamespace(deploy=wanted), model=model, example_inputs=(IMAGES[:2],))
    with pytest.raises(UsageError, match=r"deploy\.channels_last: .* Net does not"):
        require_deployable(prepared)
    assert with_channels_last(model, (IMAGES[:2],), torch.device("cpu")) is None
