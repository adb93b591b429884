"""Gains of layers: measured on the output, near to what is had by pruning and refitting by hand."""

from __future__ import annotations

import copy
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from equivalence import randomized, snapshot
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from prunekit.statistics import gram_matrices
from prunekit.statistics.gram_matrices import collect_patches, with_raised_ridge
from prunekit.statistics.layer_errors import RIDGE, _Change, with_gains
from prunekit.statistics.output_error import OutputComparison
from prunekit.utils.outputs import ReadOutputs


def by_hand(model: nn.Sequential, index: int, x: Tensor) -> float:
    """Prune every second input of a linear layer, refit it, and return what that does to the output, to first order."""
    with torch.no_grad():
        layer, read, dense = model[index], model[:index](x), model(x)
        count, width = read.shape
        pull = (RIDGE * read.square().mean() * count) ** 0.5 * torch.eye(width, width + 1, dtype=x.dtype)
        rows, left = torch.cat([torch.cat([read, x.new_ones(count, 1)], 1), pull]), [*range(0, width, 2), width]
        gone = torch.cat([read[:, 1::2], x.new_zeros(width, width // 2)])
        instead = rows[:count, left] @ torch.linalg.lstsq(rows[:, left], gone).solution
        was, missing = layer(read), (instead - read[:, 1::2]) @ layer.weight[:, 1::2].T
        error = (missing.square().mean(0) / was.var(0)).sum()
        with torch.enable_grad():
            _, change = torch.autograd.functional.jvp(model[index + 1 :], was, missing)
        assert change.shape == dense.shape
        return float(change.square().mean() / error)


def nets(seed: int) -> tuple[nn.Sequential, Tensor]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    return model, torch.randn(512, 6, dtype=torch.float64) + 0.3


def gains(model: nn.Module, x: Tensor) -> list[float]:
    return [each.output_gain for each in with_gains(model, collect_patches(model, [x], rows=512, images=512), x).layers]


def test_gains_are_what_the_output_makes_of_half_a_layer() -> None:
    model, x = nets(0)
    expected = [by_hand(model, index, x) for index in (0, 2, 4)]
    usual = sorted(expected)[1]
    assert gains(model, x) == pytest.approx([each / usual for each in expected], rel=0.2)  # by 512 random signs


@pytest.mark.parametrize("bias", [False, True])
def test_few_rows_give_the_gains_of_their_gram_matrix(bias: bool) -> None:
    torch.manual_seed(2)
    layers = [nn.Linear(90, 70, bias), nn.Tanh(), nn.Linear(70, 80, bias), nn.Tanh(), nn.Linear(80, 3, bias)]
    model, x = nn.Sequential(*layers).double(), torch.randn(30, 90, dtype=torch.float64) + 0.3
    stats = with_raised_ridge(collect_patches(model, [x[:17], x[17:]], rows=30, images=30), RIDGE)
    assert [len(torch.cat(each.read)) for each in stats.layers] == [30, 30, 30]
    whole = replace(stats, layers=tuple(replace(each, read=()) for each in stats.layers))
    found, wanted = ([each.output_gain for each in with_gains(model, some, x).layers] for some in (stats, whole))
    assert found == pytest.approx(wanted, rel=1e-8)


class Speaker(nn.Module):
    """Returns scores of tokens under the name that transformers gives them."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.body = nn.Embedding(12, 6), nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8))
        self.head = nn.Linear(8, 12)

    def forward(self, ids: Tensor) -> SimpleNamespace:
        return SimpleNamespace(logits=self.head(self.body(self.table(ids)).tanh()))


def test_gains_of_scores_of_tokens_are_divergences_of_probabilities() -> None:
    torch.manual_seed(1)
    model = Speaker().double().requires_grad_(False)
    model.head.weight.data *= 6  # sure of some tokens, whose scores then matter less than the others'
    ids = torch.randint(12, (512, 5))
    stats = collect_patches(model, [ids], rows=2560, images=512)
    found = [moments.output_gain for moments in with_gains(model, stats, ids).layers]
    dense, expected = model(ids).logits.detach().log_softmax(-1), list[float]()
    for moments in stats.layers:
        changed, small = copy.deepcopy(model), 1e-3
        change = _Change.of(moments, dict(changed.named_parameters()), dict(changed.named_modules()))
        for name, part in change.by_parameter(dict(changed.named_modules())):
            changed.get_parameter(name).data += small * part
        got = changed(ids).logits.detach().log_softmax(-1)
        divergence = float((dense.exp() * (dense - got)).sum(-1).mean())
        expected.append(divergence / small**2 / change.error)
    usual = sorted(expected)[len(expected) // 2]
    assert found == pytest.approx([each / usual for each in expected], rel=0.25)


def test_moments_before_a_vocabulary_need_none_of_its_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(1)
    model, x = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 96)).double(), torch.randn(512, 6).double()
    found, flops = [], []
    for wide in (gram_matrices.VOCABULARY, 1000):
        monkeypatch.setattr(gram_matrices, "VOCABULARY", wide)
        with FlopCounterMode(display=False) as counter:
            found.append(collect_patches(model, [x], rows=512, images=512).layers)
        flops.append(counter.get_total_flops())
    assert all(torch.equal(a.grams[0], b.grams[0]) for a, b in zip(*found, strict=True))
    assert all(torch.equal(a.variance, b.variance) for a, b in zip(*found, strict=True))
    assert flops[1] - flops[0] == 2 * 8 * 96 * 512


class Selected(nn.Module):
    """Returns what no gradient reaches, so that each layer is changed by itself."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            return self.inner(x)


def test_gains_without_gradients_are_near_those_with() -> None:
    model, x = nets(1)
    for with_gradients, without in zip(gains(model, x), gains(Selected(model), x), strict=True):
        assert without == pytest.approx(with_gradients, rel=0.6)
        assert without != with_gradients or without == 1


class Pooled(nn.Module):
    """Two branches of the same size, of which one is pooled before it counts."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(8)
        self.pooled, self.straight = nn.Conv2d(8, 4, 3, padding=1, groups=2), nn.Conv2d(8, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.stem(x))
        return torch.cat([self.pooled(x).mean((2, 3)), self.straight(x)[:, :, 2, 2]], 1)


@pytest.mark.parametrize("memory_bytes", [2**31, 1000])
def test_errors_that_are_averaged_away_count_less_and_the_model_stays(memory_bytes: int) -> None:
    model, x = randomized(Pooled()), torch.randn(256, 3, 6, 6, generator=torch.Generator().manual_seed(1))
    before = snapshot(model)
    stats = collect_patches(model, [x], rows=4096, images=256, memory_bytes=memory_bytes)
    found = {each.layer.weight: each.output_gain for each in with_gains(model, stats, x).layers}
    assert found["pooled.weight"] < 0.3 * found["straight.weight"]
    assert found["stem.weight"] > 0
    assert all(torch.equal(tensor, before[name]) for name, tensor in snapshot(model).items())


def test_a_layer_of_one_channel_has_nothing_to_measure() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 1), nn.Linear(1, 4), nn.Linear(4, 2)), torch.randn(64, 4)
    found = gains(model, x)
    assert found[1] == 1
    assert found[0] + found[2] == pytest.approx(2)


class Unusual(nn.Module):
    """Products with stored transposes, one with a table that tokens read, a layer used twice, no bias, and relu_."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.twice = nn.Embedding(20, 6), nn.Linear(6, 6)
        self.head = self.table.weight
        self.stored, self.plain = nn.Parameter(torch.randn(6, 8)), nn.Parameter(torch.randn(6, 8))
        self.last = nn.Linear(6, 1, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        x = self.twice(self.twice(x).relu_()).tanh()
        x = (x @ self.stored).tanh() @ self.plain.t()
        return self.last(x).sum(1) + (x @ self.head.T).tanh().mean((1, 2))[:, None]


def test_gains_of_one_output_are_exact_for_all_ways_to_multiply() -> None:
    """A single output has a random sign alone, of which the square is 1."""
    torch.manual_seed(3)
    model, tokens = Unusual().double().eval(), torch.randint(0, 20, (40, 5))
    stats = collect_patches(model, [tokens], rows=10**6, images=40)
    names = {each.layer.weight for each in stats.layers}
    assert names == {"twice.weight", "stored", "plain", "last.weight", "head"}
    apart, expected = copy.deepcopy(model), []
    apart.table.weight = nn.Parameter(apart.head.detach().clone())  # what tokens read does not change
    tensors, modules = dict(apart.named_parameters()), dict(apart.named_modules())
    for each in stats.layers:
        change = _Change.of(each, {name: tensor.detach() for name, tensor in tensors.items()}, modules)
        parts, total = dict(change.by_parameter(modules)), 0.0
        for one in tokens:
            gradients = torch.autograd.grad(apart(one[None]).sum(), [tensors[name] for name in parts])
            total += sum(float((a * b).sum()) for a, b in zip(gradients, parts.values(), strict=True)) ** 2
        expected.append(total / change.error)
    found = [each.output_gain for each in with_gains(model, stats, tokens).layers]
    usual = sorted(expected)[2]
    assert found == pytest.approx([each / usual for each in expected], rel=1e-6)


@pytest.mark.slow
def test_a_tied_weight_has_gains_in_both_directions() -> None:
    """The same numbers as of a net whose decoder has a weight of its own."""

    class Tied(nn.Module):
        def __init__(self, back: nn.Parameter | None) -> None:
            super().__init__()
            self.a, self.b, self.back = nn.Linear(6, 8), nn.Linear(8, 4, bias=False), back

        def forward(self, x: Tensor) -> Tensor:
            code = self.b(self.a(x).tanh()).tanh()
            return code @ (self.b.weight if self.back is None else self.back)

    torch.manual_seed(0)
    tied, x = Tied(None).double(), torch.randn(512, 6, dtype=torch.float64)
    apart = Tied(nn.Parameter(tied.b.weight.detach().clone())).double()
    apart.load_state_dict(tied.state_dict(), strict=False)
    assert [round(gain, 6) for gain in gains(tied, x)] == [round(gain, 6) for gain in gains(apart, x)]


LIBRARY = torch.library.Library("prunekit_gains", "DEF")
LIBRARY.define("halved(Tensor x) -> Tensor")
LIBRARY.impl("halved", lambda x: x / 2, "CPU")  # without a gradient, as the layers of quantized models


class Cut(nn.Module):
    """Goes on behind an operator without a gradient; `around` adds a path that has one."""

    def __init__(self, around: bool) -> None:
        super().__init__()
        self.a, self.b, self.around = nn.Linear(6, 8), nn.Linear(8, 3), around

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        halved = torch.ops.prunekit_gains.halved(x)
        return self.b(halved + x if self.around else halved)  # type: ignore[no-any-return]


@pytest.mark.parametrize("around", [False, True])
def test_gains_before_an_operator_without_a_gradient(around: bool) -> None:
    """They are those by running the model, where a path around it would have a gradient of its own."""
    torch.manual_seed(0)
    model, x = Cut(around).double(), torch.randn(512, 6, dtype=torch.float64)
    found = gains(model, x)
    assert len(set(found)) == 2
    assert found == gains(Selected(model), x)


class Codes(nn.Module):
    """The nearest of some codes, by one weight that is used in both directions."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.codes, self.out = nn.Linear(6, 8), nn.Embedding(12, 8), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        nearest = (self.a(x) @ self.codes.weight.t()).argmax(1)
        chosen: Tensor = self.out(nn.functional.one_hot(nearest, 12).to(x.dtype) @ self.codes.weight)
        return chosen


def test_a_weight_that_is_compared_may_be_used_in_both_directions() -> None:
    model, x = Codes().eval(), torch.randn(16, 6)
    with torch.no_grad():
        found = OutputComparison((), ("codes.weight", "out.weight"), ReadOutputs()).values(model, (x,))
    assert [(key, tuple(values.shape)) for key, values in found] == [
        ("codes.weight", (16, 12)),
        ("out.weight", (16, 5)),
    ]
