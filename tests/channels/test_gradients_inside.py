"""Models whose forward takes gradients itself, as of an energy by positions."""

from __future__ import annotations

import pytest
import torch
from equivalence import randomized
from torch import Tensor, nn
from torch.nn import functional as F

import prunekit
from prunekit.errors import ModelError
from prunekit.measure.model_size import count_macs

POSITIONS = torch.randn(3, 4, generator=torch.Generator().manual_seed(1))


class Potential(nn.Module):
    """The energy of some coordinates, and minus its gradient; recorded in forward itself or by the caller."""

    def __init__(self, *, own: bool, norm: bool = False) -> None:
        super().__init__()
        self.own = own
        self.first, self.second, self.last = nn.Linear(4, 24), nn.Linear(24, 20), nn.Linear(20, 1)
        self.norm = nn.LayerNorm(20) if norm else nn.Identity()

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        with torch.set_grad_enabled(self.own or torch.is_grad_enabled()):
            at = positions.detach().requires_grad_()
            hidden = F.silu(self.second(F.softplus(self.first(at))))
            energy = self.last(self.norm(hidden)).sum()
            energy.backward(retain_graph=self.training)
            assert at.grad is not None
            return energy, -at.grad


@pytest.mark.parametrize("own", [True, False], ids=["in forward", "by the caller"])
def test_they_are_pruned_to_what_the_masked_model_computes(own: bool) -> None:
    model = randomized(Potential(own=own)).eval()
    pruned = prunekit.prune(model, (POSITIONS,), macs=0.4)
    assert pruned.max_relative_difference <= 1e-12
    assert count_macs(pruned.model, (POSITIONS,)) <= 0.4 * count_macs(model, (POSITIONS,))
    with prunekit.masked(model, pruned.plan):
        for masked, small in zip(model(POSITIONS), pruned.model(POSITIONS), strict=True):
            torch.testing.assert_close(masked, small)
    assert prunekit.summary(model, POSITIONS).macs == count_macs(model, (POSITIONS,))
    assert prunekit.calibrate(model, [POSITIONS]).layers


def test_a_backward_operator_without_a_rule_is_named_and_locks_what_it_reads() -> None:
    chart = prunekit.trace(Potential(own=True, norm=True), (POSITIONS,))
    (lock,) = [lock for lock in chart.locks if "native_layer_norm_backward has no rule" in lock.reason]
    assert lock.channels == 20
    assert [group.module for group in chart.groups] == ["first"]


def test_what_runs_a_model_in_pieces_says_that_it_cannot() -> None:
    images = torch.randn(32, 4)
    with pytest.raises(ModelError, match=r"takes gradients inside its forward, which the criterion 'elimination'"):
        prunekit.prune(Potential(own=False), calibration=images, macs=0.5)
