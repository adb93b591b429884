"""Dead and redundant channels: planted ones are found, and the correlations are NumPy's."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from prunekit.errors import UsageError
from prunekit.hooks.hook import count_hooks
from prunekit.inspection.capture import redundancy as correlations
from prunekit.inspection.capture.recorder import capture
from prunekit.inspection.capture.redundancy import (
    ChannelCorrelations,
    CorrelationCollector,
    redundant_channels,
    weight_cosines,
)
from prunekit.jobs.analyses.pictures import channel_findings

CPU = torch.device("cpu")


class Net(nn.Module):
    """The convolution in the middle runs twice, with other channels in each."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 12, 3, padding=1)
        self.norm = nn.BatchNorm2d(12)
        self.relu = nn.ReLU()
        self.inner = nn.Conv2d(12, 12, 3, padding=1, groups=3)
        self.head = nn.Linear(12, 5)

    def forward(self, images: Tensor) -> Tensor:
        found = self.relu(self.norm(self.stem(images)))
        found = self.inner(self.inner(found)).mean((2, 3))
        return torch.as_tensor(self.head(found))


@pytest.fixture
def net() -> Net:
    torch.manual_seed(0)
    return Net().eval()


@pytest.fixture
def batches() -> list[Tensor]:
    draw = torch.Generator().manual_seed(1)
    return [3 + torch.randn(size, 3, 8, 8, generator=draw) for size in (16, 16, 8)]


def stem(seen: CorrelationCollector) -> ChannelCorrelations:
    """What is known of the first layer."""
    return next(found for found in seen.correlations() if found.layer == "stem")


@torch.no_grad()
def plant(net: Net) -> None:
    """Channel 7 is channel 2, turned round and larger; channel 4 never gets through the ReLU."""
    net.stem.weight[7], net.stem.bias[7] = -2 * net.stem.weight[2], 1.0  # type: ignore[index]
    net.norm.weight[4], net.norm.bias[4] = 0.0, -1.0


def test_planted_channels_are_found_and_no_others(net: Net, batches: list[Tensor]) -> None:
    clean, channels = channel_findings(net, batches, CPU)
    assert clean == []
    assert channels == 12 + 12 + 5
    plant(net)
    found, _ = channel_findings(net.train(), batches, CPU)
    dead = [(row["layer"], row["channel"]) for row in found if row["finding"] == "dead"]
    assert dead == [("norm", 4), ("relu", 4)]
    (pair,) = [row for row in found if row["finding"] == "redundant"]
    assert (pair["layer"], pair["channel"], pair["like"]) == ("stem", 7, 2)
    assert pair["correlation"] == pytest.approx(-1, abs=1e-5)
    assert pair["cosine"] == pytest.approx(-1, abs=1e-6)
    assert net.training
    assert count_hooks(net) == 0


def test_correlations_are_those_of_all_values_together(net: Net, batches: list[Tensor]) -> None:
    with CorrelationCollector(net) as seen, capture(net, ["stem", "inner", "head"]) as record, torch.no_grad():
        for images in batches:
            net(images)
    products = seen.correlations()
    assert [found.layer for found in products] == ["stem", "inner", "head"]
    for found in products:
        path = found.layer
        rows = torch.cat([value.movedim(1, -1).reshape(-1, value.shape[1]) for value in record.values(path)])
        assert found.sums.count == len(rows) == 40 * {"stem": 64, "inner": 128, "head": 1}[path]
        np.testing.assert_allclose(found.correlation, np.corrcoef(rows.double().numpy().T), atol=1e-5)


def test_of_several_alike_one_is_left(net: Net, batches: list[Tensor]) -> None:
    with torch.no_grad():
        for channel in (5, 9, 11):
            net.stem.weight[channel] = net.stem.weight[1]
            net.stem.bias[channel] = net.stem.bias[1]  # type: ignore[index]
    found, _ = channel_findings(net, batches, CPU)
    assert [(row["channel"], row["like"]) for row in found] == [(5, 1), (9, 1), (11, 1)]


def test_what_was_seen_too_little_or_is_constant_is_told_by_its_weights(net: Net) -> None:
    plant(net)
    with CorrelationCollector(net) as seen, torch.no_grad():
        net(torch.randn(1, 3, 3, 3))  # 9 places
    (pair,) = redundant_channels(net, [stem(seen)])
    assert (pair.channel, pair.like, pair.correlation) == (7, 2, None)
    with CorrelationCollector(net) as seen, torch.no_grad():
        net(torch.ones(1, 3, 16, 16)[:, :, :1, :1].expand(64, 3, 1, 1))
    assert np.isnan(stem(seen).correlation).all()


def test_channels_that_are_not_finite_are_like_no_other(net: Net, batches: list[Tensor]) -> None:
    plant(net)
    batches[1][0, 0, 0, 0] = torch.inf
    with CorrelationCollector(net) as seen, torch.no_grad():
        for images in batches:
            net(images)
    (pair,) = redundant_channels(net, [stem(seen)])
    assert (pair.channel, pair.correlation) == (7, None)


def test_positions_are_spread_over_what_there_is(net: Net, batches: list[Tensor]) -> None:
    plant(net)
    with CorrelationCollector(net, positions=100) as seen, torch.no_grad():
        net(batches[0])
    found = stem(seen)
    assert 50 <= found.sums.count <= 110
    assert found.correlation[2, 7] == pytest.approx(-1, abs=1e-5)


@pytest.mark.parametrize(
    ("layer", "group"),
    [
        (nn.Conv2d(6, 6, 3), [0, 0, 0, 0, 0, 0]),
        (nn.Conv2d(6, 6, 3, groups=2), [0, 0, 0, 1, 1, 1]),
        (nn.ConvTranspose2d(4, 6, 2, groups=2), [0, 0, 0, 1, 1, 1]),
    ],
)
def test_weights_are_compared_where_they_read_the_same_channels(layer: nn.Module, group: list[int]) -> None:
    cosines = weight_cosines(layer)
    same = np.equal.outer(group, group)
    assert np.isnan(cosines[~same]).all()
    np.testing.assert_allclose(cosines.diagonal(), 1, rtol=1e-9)
    weight = layer.get_parameter("weight").detach().double()
    rows = weight[:2, 1].flatten(), weight[:2, 0].flatten()
    if not isinstance(layer, nn.ConvTranspose2d):
        rows = weight[1].flatten(), weight[0].flatten()
    assert cosines[0, 1] == pytest.approx(float(torch.cosine_similarity(*rows, dim=0)))


class Attending(nn.Module):
    """Attention whose projections run without their modules: of one tensor, and of a query and a memory."""

    def __init__(self) -> None:
        super().__init__()
        self.own, self.cross = (nn.MultiheadAttention(8, 2, batch_first=True) for _ in range(2))

    def forward(self, tokens: Tensor) -> Tensor:
        found = self.own(tokens, tokens, tokens, need_weights=False)[0]
        memory = tokens.flip(1)[:, :3]
        return torch.as_tensor(self.cross(found, memory, memory, need_weights=False)[0])


def test_projections_of_attention_are_looked_at_part_by_part() -> None:
    torch.manual_seed(0)
    net, tokens = Attending().eval(), torch.randn(16, 5, 8)
    assert channel_findings(net, [tokens], CPU) == ([], 2 * (24 + 8))
    with torch.no_grad():
        for attention in (net.own, net.cross):
            attention.in_proj_weight[13] = -attention.in_proj_weight[10]  # two of the keys
            attention.in_proj_weight[18] = 0.0  # one of the values
            attention.in_proj_bias.zero_()
    found, _ = channel_findings(net, [tokens], CPU)
    rows = {(row["layer"], row["finding"], row["channel"], row["like"]) for row in found}
    for path in ("own", "cross"):
        assert {row[1:] for row in rows if row[0] == f"{path}.in_proj_weight"} == {
            ("redundant", 13, 10), ("dead", 18, None)
        }  # fmt: skip
    with CorrelationCollector(net) as seen, torch.no_grad():
        net(tokens)
    parts = [(part.layer, part.first, len(part.shift)) for part in seen.correlations() if "in_proj" in part.layer]
    assert parts == [("own.in_proj_weight", 0, 24), *(("cross.in_proj_weight", first, 8) for first in (0, 8, 16))]
    assert count_hooks(net) == 0


def test_what_is_too_wide_for_the_memory_is_refused_with_what_it_takes(
    net: Net, batches: list[Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(correlations.psutil, "virtual_memory", lambda: SimpleNamespace(available=8000))
    message = "3 layers take 4.89 KiB, and 7.81 KiB of memory are free, .* fewer .* the widest is stem"
    with pytest.raises(UsageError, match=message):
        channel_findings(net, batches, CPU)
    found, channels = channel_findings(net, batches, CPU, layers="head")
    assert (found, channels) == ([], 5)
    assert channel_findings(net, batches, CPU, layers="relu") == ([], 0)


def test_a_threshold_is_a_share(net: Net) -> None:
    with pytest.raises(UsageError, match=r"threshold: expected a size of correlations, above 0 and up to 1, got 1.5"):
        redundant_channels(net, [], 1.5)
