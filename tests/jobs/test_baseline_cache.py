"""The cached dense model: taken whole or not at all."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from mutants import changed_arrays, changed_json, unclean
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from prunekit.jobs.run.baseline_cache import _read_baseline, _save_baseline
from prunekit.training.callbacks.callback import ClampRow, EpochRow, History
from prunekit.utils.state_folders import TENSORS, TEXT, read_state, write_state

ROW = EpochRow(1, 0.1, 2.0, None, 1.5, 50.0, 100.0, 1.0, 0)
HISTORY = History((ROW,), 1, (ClampRow("weights", "0", "value", 0.1, 0.5),))


class Masked(nn.Sequential):
    """A model with a buffer of minus infinity, which is what it should hold."""

    def __init__(self) -> None:
        super().__init__(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4, 2))
        self.register_buffer("mask", torch.full((2, 2), -torch.inf).triu(1))


def net(value: float) -> nn.Module:
    model = Masked()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)
    return model


def read(path: Path, model: nn.Module, said: list[str]) -> Any:
    prepared: Any = SimpleNamespace(model=model)
    return _read_baseline(prepared, path, said.append)


def saved(folder: Path) -> Path:
    path = folder / "baseline"
    _save_baseline(path, net(3.0), HISTORY, pytest.fail)
    return path


def weights(path: Path) -> dict[str, Tensor]:
    found: dict[str, Tensor] = read_state(path)["weights"]
    return found


def rewrite(path: Path, tensors: dict[str, Tensor]) -> None:
    """Write other tensors, with the checksum that they have, as if prunekit had written them."""
    write_state(path, read_state(path) | {"weights": tensors})


def test_a_cached_model_comes_back_with_its_history(tmp_path: Path) -> None:
    model, path = net(0.0), saved(tmp_path)
    found = read(path, model, said := [])
    assert (found.rows, found.clamps, found.reused, said) == (HISTORY.rows, HISTORY.clamps, True, [])
    assert all(torch.equal(one, other) for one, other in zip(model.parameters(), net(3.0).parameters(), strict=True))
    rewrite(path, weights(path))
    assert read(path, model, said) is not None


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda all_: {name: one for name, one in all_.items() if name != "3.bias"}, "'3.bias' is not there"),
        (lambda all_: all_ | {"4.bias": torch.ones(2)}, "'4.bias' is not the model's; did you mean"),
        (lambda all_: all_ | {"3.bias": torch.ones(3)}, r"'3.bias': expected (2,) of torch.float32, got (3,)"),
        (lambda all_: all_ | {"0.weight": torch.tensor([5.0])}, "expected (4, 3, 3, 3) of torch.float32, got (1,)"),
        (lambda all_: all_ | {"0.weight": all_["0.weight"].long()}, "got (4, 3, 3, 3) of torch.int64"),
        (lambda all_: all_ | {"0.weight": all_["0.weight"] * torch.nan}, "'0.weight': it has NaN or Inf in it"),
        (lambda all_: all_ | {"mask": torch.full((2, 2), -torch.inf)}, "'mask': it has NaN or Inf in it"),
    ],
)
def test_tensors_that_do_not_fit_are_a_miss_and_change_nothing(
    change: Callable[[dict[str, Tensor]], dict[str, Tensor]], says: str, tmp_path: Path
) -> None:
    model, path = net(0.0), saved(tmp_path)
    rewrite(path, change(weights(path)))
    assert read(path, model, said := []) is None
    assert says in said[0]
    assert all(not bool(one.any()) for one in model.parameters())


def test_exchanged_tensors_of_one_shape_are_a_miss_by_their_checksum(tmp_path: Path) -> None:
    path = saved(tmp_path)
    file = path / TENSORS
    tensors = load_file(file)
    save_file(tensors | {"weights/1.weight": tensors["weights/1.running_mean"].clone()}, file)
    assert read(path, net(0.0), said := []) is None
    assert said == [f"dense: {file}: missing, or not as prunekit wrote it (checksum differs); trained again"]


def test_a_cache_that_cannot_be_written_does_not_end_a_run(tmp_path: Path) -> None:
    (tmp_path / "cache").touch()
    _save_baseline(tmp_path / "cache" / "baseline", net(3.0), HISTORY, (said := list[str]()).append)
    assert said[0].startswith("dense: not cached, so that another run trains it again: ")


@pytest.mark.slow
def test_mutants_are_a_miss_or_are_whole(tmp_path: Path) -> None:
    path, initial = saved(tmp_path), net(0.0).state_dict()
    facts, tensors = json.loads((path / TEXT).read_text()), weights(path)
    arrays = {name: one.numpy() for name, one in tensors.items()}
    training = read_state(path)["training"]

    def use(_: Any) -> None:
        model = net(0.0)
        found = read(path, model, [])
        now = model.state_dict()
        assert found is not None or all(torch.equal(now[name], value) for name, value in initial.items())
        assert found is None or all(bool(one.isfinite().all()) for one in model.parameters())

    def of_facts(mutant: bytes) -> None:
        (path / TEXT).write_bytes(mutant)
        use(mutant)

    def of_training(mutant: bytes) -> None:
        with suppress(ValueError, TypeError):  # what no state can hold
            write_state(path, {"weights": tensors, "training": json.loads(mutant)})
        use(mutant)

    def of_arrays(mutant: dict[str, np.ndarray[Any, Any]]) -> None:
        kept = {name: array for name, array in mutant.items() if array.dtype.kind in "biufc"}
        native = {name: torch.from_numpy(array.astype(array.dtype.newbyteorder("="))) for name, array in kept.items()}
        rewrite(path, {name: one.contiguous() for name, one in native.items()})
        use(mutant)

    assert unclean(of_arrays, changed_arrays(arrays, 200, seed=50)) == []
    assert unclean(of_training, changed_json(json.loads(json.dumps(training)), 200, seed=50)) == []
    rewrite(path, tensors)
    assert unclean(of_facts, changed_json(facts, 200, seed=50)) == []
