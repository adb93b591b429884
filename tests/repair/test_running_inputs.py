"""A repair whose masked model reads other inputs than the dense one, as behind blocks that were pruned before."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import prunekit as pk
from prunekit.repair.repair_model import repair


class Block(nn.Module):
    """A branch that is added to the stream."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(12, 48), nn.Linear(48, 12)

    def forward(self, x: Tensor) -> Tensor:
        """Return the stream behind the block, (B, 12)."""
        x = x.clone()  # a call makes the summand, as in a whole network
        found: Tensor = x + self.down(self.up(x).relu())
        return found


def test_kept_weights_make_up_for_what_earlier_blocks_changed() -> None:
    torch.manual_seed(0)
    dense, x = Block(), torch.randn(512, 12)
    plan = pk.plan(dense, x[:2], macs=0.75)
    mixed = x @ (torch.eye(12) + 0.2 * torch.randn(12, 12))  # what the pruned blocks before it make of the stream
    alike, _ = repair(dense, plan, x)
    corrected, report = repair(dense, plan, x, running=mixed)
    same, _ = repair(dense, plan, x, running=x.clone())
    with torch.no_grad():
        errors = [float((model(mixed) - dense(x)).square().mean()) for model in (alike, corrected)]
    assert errors[1] < 0.2 * errors[0]
    assert report.after < report.before
    assert all(torch.equal(*pair) for pair in zip(alike.parameters(), same.parameters(), strict=True))
