"""Moments of matrices in a stack: each has those of the rows that are multiplied with it, however they are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from prunekit.channels.trace import trace
from prunekit.criteria.elimination import layer_objectives, unread_stacks, weighted_output_count
from prunekit.statistics.gram_matrices import (
    LayerMoments,
    collect_patches,
    dead_inputs,
    too_few_rows,
    with_raised_ridge,
)
from prunekit.statistics.layer_graph import find_layers

EXPERTS, TAKEN, WIDTH, INNER = 4, 2, 4, 8  # rows of a grouped product are multiples of 16 bytes
Product = Callable[[Tensor, Tensor, Tensor], Tensor]


def by_number(x: Tensor, numbers: Tensor, stack: Tensor) -> Tensor:
    rows = x.new_zeros(len(x), stack.shape[1])
    for number in numbers.unique():
        rows = rows.index_add(0, torch.where(numbers == number)[0], F.linear(x[numbers == number], stack[number]))
    return rows


def by_iteration(x: Tensor, numbers: Tensor, stack: Tensor) -> Tensor:
    parts = [x[numbers == at] @ matrix.t() for at, matrix in enumerate(stack.unbind(0))]
    return torch.cat(parts)[numbers.argsort(stable=True).argsort()]


def by_gathered(x: Tensor, numbers: Tensor, stack: Tensor) -> Tensor:
    return torch.bmm(stack[numbers], x[..., None]).squeeze(-1)


def by_gathered_on_the_right(x: Tensor, numbers: Tensor, stack: Tensor) -> Tensor:
    return torch.matmul(x[:, None], stack.index_select(0, numbers).mT).squeeze(1)


def by_doubled_gathered(x: Tensor, numbers: Tensor, stack: Tensor) -> Tensor:
    return torch.baddbmm(x.new_zeros(1), x[:, None], stack.transpose(1, 2).to(x.dtype)[numbers]).squeeze(1)


def grouped(x: Tensor, numbers: Tensor, stack: Tensor) -> Tensor:
    order = numbers.argsort(stable=True)
    offsets = torch.bincount(numbers, minlength=EXPERTS).cumsum(0).to(torch.int32)
    rows = torch._grouped_mm(x[order], stack.transpose(1, 2), offs=offsets)  # type: ignore[attr-defined]
    return rows[order.argsort()]  # type: ignore[no-any-return]


FORMS: list[Product] = [by_number, by_iteration, by_gathered, by_gathered_on_the_right, by_doubled_gathered]


class Mixture(nn.Module):
    """Experts between two layers, whose stacks are stored in either order."""

    def __init__(self, product: Product, *, swapped: bool = False) -> None:
        super().__init__()
        self.first, self.router = nn.Linear(3, WIDTH), nn.Linear(WIDTH, EXPERTS)
        shapes = [(EXPERTS, INNER, WIDTH), (EXPERTS, WIDTH, INNER)]
        self.up, self.down = (nn.Parameter(torch.randn(shape)) for shape in shapes)
        if swapped:
            self.up, self.down = (nn.Parameter(stack.detach().mT.contiguous()) for stack in (self.up, self.down))
        self.last, self.product, self.swapped = nn.Linear(WIDTH, 2), product, swapped

    def choice(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the shares and numbers of the experts of each token."""
        shares, taken = self.router(x).softmax(-1).topk(TAKEN)
        return shares, taken

    def forward(self, ids: Tensor) -> Tensor:
        """Return (N, 2)."""
        x = self.first(ids)
        shares, taken = self.choice(x)
        up, down = (stack.mT if self.swapped else stack for stack in (self.up, self.down))
        inner = F.gelu(self.product(x.repeat_interleave(TAKEN, 0), taken.flatten(), up))
        rows = self.product(inner, taken.flatten(), down) * shares.flatten()[:, None]
        return self.last(x + rows.view(len(x), TAKEN, -1).sum(1))  # type: ignore[no-any-return]


def built(product: Product, dtype: torch.dtype = torch.float64, *, swapped: bool = False) -> tuple[Mixture, Tensor]:
    torch.manual_seed(0)
    model = Mixture(product, swapped=swapped).eval().to(dtype)
    return model, torch.randn(40, 3, dtype=dtype)


def by_hand(model: Mixture, ids: Tensor) -> tuple[list[Tensor], list[Tensor], Tensor]:
    """Return what each matrix of both stacks reads, and what the second stack returns."""
    with torch.no_grad():
        x = model.first(ids)
        taken = model.choice(x)[1].flatten()
        up, down = (stack.mT if model.swapped else stack for stack in (model.up, model.down))
        rows = x.repeat_interleave(TAKEN, 0)
        inner = F.gelu(by_gathered(rows, taken, up))
        read = [[values[taken == number] for number in range(EXPERTS)] for values in (rows, inner)]
        return *read, by_gathered(inner, taken, down)  # type: ignore[return-value]


def gram_of(rows: Tensor) -> Tensor:
    wide = torch.cat([rows, torch.ones(len(rows), 1, dtype=rows.dtype)], 1)
    return wide.T @ wide / max(1, len(rows))


def of_stacks(model: nn.Module, batches: list[Tensor], **limits: int) -> dict[str, LayerMoments]:
    stats = collect_patches(model, batches, rows=10**6, images=sum(map(len, batches)), **limits)  # type: ignore[arg-type]
    return {moments.layer.weight: moments for moments in stats.layers if moments.layer.stack}


@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize("product", FORMS)
def test_each_matrix_has_the_moments_of_its_rows(product: Product, swapped: bool) -> None:
    model, ids = built(product, swapped=swapped)
    found = of_stacks(model, [ids[:30], ids[30:]])
    assert list(found) == ["up", "down"]
    *read, returned = by_hand(model, ids)
    for moments, rows in zip(found.values(), read, strict=True):
        assert moments.layer.axes == ((2, 1) if swapped else (1, 2))
        assert moments.counts == tuple(map(len, rows))
        for gram, of in zip(moments.grams, rows, strict=True):
            torch.testing.assert_close(gram, gram_of(of), rtol=1e-12, atol=1e-12)  # type: ignore[arg-type]
    share = torch.tensor(found["down"].counts).double() / (len(ids) * TAKEN)
    expected = returned.var(0) / share[:, None]
    torch.testing.assert_close(found["down"].variance, expected.flatten(), rtol=1e-10, atol=0)


def test_grouped_products_have_the_same_moments() -> None:
    model, ids = built(grouped, torch.float32)
    found = of_stacks(model, [ids])
    assert list(found) == ["up", "down"]
    for moments, rows in zip(found.values(), by_hand(model, ids)[:2], strict=True):
        assert moments.counts == tuple(map(len, rows))
        for gram, of in zip(moments.grams, rows, strict=True):
            torch.testing.assert_close(gram, gram_of(of.double()), rtol=1e-5, atol=1e-5)


class Dense(nn.Module):
    """All of the experts on each token, behind one shared tensor, and their mean."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, WIDTH), nn.Linear(WIDTH, 2)
        self.up, self.down = (nn.Parameter(torch.randn(s)) for s in ((EXPERTS, WIDTH, INNER), (EXPERTS, INNER, WIDTH)))

    def forward(self, x: Tensor) -> Tensor:
        """Return (N, 2)."""
        inner = torch.matmul(self.first(x)[None], self.up).tanh()
        return self.last(torch.bmm(inner, self.down).mean(0))  # type: ignore[no-any-return]


def test_an_error_is_that_of_the_output_of_all_rows() -> None:
    torch.manual_seed(0)
    model, x = Dense().double().eval(), torch.randn(50, 3, dtype=torch.float64)
    chart, stats = trace(model, x[:3]), collect_patches(model, [x], rows=10**6)
    (group,) = (group for group in chart.groups if ("down", 1) in group.slots)
    objectives = layer_objectives(group, model, chart, stats)
    assert len(objectives) == EXPERTS
    kept = torch.ones(INNER, dtype=torch.float64)
    kept[[1, 4]] = 0
    error = sum(
        float((each.products * torch.outer(1 - kept, 1 - kept) * each.gram[:-1, :-1]).sum()) for each in objectives
    )
    with torch.no_grad():
        inner = torch.matmul(model.first(x)[None], model.up).tanh()
        dense, less = (torch.bmm(inner * factor, model.down).flatten(0, 1) for factor in (1.0, kept))
    assert error == pytest.approx(float((dense - less).square().mean(0).div(dense.var(0)).sum()), rel=1e-9)
    assert weighted_output_count(group, chart, stats) == WIDTH
    assert unread_stacks(chart, stats) == ()


def test_products_that_are_not_known_are_noted() -> None:
    class Summed(Dense):
        def forward(self, x: Tensor) -> Tensor:
            inner = torch.einsum("nd,edi->eni", self.first(x), self.up).tanh()
            return self.last(torch.einsum("eni,eid->nd", inner, self.down))  # type: ignore[no-any-return]

    model, x = Summed().eval(), torch.randn(8, 3)
    chart, stats = trace(model, x[:3]), collect_patches(model, [x])
    (note,) = unread_stacks(chart, stats)
    assert "channels of down, up are not ranked" in note


def test_one_matrix_stands_for_all_where_memory_is_short() -> None:
    model, ids = built(by_gathered)
    whole, less = of_stacks(model, [ids]), of_stacks(model, [ids], memory_bytes=1000)
    for moments, pooled in zip(whole.values(), less.values(), strict=True):
        assert len({id(gram) for gram in pooled.grams}) == 1
        assert len(pooled.grams) == EXPERTS
        assert pooled.rows == moments.rows == len(ids) * TAKEN
        mean = sum(gram * count for gram, count in zip(moments.grams, moments.counts, strict=True)) / moments.rows
        torch.testing.assert_close(pooled.grams[0], mean, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(pooled.variance, moments.variance)


def test_only_matrices_with_few_rows_have_a_raised_ridge() -> None:
    model, ids = built(by_number)
    with torch.no_grad():
        model.router.bias[-1] += 0.5
    stats = collect_patches(model, [ids], rows=10**6)
    before = {moments.layer.weight: moments for moments in stats.layers}
    after = {moments.layer.weight: moments for moments in with_raised_ridge(stats, 0.01).layers}
    counts = before["up"].counts
    assert min(counts) < WIDTH + 1 < sorted(counts)[1]
    for gram, raised, count in zip(before["up"].grams, after["up"].grams, counts, strict=True):
        assert torch.equal(gram, raised) is (count > WIDTH)
    (said,) = too_few_rows(replace(stats, layers=(before["up"],)))
    assert f"patches of up[{counts.index(min(counts))}] has rank" in said
    assert dead_inputs(stats) == []


def test_parts_of_matrices_are_no_stacks() -> None:
    class Cut(Dense):
        def forward(self, x: Tensor) -> Tensor:
            inner = torch.matmul(self.first(x)[None], self.up[..., 1:]).tanh()
            return self.last(torch.bmm(inner, self.down.flip(1)[:, 1:]).mean(0))  # type: ignore[no-any-return]

    assert [layer.weight for layer in find_layers(Cut(), torch.randn(3, 3), stacks=True)] == [
        "first.weight",
        "last.weight",
    ]
