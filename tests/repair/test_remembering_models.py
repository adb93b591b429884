"""Repair of models that keep what they computed for images of a size, as detectors keep their anchors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import prunekit as pk
from prunekit.utils.context import same_attributes


class Anchored(nn.Module):
    """Makes a grid for each size, keeps it as `kept` says, and reads it behind its last layer."""

    def __init__(self, kept: str) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 24, 3, padding=1), nn.ReLU())
        self.boxes, self.sums = nn.Conv2d(24, 4, 1), nn.Conv2d(4, 4, 1)
        self.kept, self.size, self.grid, self.grids = kept, torch.Size(), torch.empty(0), dict[Any, Tensor]()

    def forward(self, x: Tensor) -> Tensor:
        found = self.boxes(self.body(x))
        if self.kept == "dictionary":
            if x.shape not in self.grids:
                self.grids[x.shape] = self.made(found)
            return self.behind(found) * self.grids[x.shape]
        if self.kept == "nothing" or self.size != x.shape:
            self.size, self.grid = x.shape, self.made(found)
        return self.behind(found) * self.grid

    def behind(self, found: Tensor) -> Tensor:
        """What comes between the last layer and the grid."""
        return self.sums(found.softmax(1)).sigmoid().exp().log1p().square()

    @staticmethod
    def made(found: Tensor) -> Tensor:
        rows = torch.arange(found.shape[-2]).float() + 0.5
        return torch.stack([rows, rows.flip(0), rows.square(), 1 / rows])[None, :, :, None]


def repaired(kept: str, memory: int) -> pk.Pruned:
    torch.manual_seed(0)
    model, images = Anchored(kept).eval(), torch.randn(40, 3, 8, 8)
    return pk.prune(model, calibration=images, macs=0.5, repair=pk.RepairSettings(memory_bytes=memory))


@pytest.mark.parametrize("kept", ["attribute", "dictionary"])
@pytest.mark.parametrize("memory", [2**33, 2**20], ids=["held", "computed again"])
def test_what_passes_left_out_is_not_remembered(kept: str, memory: int) -> None:
    found, plain = repaired(kept, memory).repair, repaired("nothing", memory).repair
    assert found is not None
    assert plain is not None
    assert (found.before, found.after) == (plain.before, plain.after)
    assert found.after < found.before


def test_attributes_are_as_they_were() -> None:
    model = Anchored("dictionary")
    model(torch.randn(2, 3, 8, 8))
    before = dict(model.grids)
    with same_attributes(model):
        model(torch.randn(2, 3, 4, 4))
        model.more, model.body = "new", nn.Sequential()  # type: ignore[assignment]
        assert len(model.grids) == 2
    assert model.grids.keys() == before.keys()
    assert not hasattr(model, "more")


class Counting(nn.Module):
    """Puts another tensor into the place of its buffer in each pass."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("passes", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        self.passes = self.passes + 1
        return x * self.passes


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
@pytest.mark.parametrize("scripted", [False, True])
def test_buffers_that_are_replaced_are_as_they_were(scripted: bool) -> None:
    part = torch.jit.script(Counting()) if scripted else Counting()
    model = nn.Sequential(part, nn.ReLU())
    with same_attributes(model):
        model(torch.ones(2))
        assert part.passes == 1
    assert part.passes == 0


def test_hooks_of_transformers_are_not_set_twice() -> None:
    """Set in a first pass, they stay, and so does the remark that they are there; twice, states are counted double."""
    from transformers import LlamaConfig, LlamaModel

    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 3, "num_attention_heads": 2}
    model, ids = LlamaModel(LlamaConfig(vocab_size=9, **sizes)).eval(), torch.arange(6)[None]
    with same_attributes(model):
        model(ids, output_hidden_states=True)
    assert len(model(ids, output_hidden_states=True).hidden_states) == 4
