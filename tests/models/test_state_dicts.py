"""State dicts from files, and what cannot be one."""

from __future__ import annotations

import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from mutants import changed_arrays, damaged_bytes, unclean
from torch import Tensor, nn

from prunekit.errors import ModelError
from prunekit.models.state_dicts import load_weights, tensor_problem

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


STRANGE: dict[str, tuple[Callable[[State], State], str]] = {
    "complex": (lambda s: {**s, "0.weight": s["0.weight"] * 1j}, "0.weight: complex64 for float32"),
    "bool": (lambda s: {**s, "0.bias": s["0.bias"] > 0}, "0.bias: bool for float32"),
    "int64": (lambda s: {**s, "0.weight": (s["0.weight"] * 10).long()}, "0.weight: int64 for float32"),
    "nan": (lambda s: {**s, "0.weight": s["0.weight"] * float("nan")}, "0.weight: there are NaN among its values"),
    "nan of a buffer": (
        lambda s: {**s, "1.running_var": s["1.running_var"] * float("nan")},
        "1.running_var: there are",
    ),
    "infinite": (lambda s: {**s, "2.bias": s["2.bias"] / 0}, "2.bias: there are infinite numbers"),
    "too large": (lambda s: {**s, "2.bias": s["2.bias"].double() + 1e300}, "2.bias: there are infinite numbers"),
    "part of a batch": (
        lambda s: {**s, "1.num_batches_tracked": torch.tensor(1.5)},
        "1.num_batches_tracked: float32 for int64",
    ),
    "number as key": (lambda s: {**s, 0: s["0.weight"]}, r"names to tensors\), got a dict"),  # type: ignore[dict-item]
}


@pytest.mark.parametrize("name", STRANGE)
def test_values_of_another_kind_are_refused_and_nothing_is_loaded(name: str, tmp_path: Path) -> None:
    change, message = STRANGE[name]
    model = small(1)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    torch.save(change(dict(small(0).state_dict())), tmp_path / "w.pt")
    with pytest.raises(ModelError, match=message):
        load_weights(model, tmp_path / "w.pt")
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def test_tensors_that_are_no_plain_ones_are_named() -> None:
    own = torch.zeros(2, 2)
    assert "of layout sparse_coo" in str(tensor_problem(torch.eye(2).to_sparse(), own))
    assert tensor_problem(torch.eye(2).to(torch.float8_e4m3fn), own) is None
    assert tensor_problem(torch.full((2,), -torch.inf), own) is None  # a mask that is added to attention scores


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_another_precision_of_everything_is_taken(dtype: torch.dtype, tmp_path: Path) -> None:
    """Some checkpoints are `{name: value.half()}`, whose counts are floating-point numbers too."""
    model, trained = small(1), small(0)
    torch.save({name: value.to(dtype) for name, value in trained.state_dict().items()}, tmp_path / "w.pt")
    load_weights(model, tmp_path / "w.pt")
    for name, value in trained.state_dict().items():
        assert torch.equal(model.state_dict()[name], value.to(dtype).to(value.dtype))


@pytest.mark.slow
def test_damaged_weights_are_loaded_or_refused(tmp_path: Path) -> None:
    sound = {name: value.numpy() for name, value in small(0).state_dict().items()}

    def read(arrays: dict[str, Any]) -> None:
        native = {name: array.astype(array.dtype.newbyteorder("=")) for name, array in arrays.items()}
        torch.save({name: torch.from_numpy(array) for name, array in native.items()}, tmp_path / "w.pt")
        load_weights(model, tmp_path / "w.pt")
        assert all(value.isfinite().all() for value in model.state_dict().values())

    model = small(1)
    assert unclean(read, changed_arrays(sound, 150, seed=0)) == []
    for suffix, save in ((".pt", torch.save), (".safetensors", safetensors.torch.save_file)):
        path = tmp_path / f"x{suffix}"
        save(dict(small(0).state_dict()), path)

        def read_bytes(mutant: bytes, path: Path = path) -> None:
            path.write_bytes(mutant)
            load_weights(model, path)

        assert unclean(read_bytes, damaged_bytes(path.read_bytes(), 100, seed=0)) == []


def test_what_a_damaged_file_says_can_be_printed(tmp_path: Path) -> None:
    """A message of torch that quotes bytes of the file, here a name of a byte order with a zero in it."""
    torch.save(small(0).state_dict(), tmp_path / "a.pt")
    with zipfile.ZipFile(tmp_path / "a.pt") as sound, zipfile.ZipFile(tmp_path / "w.pt", "w") as damaged:
        for name in sound.namelist():
            damaged.writestr(name, b"lit\0\x1b[31m" if name.endswith("byteorder") else sound.read(name))
    with pytest.raises(ModelError, match="expected a state dict of tensors, but") as caught:
        load_weights(small(1), tmp_path / "w.pt")
    assert "lit" in str(caught.value)
    assert str(caught.value).isprintable()
