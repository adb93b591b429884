"""The elimination's errors against least squares solved anew for each set that is left."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from equivalence import image, randomized
from torch import Tensor, nn

import prunekit as pk
from prunekit.channels.labels.constraints import LockRecord
from prunekit.channels.map_builder import with_extra
from prunekit.channels.trace import trace
from prunekit.criteria import elimination
from prunekit.criteria.elimination import (
    AT_ONCE,
    LayerObjective,
    eliminate,
    eliminations,
    held_out_growth,
    layer_objectives,
)
from prunekit.errors import NonFiniteError
from prunekit.pruning.sample_statistics import patch_statistics
from prunekit.statistics.gram_matrices import collect_patches
from prunekit.statistics.layer_errors import RIDGE

CHANNELS, TAPS = 5, 2


def weight_of(seed: int) -> Tensor:
    return torch.randn(3, CHANNELS * TAPS, generator=torch.Generator().manual_seed(100 + seed), dtype=torch.float64)


def consumer(seed: int, *, biased: bool = True) -> LayerObjective:
    generator = torch.Generator().manual_seed(seed)
    weight = weight_of(seed)
    wide = torch.randn(200, CHANNELS * TAPS, generator=generator, dtype=torch.float64)
    wide = torch.cat([wide @ torch.randn(10, 10, generator=generator, dtype=torch.float64) + 1, torch.ones(200, 1)], 1)
    return LayerObjective(wide.T @ wide / 200, weight.T @ weight, np.arange(1, CHANNELS + 1), biased)


def ridged(consumer: LayerObjective) -> Tensor:
    ridge = RIDGE * consumer.gram.diagonal()[:-1].mean()
    return consumer.gram + torch.diag(torch.tensor([1.0] * CHANNELS * TAPS + [0.0], dtype=torch.float64) * ridge)


def refitted(consumer: LayerObjective, weight: Tensor, removed: list[int]) -> float:
    """Error of the ridge problem when all columns of the removed channels are zero."""
    change = refit(consumer, weight, removed)
    return float(((change @ ridged(consumer)) * change).sum())


def refit(consumer: LayerObjective, weight: Tensor, removed: list[int]) -> Tensor:
    """Change of the weight and the bias when all columns of the removed channels are zero."""
    columns, matrix = CHANNELS * TAPS, ridged(consumer)
    gone = [label * TAPS + tap for label in removed for tap in range(TAPS)]
    kept = [i for i in range(columns + consumer.biased) if i not in gone]
    weight = torch.cat([weight, torch.zeros(3, 1, dtype=torch.float64)], 1)
    change = torch.zeros_like(weight)
    change[:, gone] = -weight[:, gone]
    right = consumer.gram[kept][:, gone] @ change[:, gone].T
    change[:, kept] = torch.linalg.solve(matrix[kept][:, kept], -right).T
    return change


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("readers", [1, 2])
def test_errors_are_those_of_refitting_what_is_left(readers: int, biased: bool) -> None:
    consumers = [consumer(seed, biased=biased) for seed in range(readers)]
    found = eliminate(np.arange(1, CHANNELS + 1), consumers)
    assert sorted(found.labels) == list(range(1, CHANNELS + 1))
    for count in range(1, CHANNELS + 1):
        removed = [int(label) - 1 for label in found.labels[:count]]
        wanted = sum(refitted(each, weight_of(seed), removed) for seed, each in enumerate(consumers))
        assert found.errors[count - 1] == pytest.approx(wanted, rel=1e-8)
    first = [
        sum(refitted(each, weight_of(seed), [label]) for seed, each in enumerate(consumers))
        for label in range(CHANNELS)
    ]
    assert found.labels[0] == 1 + int(np.argmin(first))


def test_errors_grow_on_held_out_samples_as_a_fit_of_the_others_shows() -> None:
    fitted = consumer(0)
    held = replace(fitted, gram=consumer(1).gram)
    found = eliminate(fitted.labels, [fitted])
    assert held_out_growth(found, [fitted], [fitted]) == pytest.approx(np.ones(CHANNELS))
    growth = held_out_growth(found, [fitted], [held])
    for count in range(1, CHANNELS):
        change = refit(fitted, weight_of(0), [int(label) - 1 for label in found.labels[:count]])
        seen, other = (float(((change @ one.gram) * change).sum()) for one in (fitted, held))
        assert growth[count - 1] == pytest.approx(max(1.0, other / seen), rel=1e-6)
    assert growth.max() > 1.5


@pytest.mark.parametrize("images", [96, 8])
def test_pooled_features_of_few_images_are_not_free_to_remove(images: int) -> None:
    """Nearly as many features as images predict each other nearly without an error, on these images."""
    torch.manual_seed(0)
    layers = (nn.Conv2d(3, 64, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))
    model, x = nn.Sequential(*layers).eval(), torch.randn(images, 3, 8, 8)
    chart = trace(model, x[:2])
    stats = patch_statistics(model, x, chart, held_out=True)
    assert len(stats.parts) == (2 if images == 96 else 0)
    plain = eliminations(model, chart, replace(stats, parts=(), computed={}))
    found = eliminations(model, chart, stats)
    for name, order in found.items():
        assert order.labels.tolist() == plain[name].labels.tolist()
        assert (order.errors > 2 * plain[name].errors)[:32].all() == bool(stats.parts)


def test_columns_that_are_always_zero_change_nothing() -> None:
    """As of taps that read padding alone, where maps are smaller than kernels, and of dead channels."""
    whole = consumer(0)
    columns = [i for i in range(CHANNELS * TAPS) if i not in (1, 3, 5, 8, 9)]  # the last label has none
    gram = torch.zeros_like(whole.gram)
    gram[np.ix_([*columns, -1], [*columns, -1])] = whole.gram[np.ix_([*columns, -1], [*columns, -1])]
    found = eliminate(whole.labels, [replace(whole, gram=gram)])
    weight = weight_of(0)
    weight[:, [i for i in range(CHANNELS * TAPS) if i not in columns]] = 0
    expected = replace(whole, gram=gram, products=weight.T @ weight)
    assert found.labels[0] == CHANNELS
    assert found.errors[0] == 0
    for count in range(1, CHANNELS + 1):
        removed = [int(label) - 1 for label in found.labels[:count]]
        assert found.errors[count - 1] == pytest.approx(refitted(expected, weight, removed), rel=1e-9, abs=1e-12)


def test_a_redundant_channel_costs_nothing_and_goes_first() -> None:
    one = consumer(0)
    mixing = torch.eye(11, dtype=torch.float64)
    mixing[:, 4:6] = mixing[:, 0:2] * 3  # channel 2 is three times channel 0
    found = eliminate(np.arange(1, 6), [LayerObjective(mixing.T @ one.gram @ mixing, one.products, one.labels)])
    assert found.labels[0] in (1, 3)
    assert found.errors[0] < 0.2 * found.errors[1]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.bn = nn.Conv2d(3, 6, 3, bias=False), nn.BatchNorm2d(6)
        self.left, self.right = nn.Conv2d(6, 4, 3, bias=False), nn.Conv2d(6, 8, 1, groups=2)
        self.norm = nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.bn(self.first(x)).relu()
        return self.norm(self.left(x)).mean((2, 3)) + self.right(x).mean((2, 3))[:, :4]


def test_consumers_are_found_by_labels_on_the_input_side() -> None:
    model = randomized(Net().double()).eval()
    x = image()[0].double()
    chart = trace(model, (x,))
    stats = collect_patches(model, [x, x.flip(3)], rows=64, images=4)
    (group,) = [g for g in chart.groups if ("first.weight", 0) in g.slots]
    names = {moments.layer.weight for moments in stats.layers}
    assert names == {"first.weight", "left.weight", "right.weight"}
    sizes = [len(each.gram) for each in layer_objectives(group, model, chart, stats)]
    assert sizes[0] == 6 * 9 + 1
    found = eliminations(model, chart, stats)[group.name]
    assert sorted(found.labels) == sorted(group.labels)
    assert (np.diff(found.errors) >= 0).all()


class Projections(nn.Module):
    """Queries, keys and values read one tensor, and so do two wide layers; keys read another one where it is long."""

    def __init__(self, *, bias: bool = True) -> None:
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.queries, self.keys, self.values = (nn.Linear(6, 5, bias=bias) for _ in range(3))
        self.wide = nn.Linear(6, 40, bias=bias)
        self.last = nn.Linear(45, 2)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x).tanh()
        keys = self.keys(hidden if x.shape[1] < 8 else hidden + 1)
        mixed = self.queries(hidden).softmax(-1) * keys + self.values(hidden)
        return self.last(torch.cat([mixed, self.wide(hidden)], -1))


def test_layers_that_read_one_tensor_share_a_matrix_and_an_objective() -> None:
    model, x = Projections().eval(), torch.randn(9, 6, 4)
    stats = collect_patches(model, list(x.split(3)), rows=10**6)
    grams = {moments.layer.weight: moments.grams[0] for moments in stats.layers}
    names = ["queries.weight", "keys.weight", "values.weight", "wide.weight"]
    assert len({id(grams[name]) for name in names}) == 1
    assert stats.nbytes == sum(grams[name].nbytes for name in ("first.weight", "queries.weight", "last.weight"))
    hidden = model.first(x).tanh().detach().flatten(0, 1).double()
    read = torch.cat([hidden, torch.ones(len(hidden), 1)], 1)
    torch.testing.assert_close(grams["keys.weight"], read.T @ read / len(read), rtol=1e-6, atol=1e-6)
    chart = trace(model, x[:2])
    group = next(group for group in chart.groups if group.name == "first")
    (objective,) = layer_objectives(group, model, chart, stats)
    weights = torch.cat([dict(model.named_parameters())[name].detach() for name in names]).double()
    assert objective.products.shape == (6, 6)  # of 55 outputs
    assert weights.shape == (55, 6)
    alone = [replace(moments, grams=(moments.grams[0].clone(),)) for moments in stats.layers]
    apart = layer_objectives(group, model, chart, replace(stats, layers=tuple(alone)))
    assert len(apart) == 4
    one, other = (eliminate(group.labels, found) for found in ([objective], apart))
    np.testing.assert_allclose(one.errors, other.errors, rtol=1e-6)
    assert one.labels.tolist() == other.labels.tolist()


def test_layers_that_read_another_tensor_in_a_later_batch_have_their_own_matrix() -> None:
    model, short, long = Projections().eval(), torch.randn(3, 6, 4), torch.randn(3, 9, 4)
    stats = collect_patches(model, [short, long, short], rows=10**6)
    grams = {moments.layer.weight: moments.grams[0] for moments in stats.layers}
    assert grams["queries.weight"] is grams["values.weight"]
    assert grams["keys.weight"] is not grams["queries.weight"]
    for name, shift in (("keys.weight", 1.0), ("queries.weight", 0.0)):
        parts = [model.first(short).tanh(), model.first(long).tanh() + shift, model.first(short).tanh()]
        read = torch.cat([part.detach().flatten(0, 1).double() for part in parts])
        read = torch.cat([read, torch.ones(len(read), 1)], 1)
        torch.testing.assert_close(grams[name], read.T @ read / len(read), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("bias", [False, True])
def test_a_layer_without_a_bias_cannot_make_up_for_a_mean(bias: bool) -> None:
    torch.manual_seed(0)
    model, x = Projections(bias=bias).eval(), torch.randn(64, 6, 4) + 2
    chart, stats = trace(model, x[:2]), collect_patches(model, [x], rows=10**6)
    group = next(group for group in chart.groups if group.name == "first")
    (objective,) = layer_objectives(group, model, chart, stats)
    assert objective.biased == bias
    without, with_one = (eliminate(group.labels, [replace(objective, biased=biased)]) for biased in (False, True))
    assert without.errors[0] > 1.01 * with_one.errors[0]


def test_above_the_limit_only_the_centers_are_taken() -> None:
    model = randomized(Net().double()).eval()
    x = image()[0].double()
    said: list[str] = []
    stats = collect_patches(model, [x], rows=64, images=2, memory_bytes=1000, log=said.append)
    assert len(said) == 1
    assert f"patches of {len(stats.layers)} layers take 0 MiB" in said[0]
    left = next(moments for moments in stats.layers if moments.layer.weight == "left.weight")
    assert left.taps == 1
    assert left.grams[0].shape == (7, 7)
    chart = trace(model, (x,))
    assert all(np.isfinite(each.errors).all() for each in eliminations(model, chart, stats).values())


def test_the_largest_give_way_until_the_rest_fits() -> None:
    model = randomized(nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 3), nn.Conv2d(4, 2, 3))).double().eval()
    x = torch.randn(2, 3, 12, 12, dtype=torch.float64)
    whole = collect_patches(model, [x], images=2)
    assert [len(moments.grams[0]) for moments in whole.layers] == [3 * 9 + 1, 8 * 9 + 1, 4 * 9 + 1]
    less = collect_patches(model, [x], images=2, memory_bytes=whole.nbytes - 1)
    assert [len(moments.grams[0]) for moments in less.layers] == [3 * 9 + 1, 8 + 1, 4 * 9 + 1]
    for one, other in zip(whole.layers[::2], less.layers[::2], strict=True):
        torch.testing.assert_close(one.grams, other.grams, rtol=0, atol=0)


def test_streamed_moments_are_those_of_one_batch() -> None:
    model = randomized(nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 3))).double().eval()
    x = torch.randn(8, 3, 6, 6, dtype=torch.float64)
    whole = collect_patches(model, [x], rows=10**6, images=8)
    parts = collect_patches(model, [x[:3], x[3:]], rows=10**6, images=8)
    for one, other in itertools.zip_longest(whole.layers, parts.layers):
        torch.testing.assert_close(one.grams, other.grams, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(one.variance, other.variance)


def test_several_labels_of_a_wide_group_go_at_once() -> None:
    size = 3 * AT_ONCE
    wide = torch.randn(2 * size, size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    wide = torch.cat([wide, torch.ones(len(wide), 1, dtype=torch.float64)], 1)
    weight = torch.randn(4, size, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    found = eliminate(np.arange(size), [LayerObjective(wide.T @ wide / len(wide), weight.T @ weight, np.arange(size))])
    assert sorted(found.labels) == list(range(size))
    assert (np.diff(found.errors) >= 0).all()
    outputs = weight @ (wide.T @ wide / len(wide))[:-1, :-1] @ weight.T
    means = weight @ wide[:, :-1].mean(0)
    assert found.errors[-1] == pytest.approx(float(outputs.trace() - means @ means), rel=1e-2)


@pytest.mark.parametrize("biased", [False, True])
def test_few_rows_give_the_order_and_the_errors_of_their_gram_matrix(biased: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    read = torch.randn(40, 161, generator=generator, dtype=torch.float64) + 0.5
    read[:, -1], read[:, 7] = torch.rand(40, generator=generator) + 0.5, 0.0
    weight = torch.randn(12, 160, generator=generator, dtype=torch.float64)
    gram = read.T @ read / 40
    gram.diagonal()[:-1] += 9 * RIDGE * gram.diagonal()[:-1].mean()
    labels = np.random.default_rng(0).permutation(160)
    whole = LayerObjective(gram, weight.T @ weight, labels, biased)
    few = LayerObjective(gram, weight, labels, biased, tuple(read.split(25)))
    group = np.arange(5, 200)  # some of them are not read, and some of what is read cannot go
    found, wanted = eliminate(group, [few, few]), eliminate(group, [whole, whole])
    assert found.labels.tolist() == wanted.labels.tolist()
    np.testing.assert_allclose(found.errors, wanted.errors, rtol=1e-8)
    some = eliminate(group, [few, few], 50)
    assert some.labels[:50].tolist() == found.labels[:50].tolist()
    np.testing.assert_allclose(some.errors[:50], found.errors[:50])
    assert np.isinf(some.errors[-1])
    assert sorted(some.labels) == group.tolist()


def one_by_one(
    objectives: list[tuple[Tensor, Tensor, np.ndarray]], labels: np.ndarray
) -> tuple[list[int], list[float]]:
    """Order and errors of optimal brain surgeon, with whole matrices that change at each step."""
    weights, inverses, total = [weight.clone() for _, weight, _ in objectives], [], 0.0
    for gram, weight, _ in objectives:
        size = weight.shape[1]
        ridge = RIDGE * gram.diagonal()[:-1].mean()
        inverses.append(torch.linalg.inv(gram + torch.diag(torch.tensor([1.0] * size + [0.0]).double() * ridge)))
    left, order, errors = labels.tolist(), [], []
    while left:

        def parts(label: int, index: int) -> tuple[Tensor, Tensor]:
            columns = torch.from_numpy(np.flatnonzero(objectives[index][2] == label))
            return columns, torch.linalg.inv(inverses[index][columns][:, columns])

        def cost(label: int) -> float:
            found = 0.0
            for index, weight in enumerate(weights):
                columns, block = parts(label, index)
                found += float((weight[:, columns] @ block @ weight[:, columns].T).trace())
            return found

        best = min(left, key=cost)
        total += cost(best)
        for index, weight in enumerate(weights):
            columns, block = parts(best, index)
            update = block @ inverses[index][columns]
            weights[index] = weight - weight[:, columns] @ update[:, : weight.shape[1]]
            inverses[index] = inverses[index] - inverses[index][:, columns] @ update
        left.remove(best)
        order.append(best)
        errors.append(total)
    return order, errors


@pytest.mark.parametrize("pending", [1, 7, 64, 10**4])
def test_rows_that_wait_change_nothing(pending: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers that read labels once, twice or not at all, with more or fewer outputs than columns."""
    monkeypatch.setattr(elimination, "PENDING", pending)
    generator, labels, plain = torch.Generator().manual_seed(3), np.arange(10, 50), []
    for outputs, reads in (
        (60, labels),
        (5, np.repeat(labels, 2)),
        (9, labels[::3]),
        (4, np.sort([*labels, *labels[:7]])),
    ):
        size = len(reads)
        wide = torch.randn(300, size, generator=generator, dtype=torch.float64)
        mixed = wide @ torch.randn(size, size, generator=generator, dtype=torch.float64) + 1
        wide = torch.cat([mixed, torch.ones(300, 1, dtype=torch.float64)], 1)
        weight = torch.randn(outputs, size, generator=generator, dtype=torch.float64)
        plain.append((wide.T @ wide / 300, weight, reads))
    found = eliminate(labels, [LayerObjective(gram, weight.T @ weight, reads) for gram, weight, reads in plain])
    order, errors = one_by_one(plain, labels)
    assert found.labels.tolist() == order
    np.testing.assert_allclose(found.errors, errors, rtol=1e-9)


def test_a_weight_that_is_not_finite_is_named() -> None:
    model = randomized(nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU(), nn.Conv2d(4, 2, 1))).eval()
    with torch.no_grad():
        model[0].weight[1, 0] = torch.nan
    with pytest.raises(NonFiniteError, match=r"layer '2' reads NaN or Inf: '0\.weight' of the model is not finite"):
        collect_patches(model, [torch.randn(8, 3, 2, 2)], images=8)


def test_orders_are_computed_once_and_follow_other_numbers_of_labels(monkeypatch: pytest.MonkeyPatch) -> None:
    model = randomized(nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, 5), nn.ReLU(), nn.Linear(5, 3)))
    x = torch.randn(64, 6)
    chart, stats = trace(model, x[:2]), collect_patches(model, [x], rows=64, images=64)
    first = eliminations(model, chart, stats)
    monkeypatch.setattr("prunekit.criteria.elimination.eliminate", lambda *_: pytest.fail("computed again"))
    again = eliminations(model, chart, stats)
    assert first.keys() == again.keys() == {"0", "2"}
    for name, order in first.items():
        assert np.array_equal(order.labels, again[name].labels)
        assert np.array_equal(order.errors, again[name].errors)
    locked = with_extra(
        chart, [LockRecord("", "2", "", np.flatnonzero(chart.traced.final == chart.groups[1].labels[0]))]
    )
    monkeypatch.undo()
    other = eliminations(model, locked, stats)
    offset = locked.groups[0].labels[0] - chart.groups[0].labels[0]
    assert np.array_equal(other["0"].labels, first["0"].labels + offset)
    assert len(other["2"].labels) == 4


class Stacked(nn.Module):
    """Three matrices of a stack on parts of the channels, behind three others."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 12), nn.Linear(12, 3)
        self.up, self.down = nn.Parameter(torch.randn(3, 4, 8)), nn.Parameter(torch.randn(3, 8, 4))

    def forward(self, x: Tensor) -> Tensor:
        """Return (N, 3)."""
        parts = self.first(x).view(len(x), 3, 4).transpose(0, 1)
        rows = torch.bmm(torch.bmm(parts, self.up).relu(), self.down)
        return self.last(rows.transpose(0, 1).flatten(1))  # type: ignore[no-any-return]


def test_doubled_channels_of_a_stack_go_first() -> None:
    torch.manual_seed(0)
    model, x = Stacked().double().eval(), torch.randn(200, 6, dtype=torch.float64)
    with torch.no_grad():
        model.up[:, :, 5] = 2 * model.up[:, :, 1]
        model.up[:, :, 6] = 3 * model.up[:, :, 2]
    chart, stats = trace(model, x[:2]), collect_patches(model, [x], rows=10**6)
    (group,) = (group for group in chart.groups if ("up", 2) in group.slots)
    found = eliminations(model, chart, stats)[group.name]
    assert found.errors[1] < 0.1 * found.errors[2]
    gone = np.searchsorted(group.labels, found.labels[:2])
    assert {int(place) % 4 for place in gone} == {1, 2}
    result = pk.prune(model, calibration=x, params=0.8, round_to=1, repair=False)
    assert result.max_relative_difference < 1e-9
    assert result.model.up.shape[2] < 8
    with pk.masked(model, result.plan):
        torch.testing.assert_close(model(x), result.model(x), rtol=1e-10, atol=1e-10)


def test_rows_in_parts_cost_what_the_whole_weight_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A weight as wide as a vocabulary is never in float64 as a whole."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 40)).double().eval()
    found = pk.collect(model, torch.randn(64, 6, dtype=torch.float64))
    group = found.channel_map.groups[0]
    (whole,) = layer_objectives(group, model, found.channel_map, found.patches)
    monkeypatch.setattr(elimination, "PART", 5 * 3)
    (parts,) = layer_objectives(group, model, found.channel_map, found.patches)
    assert whole.products.shape == parts.products.shape == (5, 5)
    assert torch.allclose(whole.products, parts.products, rtol=1e-12)
    orders = [eliminate(group.labels, [one]) for one in (whole, parts)]
    assert np.array_equal(orders[0].labels, orders[1].labels)
    assert np.allclose(orders[0].errors, orders[1].errors, rtol=1e-9)
