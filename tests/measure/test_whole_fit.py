"""Tables from the times of whole networks alone, against times that were made from known costs."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from chains import Chain
from torch import Tensor, nn

from prunekit.channels.trace import trace
from prunekit.channels.tracing.channel_map import ChannelMap, Keep
from prunekit.measure.latency_profile.network_timing import LayerTimes, sample_widths
from prunekit.measure.latency_profile.staircase_fit import TimedNetwork
from prunekit.measure.latency_profile.whole_fit import (
    WholeCheck,
    check_whole_fit,
    fit_whole_table,
    informative,
    uncertainty,
)
from prunekit.planning.candidates import free_parts
from prunekit.planning.depth_search import blocks_of
from prunekit.settings.pruning import PruneSettings


class Blocks(nn.Module):
    """Residual blocks of two convolutions between two more."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 32, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(32, 48, 3, padding=1), nn.ReLU(), nn.Conv2d(48, 32, 3, padding=1)) for _ in range(3)
        )
        self.head = nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).relu()
        for block in self.blocks:
            x = x + block(x)
        return self.head(x.mean((2, 3)))  # type: ignore[no-any-return]


SETTINGS = PruneSettings(round_to=1)


def drawn(channel_map: ChannelMap, number: int, seed: int = 0) -> list[Keep]:
    parts = free_parts(channel_map, np.zeros(channel_map.n_labels), SETTINGS)
    blocks = blocks_of(channel_map, parts, np.zeros(channel_map.n_labels), SETTINGS)
    return list(sample_widths(channel_map, parts, number, blocks=blocks, seed=seed))


def device_ms(channel_map: ChannelMap, keep: Keep, step: int) -> float:
    """A device that computes in blocks, with a fixed time and one for every layer that is there."""
    total = 2.0
    for module, shape in ((path, channel_map.shapes[f"{path}.weight"]) for path in layers(channel_map)):
        if channel_map.is_present(module, keep):
            sizes = [
                int(np.count_nonzero(keep[axis])) if axis is not None else size
                for axis, size in zip(channel_map.labels[f"{module}.weight"][:2], shape, strict=False)
            ]
            outputs, inputs = (-(-size // step) * step for size in sizes)
            positions = 256 if len(shape) == 4 else 1
            total += 0.05 + 2e-7 * outputs * inputs * 9 * positions + 1e-5 * outputs * positions
    return total


def layers(channel_map: ChannelMap) -> list[str]:
    return [name.removesuffix(".weight") for name in channel_map.shapes if name.endswith(".weight")]


def timed(channel_map: ChannelMap, keeps: list[Keep], step: int, noise: float = 0.0) -> list[TimedNetwork]:
    generator = np.random.default_rng(0)
    dense = device_ms(channel_map, np.ones(channel_map.n_labels, dtype=bool), step)
    found = []
    for keep in keeps:
        speed = float(np.exp(0.3 * generator.standard_normal()))  # the clock changes: both networks take longer
        ms = device_ms(channel_map, keep, step) * float(np.exp(noise * generator.standard_normal()))
        found.append(TimedNetwork(keep, LayerTimes(speed * ms, speed * dense, {}, 0.0)))
    return found


@pytest.fixture(scope="module")
def channel_map() -> ChannelMap:
    return trace(Blocks(), (torch.zeros(1, 3, 16, 16),))


@pytest.mark.parametrize("step", [1, 12])
def test_a_device_of_these_costs_is_found_with_its_step_and_blocks_that_are_gone(
    channel_map: ChannelMap, step: int
) -> None:
    table = fit_whole_table(channel_map, timed(channel_map, drawn(channel_map, 16), step), {"runtime": "ncnn"})
    assert table.setting == {"runtime": "ncnn"}
    assert {one for layer in table.layers for term in layer.terms for one in term.steps} == {step}
    assert all(term.ms > 0 for layer in table.layers for term in layer.terms)
    scale = table.dense_ms / device_ms(channel_map, np.ones(channel_map.n_labels, dtype=bool), step)
    tested = drawn(channel_map, 12, seed=5)
    assert any(not channel_map.is_present("blocks.1.0", keep) for keep in tested)
    for keep in tested:
        assert table.at(channel_map, keep) == pytest.approx(scale * device_ms(channel_map, keep, step), rel=0.01)


def test_a_gone_block_takes_as_much_less_as_its_layers_took(channel_map: ChannelMap) -> None:
    table = fit_whole_table(channel_map, timed(channel_map, drawn(channel_map, 16), 1), {})
    final = channel_map.traced.final
    dense = np.ones(channel_map.n_labels, dtype=bool)
    gone = dense.copy()
    labels = channel_map.present_with("blocks.1.0")
    assert labels is not None
    gone[labels] = False
    gone = channel_map.completed(gone)
    here = [layer for layer in table.layers if channel_map.is_present(layer.module, gone)]
    assert {layer.module for layer in table.layers} - {layer.module for layer in here} >= {"blocks.1.0", "blocks.1.2"}
    left = table.outside + sum(layer.at(gone[final]) for layer in here)
    assert table.at(channel_map, gone) == pytest.approx(left)
    assert left < table.at(channel_map) - 0.1 * table.dense_ms


def test_chosen_networks_say_more_than_the_first_ones_and_the_dense_one_is_among_them(channel_map: ChannelMap) -> None:
    pool = drawn(channel_map, 40)
    chosen = informative(channel_map, pool, 10)
    assert chosen[0] == 0
    assert len(set(chosen)) == 10
    assert sorted(informative(channel_map, pool[:5], 10)) == [0, 1, 2, 3, 4]
    covariance = uncertainty(channel_map, pool)

    def volume(indices: list[int]) -> float:
        return float(np.linalg.slogdet(covariance[np.ix_(indices, indices)] + 4e-4 * np.eye(len(indices)))[1])

    assert volume(chosen) > volume(list(range(10))) + 1


def test_layers_of_a_kind_share_what_they_cost_so_that_few_networks_do() -> None:
    channel_map = trace(Chain([32, 48, 24, 40], [3, 3, 1, 3], shortcut=True), (torch.zeros(1, 3, 16, 16),))
    samples = timed(channel_map, drawn(channel_map, 12), 8, noise=0.02)
    check = check_whole_fit(channel_map, samples)
    assert check.error < 0.04
    assert check.error < check.error_of_half
    assert len(check.predicted_ms) == 12


@pytest.mark.parametrize(
    ("error", "half", "text"),
    [
        (0.04, 0.08, "about 8 more networks would bring the median error from 4.0 % to some 3 %"),
        (0.04, 0.041, "more networks would hardly help: half as many predict with a median error of 4.1 %"),
        (0.004, 0.02, "more networks are not needed: the median error is 0.4 %"),
    ],
)
def test_it_says_whether_more_networks_would_help(error: float, half: float, text: str) -> None:
    assert WholeCheck((1.0,) * 16, error, half).more_would_help.startswith(text)
