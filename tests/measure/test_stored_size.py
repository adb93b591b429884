"""Sizes of a weights file: as files have them, for models and for folders, with and without a package for zstd."""

from __future__ import annotations

import sys
import zlib
from pathlib import Path

import pytest
import torch
from torch import nn

import prunekit as pk
from prunekit.errors import ArtifactError, UsageError
from prunekit.measure.model_size import stored_sizes


def half() -> nn.Sequential:
    """Half of its weights are zeros."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 4))
    with torch.no_grad():
        model[0].weight[::2] = 0
        model[0].bias[::2] = 0
    return model


def test_sizes_are_those_of_the_files(tmp_path: Path) -> None:
    result = pk.prune(half(), torch.randn(2, 128), channels=0.5)
    with torch.no_grad():
        result.model[0].weight[:, ::2] = 0  # type: ignore[index, union-attr, operator]
    found = stored_sizes(result)
    plain, bits = (pk.save(result, tmp_path / str(how), compress=how) for how in (False, True))
    assert found.plain_bytes == (plain / "model.safetensors").stat().st_size
    assert found.bitmask_bytes == (bits / "model.safetensors").stat().st_size
    assert found.figures() == stored_sizes(result.model).figures() == stored_sizes(plain).figures()
    assert found.figures() == stored_sizes(str(bits)).figures()
    assert found.bitmask_bytes < 0.6 * found.plain_bytes
    assert found.plain_compressed_bytes < 0.7 * found.plain_bytes
    assert found.bitmask_compressed_bytes <= found.bitmask_bytes


def test_zeros_are_counted_and_shown() -> None:
    model = half()
    found = stored_sizes(model)
    zeros = sum(int((tensor == 0).sum()) for tensor in model.parameters())
    assert found.zeros == pytest.approx(zeros / sum(tensor.numel() for tensor in model.parameters()))
    assert repr(found).startswith("<StoredSizes: 137 kB plain, 74.9 kB as bitmask, 48.5 %")
    assert [row["form"] for row in found.rows()] == ["plain", "bitmask"]
    assert "bitmask  74.9 kB    54.8 %" in str(found)
    assert stored_sizes(nn.Sequential()).zeros == 1


def test_zlib_stands_in_and_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("compression", "compression.zstd", "zstandard"):
        monkeypatch.setitem(sys.modules, name, None)
    result = pk.prune(half(), torch.randn(2, 128), channels=0.5)
    found = stored_sizes(result)
    content = (pk.save(result, tmp_path / "small") / "model.safetensors").read_bytes()
    assert found.compressor == "zlib"
    assert "by zlib" in str(found)
    assert found.plain_compressed_bytes == len(zlib.compress(content))


def test_zstd_is_that_of_its_package() -> None:
    zstandard = pytest.importorskip("zstandard")
    found = stored_sizes(half())
    assert found.compressor == "zstd"
    assert zstandard.ZstdCompressor(level=3) is not None
    assert found.plain_compressed_bytes < found.plain_bytes


def test_what_has_no_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="expected a model, or the path of its folder, got int"):
        stored_sizes(3)  # type: ignore[arg-type]
    with pytest.raises(ArtifactError, match="expected a model folder"):
        stored_sizes(tmp_path)
