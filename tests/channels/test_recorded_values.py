"""Results of operators that are kept in memory or in a file."""

from __future__ import annotations

import mmap

import pytest
import torch
from torch import nn

import prunekit as pk
from prunekit.channels.trial.comparison import RecordedValues
from prunekit.utils import tensors as tensor_files

TENSORS = [
    torch.randn(3, 4, dtype=torch.float64),
    torch.randn(4, 3).T,
    torch.randn(5).bfloat16(),
    torch.tensor(2.5),
    torch.zeros(0, 3),
    torch.tensor([True, False]),
    torch.arange(6).view(2, 3)[:, 1:],
    torch.randn(2, dtype=torch.complex64),
]


@pytest.mark.parametrize("memory", [0, 100, 2**20])
def test_what_is_recorded_is_read_back(memory: int) -> None:
    values = RecordedValues(memory)
    for number, tensor in enumerate(TENSORS):
        values.add(number, "op", [tensor, None])
    for number, tensor in enumerate(TENSORS):
        name, (found, none) = values.get(number) or ("", [None, None])
        assert (name, none) == ("op", None)
        assert torch.equal(found, tensor)
        assert found.dtype == tensor.dtype
    assert values.get(len(TENSORS)) is None
    assert bool(values._memory._maps) == (memory < 2**20)


def test_a_file_that_cannot_be_written_leaves_tensors_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(size: int) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(tensor_files, "mapped_file", full)
    values = RecordedValues(0)
    values.add("a", "op", [TENSORS[0]])
    assert values.get("a") == ("op", [TENSORS[0]])


def test_a_trial_that_keeps_values_in_a_file_finds_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 4)).eval()
    x = torch.randn(2, 3, 8, 8)
    in_memory = pk.prune(model, x, macs=0.5)
    written = list[int]()
    plain = tensor_files.mapped_file

    def written_to(size: int) -> mmap.mmap:
        written.append(size)
        return plain(size)

    monkeypatch.setattr(tensor_files, "mapped_file", written_to)
    monkeypatch.setattr(tensor_files, "BLOCK", 1)
    monkeypatch.setattr(RecordedValues.__init__, "__defaults__", (0,))
    in_file = pk.prune(model, x, macs=0.5)
    assert len(written) > 3
    assert in_file.max_relative_difference == in_memory.max_relative_difference
    assert torch.equal(in_file.model(x), in_memory.model(x))
