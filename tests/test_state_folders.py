"""States as files: everything comes back as it was, and what is damaged is refused."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from mutants import changed_json, changed_values, damaged_bytes, unclean
from torch.optim import SGD, Adam

from prunekit.errors import ArtifactError, ResumeError
from prunekit.utils import files as artifacts
from prunekit.utils import state_folders as states
from prunekit.utils.files import remove_leftovers
from prunekit.utils.state_folders import differences, read_state, write_state


def same(one: Any, other: Any) -> bool:
    """Equal in type and value, tensors bit by bit and as they lie in memory."""
    if isinstance(one, torch.Tensor):
        bits = [tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (one, other)]
        alike = (one.shape, one.dtype, one.stride()) == (other.shape, other.dtype, other.stride())
        return alike and torch.equal(bits[0], bits[1])
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(value, other[key]) for key, value in one.items())
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other or (one != one and other != other)


@pytest.mark.parametrize(
    "state",
    [
        {},
        {"none": None, "yes": True, "one": 1, "big": 2**70, "text": "ü\n", "third": 1 / 3, "tiny": 5e-324},
        {"inf": math.inf, "minus": -math.inf, "nan": math.nan, "zero": -0.0},
        {"list": [1, [2.0, (3, "4")], []], "empty": (), "dict": {}},
        {"state": {0: {"step": torch.tensor(3.0)}, 7: None}, "$": {"$": "tensor"}},
        {"a/b": torch.ones(1), "a": {"b": torch.zeros(2)}},
        {"nan": torch.tensor([math.nan, math.inf, -0.0]), "none": torch.empty(0, 3), "scalar": torch.tensor(True)},
        {"half": torch.randn(5).half(), "brain": torch.randn(5).bfloat16(), "whole": torch.tensor([2**62])},
        {"last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last), "turned": torch.randn(3, 4).T},
    ],
)
def test_everything_comes_back_as_it_was(state: dict[str, Any], tmp_path: Path) -> None:
    write_state(tmp_path / "state", state)
    assert same(read_state(tmp_path / "state"), state)
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["state", "state.json", "tensors.safetensors"]


def test_tensors_that_share_memory_come_back_apart(tmp_path: Path) -> None:
    values = torch.arange(4.0)
    write_state(tmp_path / "state", {"all": values, "same": values, "part": values[1:3]})
    found = read_state(tmp_path / "state")
    assert [found[name].tolist() for name in ("all", "same", "part")] == [[0, 1, 2, 3], [0, 1, 2, 3], [1, 2]]
    found["all"][1] = 9
    assert found["part"].tolist() == [1, 2]


@pytest.mark.parametrize("make", [lambda p: SGD(p, 0.1, momentum=0.9), lambda p: Adam(p, 0.1, betas=(0.8, 0.9))])
def test_optimizers_go_on_as_if_nothing_had_been(make: Callable[[Any], Any], tmp_path: Path) -> None:
    def step(optimizer: Any) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = parameter.detach().sin()
        optimizer.step()

    one, other = (make([torch.nn.Parameter(torch.linspace(0, 1, 7))]) for _ in range(2))
    step(one)
    write_state(tmp_path / "optimizer", {"state": one.state_dict()})
    other.load_state_dict(read_state(tmp_path / "optimizer")["state"])
    other.param_groups[0]["params"][0].data.copy_(one.param_groups[0]["params"][0].data)
    step(one)
    step(other)
    assert torch.equal(one.param_groups[0]["params"][0], other.param_groups[0]["params"][0])


@pytest.mark.parametrize(
    ("value", "message"), [(object(), "'a/1': .* got object"), ({1.5: 2}, "'a/1': .* keys, got 1.5")]
)
def test_what_is_not_plain_is_refused_with_its_place(value: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=message):
        write_state(tmp_path / "state", {"a": [0, value]})
    assert list(tmp_path.iterdir()) == []


def flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda folder: flip(folder / "tensors.safetensors", -1),
        lambda folder: flip(folder / "tensors.safetensors", 12),
        lambda folder: (folder / "tensors.safetensors").unlink(),
        lambda folder: (folder / "state.json").unlink(),
        lambda folder: (folder / "state.json").write_text((folder / "state.json").read_text().replace("41", "42")),
        lambda folder: (folder / "state.json").write_text((folder / "state.json").read_text()[:-9]),
        lambda folder: (folder / "state.json").write_text(json.dumps([1])),
    ],
)
def test_what_is_damaged_is_refused(spoil: Callable[[Path], object], tmp_path: Path) -> None:
    write_state(tmp_path / "state", {"epoch": 41, "weights": torch.randn(9)})
    spoil(tmp_path / "state")
    with pytest.raises(ArtifactError, match=str(tmp_path)):
        read_state(tmp_path / "state")


def test_another_format_is_not_taken_for_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(states, "FORMAT", 2)
        write_state(tmp_path / "state", {"a": 1})
    with pytest.raises(ResumeError, match="expected format 1, got 2; resume it with the version that wrote it"):
        read_state(tmp_path / "state")


@pytest.mark.skipif(os.name != "posix", reason="no such call")
def test_it_is_on_the_disk_before_it_gets_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    monkeypatch.setattr(artifacts, "sync", lambda path: synced.append(path.name))
    replace = artifacts.os.replace
    monkeypatch.setattr(artifacts.os, "replace", lambda *paths: (synced.append("named"), replace(*paths)))
    write_state(tmp_path / "state", {"a": torch.ones(1)})
    assert set(synced[: synced.index("named")]) >= {"state.json", "tensors.safetensors"}
    assert synced[-2:] == ["named", tmp_path.name]


def test_leftovers_of_killed_processes_are_removed_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / ".state.abc.tmp").mkdir()
    (tmp_path / ".state.abc.tmp" / "half").write_text("x")
    (tmp_path / ".file.abc.tmp").write_text("x")
    for name in (".hidden", "kept.tmp", "kept"):
        (tmp_path / name).write_text("x")
    remove_leftovers(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".hidden", "kept", "kept.tmp"]


def test_differences_name_the_place_and_both_values() -> None:
    there = {"lr": 0.1, "data": {"seed": 1, "old": None}, "same": [1, 2]}
    here = {"lr": 0.2, "data": {"seed": 1, "new": "x" * 99}, "same": [1, 2]}
    assert list(differences(there, here)) == [
        "lr: 0.1 there, 0.2 here",
        "data.old: None there, nothing here",
        f"data.new: nothing there, '{'x' * 56}... here",
    ]
    assert list(differences(there, there)) == []


@pytest.mark.slow
def test_mutants_are_read_or_refused(tmp_path: Path) -> None:
    """Also with the checksums that they have, as if prunekit had written them."""
    state = {"a": torch.arange(6.0).view(2, 3).t(), "b": [1, float("inf"), (2, None)], "c": {1: "x", "$": True}}
    write_state(tmp_path / "state", state)
    path, tensors = tmp_path / "state" / "state.json", tmp_path / "state" / "tensors.safetensors"
    found, whole = json.loads(path.read_text()), tensors.read_bytes()

    def signed(body: object) -> None:
        text = json.dumps(body)
        path.write_text(json.dumps({"sha256": hashlib.sha256(text.encode()).hexdigest(), "body": json.loads(text)}))
        read_state(tmp_path / "state")

    def damaged(mutant: bytes) -> None:
        path.write_bytes(mutant)
        read_state(tmp_path / "state")

    def of_tensors(mutant: bytes) -> None:
        tensors.write_bytes(mutant)
        signed({**found["body"], "tensors": hashlib.sha256(mutant).hexdigest()})

    assert unclean(signed, changed_values(found["body"], 200, seed=50)) == []
    assert unclean(damaged, changed_json(found, 200, seed=50)) == []
    assert unclean(of_tensors, damaged_bytes(whole, 200, seed=50)) == []
