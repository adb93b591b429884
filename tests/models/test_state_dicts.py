"""State dicts from files, and what cannot be one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

from prunekit.errors import ModelError
from prunekit.models.state_dicts import load_weights

State = dict[str, Tensor]


def small(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 2, 1))


def prefixed(prefix: str) -> Callable[[State], State]:
    return lambda state: {prefix + name: value for name, value in state.items()}


@pytest.mark.parametrize(
    "wrap",
    [
        lambda state: state,
        lambda state: {"state_dict": state, "epoch": 3},
        lambda state: {"model": state},
        prefixed("module."),
        prefixed("_orig_mod."),
        prefixed("module._orig_mod."),
        prefixed("_orig_mod.module."),
        lambda state: {"model_state_dict": prefixed("module.")(state)},
        lambda state: {name: value for name, value in state.items() if "num_batches" not in name},
    ],
)
def test_every_usual_wrapping(tmp_path: Path, wrap: Callable[[State], Any]) -> None:
    trained, model = small(0), small(1)
    torch.save(wrap(dict(trained.state_dict())), tmp_path / "w.pt")
    load_weights(model, tmp_path / "w.pt")
    for name, value in trained.state_dict().items():
        assert torch.equal(model.state_dict()[name], value)


def test_safetensors(tmp_path: Path) -> None:
    trained, model = small(0), small(1)
    safetensors.torch.save_file(dict(trained.state_dict()), tmp_path / "w.safetensors")
    load_weights(model, tmp_path / "w.safetensors")
    assert all(torch.equal(model.state_dict()[name], value) for name, value in trained.state_dict().items())


def test_every_difference_is_listed_and_nothing_is_loaded(tmp_path: Path) -> None:
    model = small(1)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = dict(small(0).state_dict())
    state["extra"] = state.pop("1.weight")
    state["2.weight"] = torch.zeros(9, 4, 1, 1)
    torch.save(state, tmp_path / "w.pt")
    with pytest.raises(ModelError) as caught:
        load_weights(model, tmp_path / "w.pt")
    message = str(caught.value)
    assert "w.pt" in message
    assert (
        "1 missing: 1.weight; 1 unexpected: extra; 1 of another shape: 2.weight (9, 4, 1, 1) for (2, 4, 1, 1)"
        in message
    )
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


class Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (Path("evil"),))


def test_pickled_objects_are_refused_and_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"state_dict": Evil()}, "w.pt")
    with pytest.raises(ModelError, match="pickled objects are never loaded: save model"):
        load_weights(small(0), Path("w.pt"))
    assert not Path("evil").exists()


@pytest.mark.parametrize("name", ["w.pt", "w.safetensors"])
@pytest.mark.parametrize("content", [b"", b"damaged"])
def test_a_damaged_file(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ModelError, match=f"{name}: expected a state dict of tensors, but "):
        load_weights(small(0), tmp_path / name)


@pytest.mark.parametrize("content", [[1, 2], {}, {"epoch": 3}, torch.zeros(2)])
def test_a_file_without_a_state_dict(tmp_path: Path, content: Any) -> None:
    torch.save(content, tmp_path / "w.pt")
    with pytest.raises(ModelError, match=r"expected a state dict \(names to tensors\), got a "):
        load_weights(small(0), tmp_path / "w.pt")


def test_a_missing_file_or_another_kind(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="there is no such file"):
        load_weights(small(0), tmp_path / "none.pt")
    with pytest.raises(ModelError, match=r"ends in \.safetensors, \.pt, \.pth"):
        load_weights(small(0), tmp_path / "weights.bin")
