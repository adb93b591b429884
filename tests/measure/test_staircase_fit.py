"""Fits against times that were made from known tables, and networks to measure."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from chains import Chain, chain, random_table
from torch import nn

from prunekit.channels.trace import trace
from prunekit.channels.tracing.channel_map import ChannelMap
from prunekit.measure.latency_profile.network_timing import LayerTimes, sample_widths
from prunekit.measure.latency_profile.staircase_fit import TimedNetwork, features_of, fit_latency_table
from prunekit.planning.budgets.cost_model import Span
from prunekit.planning.budgets.latency_table import LatencyTable
from prunekit.planning.candidates import free_parts
from prunekit.settings.pruning import PruneSettings


def made_up(
    channel_map: ChannelMap, truth: LatencyTable, number: int, seed: int = 0, drift: float = 0.0, noise: float = 0.0
) -> list[TimedNetwork]:
    """Networks with the times that a table gives them, on a machine whose speed changes by the network and layer."""
    generator = np.random.default_rng(seed)
    final = channel_map.traced.final
    samples = []
    parts = free_parts(channel_map, np.zeros(channel_map.n_labels), PruneSettings(round_to=1))
    for keep in sample_widths(channel_map, parts, number, seed=seed):
        speed = float(np.exp(drift * generator.standard_normal()))
        modules = {
            layer.module: speed * layer.at(keep[final]) * float(np.exp(noise * generator.standard_normal()))
            for layer in truth.layers
        }
        whole, dense = speed * truth.at(channel_map, keep), speed * truth.at(channel_map)
        samples.append(TimedNetwork(keep, LayerTimes(whole, dense, modules, 0.0)))
    return samples


@pytest.mark.parametrize("drift", [0.0, 0.5])
def test_a_table_is_found_from_its_own_times_whatever_the_machine_does(drift: float) -> None:
    channel_map = chain([24, 32, 16])
    truth = random_table(channel_map, (8,), 1)
    found = fit_latency_table(channel_map, made_up(channel_map, truth, 60, drift=drift), {})
    for sample in made_up(channel_map, truth, 20, seed=5):
        ratio = found.at(channel_map, sample.keep) / truth.at(channel_map, sample.keep)
        assert ratio * truth.at(channel_map) / found.dense_ms == pytest.approx(1, rel=0.02)


def test_steps_are_found_where_there_are_some_and_none_where_there_are_none() -> None:
    channel_map = chain([40, 48, 40])
    for step in (1, 8):
        found = fit_latency_table(channel_map, made_up(channel_map, random_table(channel_map, (step,), 3), 60), {})
        inner = next(layer for layer in found.layers if layer.module == "layers.1")
        assert {one for term in inner.terms for one in term.steps if len(term.factors) > 1} == {step}


@pytest.mark.parametrize("share", [0.6, 1.5])
def test_where_another_kernel_takes_over_is_found(share: float) -> None:
    """As of a convolution of oneDNN, which takes less time with 448 input channels than with 416."""
    channel_map = chain([64, 64, 64], shortcut=False)
    truth = random_table(channel_map, (1,), 1)
    inner = next(one for one in features_of(channel_map) if one.module == "layers.1")
    width = inner.products[-1].factors[0][0]
    layers = [
        replace(
            layer,
            terms=tuple(
                replace(term, ms=term.ms * factor, spans=(Span(width, *bounds),))
                for term in layer.terms
                for factor, bounds in ((1.0, (0, 40)), (share, (40, np.inf)))
            ),
        )
        if layer.module == "layers.1"
        else layer
        for layer in truth.layers
    ]
    truth = replace(truth, layers=tuple(layers))
    assert {layer.module for layer in layers if any(term.spans for term in layer.terms)} == {"layers.1"}
    samples = made_up(channel_map, truth, 60, noise=0.01)
    found = fit_latency_table(channel_map, samples, {})
    cut = {layer.module: {span.low for term in layer.terms for span in term.spans} for layer in found.layers}
    narrower = max(
        n for n in (np.count_nonzero(one.keep[channel_map.traced.final][width]) for one in samples) if n < 40
    )
    (low,) = cut.pop("layers.1") - {0.0}
    assert narrower < low <= 40
    assert not any(cut.values())
    for sample in made_up(channel_map, truth, 20, seed=5):
        if not narrower < np.count_nonzero(sample.keep[channel_map.traced.final][width]) < 40:
            ratio = found.at(channel_map, sample.keep) / truth.at(channel_map, sample.keep)
            assert ratio * truth.at(channel_map) / found.dense_ms == pytest.approx(1, rel=0.03)


def test_a_module_that_is_never_so_wide_has_no_such_kernel() -> None:
    channel_map = trace(Chain([64, 24, 64], [3, 3, 3], shortcut=True), (torch.zeros(1, 3, 16, 16),))
    alike = [one for one in features_of(channel_map) if one.module in ("layers.1", "layers.2")]
    assert alike[0].signature == alike[1].signature
    truth = random_table(channel_map, (1,), 1)
    inputs = {one.module: one.products[-1].factors[0][0] for one in alike}
    assert {path: width.size for path, width in inputs.items()} == {"layers.1": 64, "layers.2": 24}
    layers = [
        replace(
            layer,
            terms=tuple(
                replace(term, ms=term.ms * factor, spans=(Span(inputs[layer.module], *bounds),))
                for term in layer.terms
                for factor, bounds in ((1.0, (0, 40)), (0.6, (40, np.inf)))
            ),
        )
        if layer.module in inputs
        else layer
        for layer in truth.layers
    ]
    found = fit_latency_table(
        channel_map, made_up(channel_map, replace(truth, layers=tuple(layers)), 60, noise=0.01), {}
    )
    cut = {layer.module: [span for term in layer.terms for span in term.spans] for layer in found.layers}
    assert cut["layers.1"]
    assert cut["layers.2"] == []
    assert next(layer for layer in found.layers if layer.module == "layers.2").terms


@pytest.mark.slow
@pytest.mark.parametrize("disturbed", [False, True])
def test_hardly_any_kernel_is_made_up_from_noise_or_a_network_that_was_disturbed(disturbed: bool) -> None:
    channel_map = chain([40, 48, 40], shortcut=False)
    made, layers = 0, 0
    for seed in range(20):
        samples = made_up(channel_map, random_table(channel_map, (1,), seed), 40, seed=seed, noise=0.02)
        if disturbed:
            index = int(np.random.default_rng(seed).integers(1, len(samples)))
            times = samples[index].times
            slow = {path: 2 * ms for path, ms in times.modules_ms.items()}
            samples[index] = TimedNetwork(
                samples[index].keep, replace(times, modules_ms=slow, whole_ms=2 * times.whole_ms)
            )
        found = fit_latency_table(channel_map, samples, {})
        made += sum(any(term.spans for term in layer.terms) for layer in found.layers)
        layers += len(found.layers)
    assert made <= 0.03 * layers


def test_no_layer_gets_faster_as_it_gets_wider_but_where_its_kernel_changes() -> None:
    channel_map = chain([24, 32, 16])
    generator = np.random.default_rng(0)
    samples = [
        TimedNetwork(
            sample.keep,
            LayerTimes(1.0, 1.0, {path: float(generator.random()) for path in sample.times.modules_ms}, 0.0),
        )
        for sample in made_up(channel_map, random_table(channel_map, (1,), 0), 20)
    ]
    found = fit_latency_table(channel_map, samples, {})
    assert min(found.outside, found.factor) >= 0
    assert all(layer.constant >= 0 and all(term.ms >= 0 for term in layer.terms) for layer in found.layers)


def test_modules_that_do_the_same_at_other_widths_share_a_signature() -> None:
    channel_map = trace(Chain([8, 8, 8], [3, 3, 1], shortcut=True), (torch.zeros(1, 3, 16, 16),))
    signature = {one.module: one.signature for one in features_of(channel_map)}
    assert signature["layers.0"] != signature["layers.1"]  # whose input is the image
    assert signature["layers.1"] != signature["layers.2"]  # another kernel
    wide = trace(Chain([8, 16, 24], [3, 3, 3], shortcut=True), (torch.zeros(1, 3, 16, 16),))
    signature = {one.module: one.signature for one in features_of(wide)}
    assert signature["layers.1"] == signature["layers.2"]


class Scripted(nn.Module):
    """Everything in one module: more products of widths than are told apart."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(4 + i + 1, 4 + i) for i in range(12))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for weight in self.weights:
            x = nn.functional.linear(x, weight).relu()
        return x


def test_products_of_a_module_with_many_are_added_up() -> None:
    channel_map = trace(Scripted(), (torch.zeros(2, 4),))
    (only,) = features_of(channel_map)
    assert [len(product.factors[0]) for product in only.products] == [1, 2]
    truth = random_table(channel_map, (1,), 0)
    found = fit_latency_table(channel_map, made_up(channel_map, truth, 40), {})
    assert found.at(channel_map) == pytest.approx(truth.at(channel_map), rel=0.05)


def test_networks_are_the_dense_one_and_others_of_all_sizes() -> None:
    channel_map = chain([24, 32, 40])
    parts = free_parts(channel_map, np.zeros(channel_map.n_labels), PruneSettings(min_channels=2))
    keeps = list(sample_widths(channel_map, parts, 30))
    assert keeps[0].all()
    assert len(keeps) == 30
    assert all(np.array_equal(a, b) for a, b in zip(keeps, sample_widths(channel_map, parts, 30), strict=True))
    for keep in keeps:
        for part in parts:
            assert np.count_nonzero(keep[part.labels]) in part.counts
    left = sorted(channel_map.macs(keep) / channel_map.macs() for keep in keeps)
    assert left[0] < 0.15
    assert left[-2] > 0.6
    assert max(b - a for a, b in pairwise(left)) < 0.3
