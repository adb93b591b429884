"""What inspection reports of a model."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from prunekit.errors import ModelError
from prunekit.jobs.analyses.inspect import inspect
from prunekit.jobs.run.command_subject import Subject


class Residual(nn.Module):
    """A stem and one residual block: their outputs must keep the same channels."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.inner = nn.Conv2d(8, 6, 1)
        self.outer = nn.Conv2d(6, 8, 1)
        self.fc = nn.Linear(8, 5)

    def forward(self, images: Tensor) -> Tensor:
        features = self.norm(self.stem(images)).relu()
        features = features + self.outer(self.inner(features).relu())
        return self.fc(features.mean((2, 3)))


def test_groups_locks_and_macs_of_a_residual_block() -> None:
    model = Residual()
    result = inspect(Subject(model, "mine", (3, 4, 4))).figures()
    assert (result["model"], result["architecture"], result["input_shape"]) == ("mine", "Residual", [1, 3, 4, 4])
    assert sorted((group["name"], group["channels"]) for group in result["groups"]) == [("inner", 6), ("stem", 8)]
    macs = {layer["module"]: layer["macs"] for layer in result["layers"]}
    assert macs == {"stem": 8 * 27 * 16, "inner": 48 * 16, "outer": 48 * 16, "fc": 40}
    assert result["macs"] == sum(macs.values())
    assert {layer["module"]: layer["params"] for layer in result["layers"]}["stem"] == 8 * 27 + 8
    assert any(lock["module"] == "fc" and lock["channels"] == 5 for lock in result["locks"])
    assert all(lock["reason"] for lock in result["locks"])
    assert result["params"] == sum(parameter.numel() for parameter in model.parameters())
    # Of the parameters only the last bias lies on locked labels alone.
    assert result["free_share"] == pytest.approx(1 - 5 / result["params"])


class Beside(Residual):
    """A residual net with a sum in a module of its own, and another whose summand's channels are read elsewhere too."""

    def __init__(self) -> None:
        super().__init__()
        self.block = ResidualBlock()

    def forward(self, images: Tensor) -> Tensor:
        features = self.block(self.norm(self.stem(images)).relu())
        hidden = self.inner(features).relu()
        features = features + self.outer(hidden)
        return self.fc(features.mean((2, 3))) + hidden.mean((1, 2, 3))[:, None]


class ResidualBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(8, 5, 1)
        self.second = nn.Conv2d(5, 8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(self.first(x).relu())


def test_blocks_that_may_go_and_those_that_stay_are_listed() -> None:
    result = inspect(Subject(Beside(), "mine", (3, 4, 4))).figures()
    (block,) = result["blocks"]
    macs = {layer["module"]: layer["macs"] for layer in result["layers"]}
    assert (block["block"], block["layers"], block["channels"]) == ("block", ["block.first", "block.second"], 5)
    assert block["macs"] == macs["block.first"] + macs["block.second"] == 2 * 40 * 16
    assert block["share"] == pytest.approx(block["macs"] / result["macs"])
    (staying,) = result["block_locks"]
    assert set(staying) == {"block", "reason"}
    assert staying["reason"]


def test_inspection_leaves_the_model_as_it_was() -> None:
    model = Residual()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    inspect(Subject(model, "mine", (3, 4, 4)))
    assert model.training
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_a_wrong_input_is_said() -> None:
    with pytest.raises(ModelError, match="mine: the model does not run on an input of 1x4x4x4"):
        inspect(Subject(Residual(), "mine", (4, 4, 4)))
