"""Modules that the deployed model does not have count in no budget of MACs."""

from __future__ import annotations

import pytest
import torch
from equivalence import randomized
from torch import Tensor, nn

import prunekit
from prunekit.channels.tracing.execution import fused_away
from prunekit.measure.model_size import count_macs

X = (torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(0)),)


class Merged(nn.Module):
    """Two convolutions beside each other, which `fuse` makes one of."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Conv2d(3, channels, 3, padding=1), nn.Conv2d(3, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.both(x) if hasattr(self, "both") else self.wide(x) + self.narrow(x)  # type: ignore[no-any-return]

    def merge(self) -> None:
        self.both = nn.Conv2d(3, self.wide.out_channels, 3, padding=1)
        del self.wide, self.narrow


class TwoHeads(nn.Module):
    """Eval mode runs both heads, train mode a third; what is deployed has the first alone."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = Merged(16), nn.BatchNorm2d(16)
        self.first, self.other = nn.Conv2d(16, 4, 3), nn.ModuleList([nn.Conv2d(16, 24, 3), nn.Conv2d(24, 4, 1)])
        self.auxiliary = nn.Conv2d(16, 4, 5)

    def forward(self, x: Tensor) -> list[Tensor]:
        x = torch.relu(self.norm(self.stem(x)) if self.norm is not None else self.stem(x))
        found = [self.first(x)]
        if self.other is not None:
            found.append(self.other[1](self.other[0](x)))
        return [*found, self.auxiliary(x)] if self.training else found

    def fuse(self, verbose: bool = True) -> TwoHeads:
        assert not verbose
        self.stem.merge()
        self.norm = self.other = None  # type: ignore[assignment]
        return self


def test_heads_that_fusing_takes_out_and_auxiliary_ones_do_not_count() -> None:
    model = randomized(TwoHeads()).eval()
    assert set(fused_away(model)) == {"norm", "other"}
    kept = 36 * 16 * (27 + 3) + 16 * 16 * 4 * 9
    chart = prunekit.trace(model, X)
    assert chart.macs() == count_macs(model, X) == kept
    assert {"auxiliary", "other.0"}.isdisjoint(chart.layer_macs())
    pruned = prunekit.prune(model, X, macs=0.5)
    left = count_macs(pruned.model, X)
    assert left == pruned.plan.channel_map.macs(pruned.plan.keep) <= 0.5 * kept
    assert pruned.model.other[0].in_channels == pruned.model.first.in_channels < 16  # type: ignore[union-attr, index]
    (note,) = [note for note in pruned.notes if note.startswith("MACs do not count")]
    assert note == "MACs do not count other: the model's own fuse() takes them out of the deployed model"
    assert model.other is not None


class Pyramid(nn.Module):
    """Has a method of the same name that is something else."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.conv, self.how = nn.Conv2d(3, 4, 3), how

    def fuse(self, *maps: Tensor) -> Tensor:
        if self.how == "raises":
            return torch.stack(maps)
        return self.conv.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize("how", ["raises", "returns"])
def test_another_method_of_that_name_takes_nothing_out(how: str) -> None:
    model = Pyramid(how)
    assert fused_away(model) == ()
    assert count_macs(model, X) == prunekit.trace(model, X).macs() == 16 * 4 * 27
