from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors import safe_open
from safetensors.numpy import save_file
from torch import nn

from prunekit.errors import ArtifactError, NonFiniteError, UsageError
from prunekit.statistics.channel_stats import ChannelStats, NonFinite
from prunekit.statistics.channel_stats_collector import StatsCollector, calibrate
from prunekit.statistics.layer_stats import ARRAYS, LayerStats, StatsKey


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 3)).double()


def images(count: int) -> torch.Tensor:
    return torch.randn(count, 3, 8, 8, dtype=torch.float64)


def assert_same(one: ChannelStats, two: ChannelStats) -> None:
    assert list(one) == list(two)
    for key, layer in one.items():
        for name in ARRAYS:
            np.testing.assert_array_equal(getattr(layer, name), getattr(two[key], name))
            assert getattr(layer, name).dtype == getattr(two[key], name).dtype


def test_merge_equals_one_pass_and_is_associative() -> None:
    model, parts = net(), [images(size) for size in (3, 1, 5)]
    a, b, c = (calibrate(model, [part]) for part in parts)
    whole = calibrate(model, [torch.cat(parts)])
    for merged in (a.merge(b).merge(c), a.merge(b.merge(c)), c.merge(a).merge(b)):
        assert set(merged) == set(whole)
        for key, layer in whole.items():
            for name in ("mean", "variance", "mean_abs", "rms"):
                np.testing.assert_allclose(getattr(merged[key], name), getattr(layer, name), rtol=1e-10, atol=1e-15)
            for name in ("count", "min", "max", "zeros"):
                np.testing.assert_array_equal(getattr(merged[key], name), getattr(layer, name))


def test_merge_keeps_what_only_one_side_has_and_refuses_another_model() -> None:
    layer = LayerStats.empty(3)
    one = ChannelStats({StatsKey("a", "output", 0): layer}, {"data": "x", "seed": "0"})
    two = ChannelStats({StatsKey("b", "output", 0): layer}, {"data": "x", "seed": "1"})
    merged = one.merge(two)
    assert [key.module for key in merged] == ["a", "b"]
    assert merged.provenance == {"data": "x"}
    with pytest.raises(UsageError, match="output of a: 3 channels here, 4 there"):
        one.merge(ChannelStats({StatsKey("a", "output", 0): LayerStats.empty(4)}))


def test_dead_channels() -> None:
    model = net()
    with torch.no_grad():
        model[0].bias[1] = -1e3  # always zero behind the ReLU
        model[2].weight[0] = 0  # constant: the bias alone
    assert calibrate(model, [images(4)]).dead()[StatsKey("1", "output", 0)].tolist() == [1]
    assert {tuple(key): found.tolist() for key, found in calibrate(model, [images(4)]).dead().items()} == {
        ("1", "output", 0): [1],
        ("2", "output", 0): [0],
    }


def test_non_finite_values_name_layer_batch_and_channel() -> None:
    model = net()
    with torch.no_grad():
        model[0].weight[2, 0, 0, 0] = torch.nan
    stats = calibrate(model, [images(2)])
    assert stats.non_finite[0] == NonFinite(StatsKey("0", "output", 0), 2 * 36, batch=1, channel=2)
    first = r"72 values are NaN or Inf in the output of 0 \(first in batch 1, channel 2\), and there are some in 4 "
    with pytest.raises(NonFiniteError, match=first):
        stats.require_finite()
    calibrate(net(), [images(2)]).require_finite()


def test_the_first_batch_with_a_non_finite_value_is_kept(tmp_path: Path) -> None:
    batches = [images(2) for _ in range(20)]
    batches[17][1, 2, 3, 4] = torch.inf
    batches[18][0, 1, 0, 0] = torch.nan
    stats = calibrate(net(), batches, modules=["0"], outputs=False)
    key = StatsKey("0", "input", 0)
    assert stats[key].first_non_finite.tolist() == [0, 19, 18]
    assert stats.non_finite == [NonFinite(key, 2, batch=18, channel=2)]
    stats.save(tmp_path)
    assert ChannelStats.load(tmp_path).non_finite == stats.non_finite
    earlier = calibrate(net(), batches[18:], modules=["0"], outputs=False)
    for merged in (stats.merge(earlier), earlier.merge(stats)):
        assert merged[key].first_non_finite.tolist() == [0, 1, 18]


def test_round_trip_is_exact(tmp_path: Path) -> None:
    stats = calibrate(net(), [images(3)])
    stats = ChannelStats({**stats.layers, StatsKey("odd/name", "input", 2): LayerStats.empty(2)}, {"model": "é 1"})
    for path in (tmp_path / "folder", tmp_path / "deep" / "stats.safetensors"):
        file = stats.save(path)
        assert file.is_file()
        loaded = ChannelStats.load(path)
        assert_same(loaded, stats)
        assert loaded.provenance == {"model": "é 1"}
        table = pd.read_csv(file.with_suffix(".csv"), keep_default_na=False)
        assert len(table) == sum(layer.channels for layer in stats.values())
    names = sorted(path.name for path in (tmp_path / "folder").iterdir())
    assert names == ["channel_stats.csv", "channel_stats.safetensors"]


def test_saving_twice_gives_the_same_bytes(tmp_path: Path) -> None:
    stats = calibrate(net(), [images(3)])
    one, two = stats.save(tmp_path / "one"), stats.save(tmp_path / "two")
    assert one.read_bytes() == two.read_bytes()


def test_frame() -> None:
    stats = calibrate(net(), [images(2)], inputs=False)
    frame = stats.channel_frame()
    place, moments = (
        ["module", "side", "call", "channel"],
        ["count", "mean", "variance", "mean_abs", "rms", "min", "max"],
    )
    assert list(frame.columns) == [*place, *moments, "zero_fraction", "non_finite", "dead"]
    assert frame[frame.module == "1"].zero_fraction.tolist() == stats["1", "output", 0].zero_fraction.tolist()
    assert len(ChannelStats({}).channel_frame()) == 0


def test_damage_anywhere_is_noticed(tmp_path: Path) -> None:
    file = calibrate(net(), [images(2)]).save(tmp_path)
    whole = file.read_bytes()
    step = max(1, len(whole) // 97)
    for position in (*range(0, len(whole), step), len(whole) - 1):
        file.write_bytes(whole[:position] + bytes([whole[position] ^ 0x41]) + whole[position + 1 :])
        with pytest.raises(ArtifactError, match=r"channel_stats\.safetensors"):
            ChannelStats.load(tmp_path)
    for content in (b"", b"{}", whole[: len(whole) // 2]):
        file.write_bytes(content)
        with pytest.raises(ArtifactError, match="calibrate again"):
            ChannelStats.load(tmp_path)


def test_ranks_in_an_older_file_are_left_out_and_their_damage_is_noticed(tmp_path: Path) -> None:
    stats = calibrate(net(), [images(2)])
    file = stats.save(tmp_path)
    whole = file.read_bytes()
    with safe_open(file, framework="numpy") as opened:
        arrays = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
        header = json.loads(opened.metadata()["prunekit.channel_stats"])
    arrays["ranks/1/output/0/total"] = np.array([12.0, 5, 9, 0])
    header["content"] = json.dumps({**json.loads(header["content"]), "ranks": [["1", "output", 0, 2]]})
    digest = hashlib.sha256(header["content"].encode())
    for name in sorted(arrays):
        digest.update(name.encode() + b"\0" + arrays[name].tobytes())
    older = {"prunekit.channel_stats": json.dumps({**header, "sha256": digest.hexdigest()})}
    save_file(arrays, file, metadata=older)
    loaded = ChannelStats.load(file)
    assert_same(loaded, stats)
    assert loaded.reads == stats.reads
    loaded.save(tmp_path)
    assert file.read_bytes() == whole
    save_file({**arrays, "ranks/1/output/0/total": np.array([12.0, 5, 9, 1])}, file, metadata=older)
    with pytest.raises(ArtifactError, match=r"the checksum does not fit the content\); calibrate again"):
        ChannelStats.load(file)


def test_missing_or_other_files(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match=r"channel_stats\.safetensors: .* there is no such file"):
        ChannelStats.load(tmp_path / "nowhere")
    save_file({"x": np.zeros(2)}, tmp_path / "weights.safetensors")
    with pytest.raises(ArtifactError, match=r"expected 'prunekit\.channel_stats' in its metadata"):
        ChannelStats.load(tmp_path / "weights.safetensors")


def test_lookup_takes_a_plain_tuple() -> None:
    model = net()
    with StatsCollector(model, modules=["0"]) as collector:
        model(images(1))
    stats = collector.stats()
    assert ("0", "output", 0) in stats
    assert stats["0", "output", 0] is stats[StatsKey("0", "output", 0)]
    with pytest.raises(KeyError):
        stats["9", "output", 0]
