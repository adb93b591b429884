"""Layers are known by their weights, whatever is called before them and however often: all calls of a weight count."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from prunekit.statistics.gram_matrices import PatchStats, collect_patches
from prunekit.statistics.layer_errors import with_gains
from prunekit.statistics.layer_graph import calls_by_weight, find_layers
from prunekit.statistics.output_error import OutputComparison


class Stacked(nn.Module):
    """Scales its samples one by one before it looks at all of them; what a layer gives waits while they are looped."""

    def __init__(self, *, looping: bool = True) -> None:
        super().__init__()
        self.one, self.two, self.last = nn.Linear(6, 5), nn.Linear(5, 5), nn.Linear(5, 3)
        self.looping = looping

    def scaled(self, x: Tensor) -> Tensor:
        return torch.stack([row * 2 + 1 for row in x]) if self.looping else x * 2 + 1

    def forward(self, x: Tensor) -> Tensor:
        x = self.one(self.scaled(x)).relu()
        x = self.scaled(self.two(x)) + x
        x = self.two(x.relu()) + self.scaled(x)
        return self.last(x)  # type: ignore[no-any-return]


class Pyramid(nn.Module):
    """One head for three maps, of which the last are of the size of a sample; returns what scores best."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, padding=1)
        self.head, self.scores, self.offsets = nn.Conv2d(4, 5, 3, padding=1), nn.Conv2d(5, 1, 1), nn.Conv2d(5, 2, 1)
        self.refined = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> list[dict[str, Tensor]]:
        x = self.stem(x)
        maps = [self.head(F.avg_pool2d(x, size)).relu() for size in (1, 2, 4)]
        scores = torch.cat([self.scores(each).flatten(1) for each in maps], 1)
        offsets = torch.cat([self.offsets(each).flatten(2) for each in maps], 2).mT
        found = []
        for score, offset in zip(scores.sigmoid(), offsets, strict=True):
            best = score.topk(3)
            found.append({"score": best.values, "offset": self.refined(offset[best.indices]).clamp(max=4)})
        return found


def collected(model: nn.Module, x: Tensor, size: int) -> PatchStats:
    return collect_patches(model.eval(), list(x.split(size)), rows=10**6, images=len(x))


@pytest.mark.parametrize("size", [1, 7, 32])
def test_moments_do_not_depend_on_how_samples_are_looped_over(size: int) -> None:
    torch.manual_seed(0)
    looped, x = Stacked().double(), torch.randn(32, 6, dtype=torch.float64)
    whole = Stacked(looping=False).double()
    whole.load_state_dict(looped.state_dict())
    got, want = collected(looped, x, size), collected(whole, x, 32)
    assert [each.layer.weight for each in got.layers] == ["one.weight", "two.weight", "last.weight"]
    for one, other in zip(got.layers, want.layers, strict=True):
        assert one.rows == other.rows == 32 * other.layer.calls
        torch.testing.assert_close(one.grams[0], other.grams[0])
        torch.testing.assert_close(one.variance, other.variance)


def test_rows_of_all_calls_of_a_weight_count_as_one_layer() -> None:
    torch.manual_seed(0)
    model, x = Pyramid().double().eval(), torch.randn(6, 3, 8, 8, dtype=torch.float64)
    (moments,) = (each for each in collected(model, x, 4).layers if each.layer.weight == "head.weight")
    stem = model.stem(x)
    patches = [F.unfold(F.avg_pool2d(stem, size), 3, padding=1).mT.flatten(0, 1) for size in (1, 2, 4)]
    rows = torch.cat(patches)
    assert moments.rows == len(rows)
    torch.testing.assert_close(moments.grams[0][:-1, :-1], (rows.T @ rows / len(rows)).detach())
    made = torch.cat([model.head(F.avg_pool2d(stem, size)).permute(0, 2, 3, 1).flatten(0, 2) for size in (1, 2, 4)])
    torch.testing.assert_close(moments.variance, made.var(0).detach())


def test_fewer_rows_are_drawn_from_every_call_alike() -> None:
    x = torch.randn(6, 3, 8, 8)
    found = collect_patches(Pyramid().eval(), [x], rows=252, images=6)
    assert {each.layer.weight: each.rows for each in found.layers}["head.weight"] == 252  # of 504


def test_calls_of_a_weight_keep_what_they_have_in_common() -> None:
    class Tower(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.normed, self.norm, self.mixed = nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), nn.Conv2d(3, 3, 1)

        def forward(self, x: Tensor) -> Tensor:
            one, other = (F.relu(self.norm(self.normed(each))) for each in (x, x + 1))
            return F.relu(self.mixed(one)) + (self.mixed(other) + one)  # type: ignore[no-any-return]

    found = calls_by_weight(find_layers(Tower().eval(), torch.randn(2, 3, 4, 4)))
    assert [(each.norm, each.rectified, each.calls) for each in found["normed.weight"]] == [("norm", True, 2)] * 2
    assert [(each.total, each.rectified) for each in found["mixed.weight"]] == [(None, False)] * 2


def test_what_selects_by_values_is_judged_by_what_it_selects_from() -> None:
    torch.manual_seed(0)
    model, x = Pyramid().eval(), torch.randn(8, 3, 8, 8)
    judge = OutputComparison.of(model, (x,))
    assert judge == OutputComparison((), ("scores.weight", "offsets.weight"))
    values = judge.values(model, (x,))
    assert [(key, tuple(value.shape)) for key, value in values[:2]] == [
        ("scores.weight", (512, 1)),
        ("scores.weight", (128, 1)),
    ]
    selected = {layer.weight: layer.selected for layer in find_layers(model, x[:2])}
    assert selected == {
        "stem.weight": False, "head.weight": False, "scores.weight": False, "offsets.weight": False,
        "refined.weight": True,
    }  # fmt: skip
    gains = {each.layer.weight: each.output_gain for each in with_gains(model, collected(model, x, 8), x).layers}
    assert gains["head.weight"] not in {0.0, 1.0}


class Cropped(nn.Module):
    """Puts what values selected into a tensor that is as long as these are many, and takes that further."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.score, self.two = nn.Linear(6, 4), nn.Linear(4, 1), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> list[Tensor]:
        x = self.one(x)
        likely = x[self.score(x)[:, 0] > 0]
        both, large = torch.zeros(len(likely), 4), likely.sum(1) > 0
        for at in (torch.where(large)[0], torch.where(~large)[0]):
            both[at] = likely[at] * 2
        return [self.two(both)]


def test_what_is_selected_stays_so_where_it_is_written_to_another_tensor() -> None:
    torch.manual_seed(0)
    model, x = Cropped().eval(), torch.randn(9, 6)
    assert [layer.selected for layer in find_layers(model, x)] == [False, False, True]
    assert OutputComparison.of(model, (x,)) == OutputComparison((), ("one.weight", "score.weight"))


class Routed(nn.Module):
    """Sorts samples by a score, and puts them back."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.score, self.two = nn.Linear(6, 4), nn.Linear(4, 1), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.one(x)
        order = self.score(x)[:, 0].argsort()
        return self.two(x[order])[order.argsort()]  # type: ignore[no-any-return]


def test_what_lies_as_the_samples_do_is_judged_behind_a_selection_too() -> None:
    judge = OutputComparison.of(Routed().eval(), (torch.randn(8, 6),))
    assert judge == OutputComparison((0,), ("one.weight", "score.weight"), selected=True)


class Several(nn.Module):
    """A dictionary of outputs, one of which says nothing of the samples; a lookup by the nearest entry of a table."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.table = nn.Linear(6, 4), nn.Linear(6, 3), nn.Parameter(torch.randn(5, 4))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        one = self.one(x)
        nearest = torch.cdist(one, self.table).argmin(1)
        return {"code": self.table[nearest], "one": one, "again": one, "two": self.two(x).T, "table": self.table}


def test_all_outputs_are_judged_and_others_by_the_layers_that_make_them() -> None:
    judge = OutputComparison.of(Several().eval(), (torch.randn(8, 6),))
    assert judge == OutputComparison((0, 1), ("two.weight",))
