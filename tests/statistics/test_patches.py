"""Patches against `F.unfold`, Gram matrices against a plain product, layers against what a model visibly does."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from prunekit.statistics.gram_matrices import collect_patches
from prunekit.statistics.layer_graph import find_layers
from prunekit.statistics.patches import BLOCK, HALVED, PatchGeometry, geometry_of, gram, gram_bytes, sample_rows
from prunekit.utils.tensors import is_finite


@pytest.mark.parametrize(("stride", "padding", "dilation"), [(1, 1, 1), (2, 0, 1), (2, 2, 2)])
def test_patches_are_those_of_unfold(stride: int, padding: int, dilation: int) -> None:
    x, weight = torch.randn(3, 4, 9, 8, dtype=torch.float64), torch.randn(5, 4, 3, 2, dtype=torch.float64)
    how = geometry_of("conv2d", (x, weight, None, stride, padding, dilation), {})
    assert how is not None
    out = F.conv2d(x, weight, None, stride, padding, dilation)
    rows = torch.arange(how.rows(out))
    patches = how.patches(x, rows, tuple(out.shape[2:]))
    unfolded = F.unfold(x, (3, 2), dilation, padding, stride).transpose(1, 2).reshape(-1, 24)
    assert torch.equal(patches, unfolded)
    torch.testing.assert_close(patches @ weight.flatten(1).T, how.outputs(out, rows))


def test_patches_do_not_depend_on_the_memory_layout() -> None:
    x = torch.randn(2, 4, 6, 6).to(memory_format=torch.channels_last)
    how, rows = PatchGeometry((3, 3), (1, 1), (0, 0), (1, 1)), torch.tensor([0, 5, 17])
    assert torch.equal(how.patches(x, rows, (4, 4)), how.patches(x.contiguous(), rows, (4, 4)))
    assert torch.equal(how.centers(x, rows, (4, 4)), how.outputs(x[:, :, 1:5, 1:5], rows))


def test_linear_rows_are_tokens() -> None:
    x, how = torch.randn(2, 5, 3), geometry_of("linear", (), {})
    assert how is not None
    assert torch.equal(how.patches(x, torch.tensor([0, 7]), ()), torch.stack([x[0, 0], x[1, 2]]))


@pytest.mark.parametrize("columns", [64, HALVED + 1])
@pytest.mark.parametrize(("kind", "tolerance"), [(torch.float64, 1e-14), (torch.float32, 1e-6)])
def test_the_gram_matrix_is_summed_block_by_block(kind: torch.dtype, tolerance: float, columns: int) -> None:
    inputs = torch.randn(2 * BLOCK + 100, columns, dtype=kind)
    wide = torch.cat([inputs.double(), torch.ones(len(inputs), 1, dtype=torch.float64)], 1)
    torch.testing.assert_close(gram(inputs), wide.T @ wide / len(wide), rtol=0, atol=tolerance)
    assert gram(inputs).nbytes == gram_bytes(columns)


def test_squares_beyond_float32_are_finite() -> None:
    values = torch.full((10, 2), 1e25)
    torch.testing.assert_close(gram(values)[:2, :2], torch.full((2, 2), 1e50, dtype=torch.float64), rtol=1e-6, atol=0)


def test_coarse_products_of_float32_are_not_used() -> None:
    values = torch.randn(BLOCK, 4)
    torch.set_float32_matmul_precision("medium")
    try:
        assert torch.equal(gram(values), gram(values.double()))
    finally:
        torch.set_float32_matmul_precision("highest")


def test_sampled_rows_are_distinct_and_repeatable() -> None:
    rows = sample_rows(1000, 100, 3)
    assert len(rows.unique()) == 100
    assert torch.equal(rows, sample_rows(1000, 100, 3))
    assert torch.equal(sample_rows(5, 100, 3), torch.arange(5))


class Block(nn.Module):
    def __init__(self, *, late: bool) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4)
        self.conv2 = nn.Conv2d(4, 3, 1)
        self.late = late

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x if self.late else x * 2
        out = self.conv2(F.dropout(F.relu(self.bn1(self.conv1(x)), inplace=True), training=self.training))
        out += shortcut * 2 if self.late else shortcut
        return F.relu(out)


@pytest.mark.parametrize("late", [False, True])
def test_layers_are_found_with_what_follows_them(late: bool) -> None:
    first, second = find_layers(Block(late=late).eval(), torch.randn(2, 3, 4, 4))
    assert (first.weight, first.norm, first.rectified, first.other) == ("conv1.weight", "bn1", True, None)
    assert (second.weight, second.bias, second.norm, second.rectified) == ("conv2.weight", "conv2.bias", None, True)
    assert second.total is not None
    assert second.deferred is late


def test_what_others_read_too_is_no_part_of_the_chain() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.bn = nn.Conv2d(3, 4, 1, bias=False), nn.BatchNorm2d(4)

        def forward(self, x: Tensor) -> Tensor:
            out = self.conv(x)
            return F.relu(self.bn(out)) * out.sigmoid()

    (layer,) = find_layers(Both().eval(), torch.randn(2, 3, 4, 4))
    assert layer.norm is None
    assert not layer.rectified


@pytest.mark.parametrize(("stride", "padding", "dilation"), [(1, 1, 1), (2, 0, 1), (2, 2, 2)])
def test_places_are_what_unfolded_positions_say(stride: int, padding: int, dilation: int) -> None:
    x, weight = torch.randn(3, 1, 9, 8, dtype=torch.float64), torch.randn(1, 1, 3, 2, dtype=torch.float64)
    how = geometry_of("conv2d", (x, weight, None, stride, padding, dilation), {})
    assert how is not None
    number = torch.arange(1.0, x.numel() + 1, dtype=torch.float64).view_as(x)  # 0 is padding
    unfolded = F.unfold(number, (3, 2), dilation, padding, stride).transpose(1, 2).reshape(-1, 6)
    places, there = how.places(torch.arange(len(unfolded)), how.spatial(x), (9, 8))
    assert torch.equal(there, unfolded > 0)
    assert torch.equal(places[there], unfolded[there].long() - 1)
    assert 0 <= int(places.min()) <= int(places.max()) < x.numel()


@pytest.mark.parametrize("kind", [torch.float32, torch.float64])
def test_variances_of_linear_layers_are_those_of_their_outputs(kind: torch.dtype) -> None:
    """They come from the Gram matrices, in parts of the weight, also where means are far larger than deviations."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 7), nn.Softplus(), nn.Linear(7, 5, bias=False)).to(kind)
    x = torch.randn(90, 4, 6, dtype=kind) + 20
    found = collect_patches(model, [x[:50], x[50:]], rows=10**6)
    outputs = [model[0](x), model(x)]
    for moments, values in zip(found.layers, outputs, strict=True):
        expected = values.detach().double().flatten(0, 1).var(0)
        rtol = 1e-9 if kind == torch.float64 else 1e-2
        torch.testing.assert_close(moments.variance, expected, rtol=rtol, atol=0)


def test_one_value_that_is_not_finite_is_found() -> None:
    for bad in (torch.nan, torch.inf, -torch.inf):
        for values in (torch.ones(3, 4), torch.ones(3, 4).half(), torch.ones(5, dtype=torch.complex64)):
            assert is_finite(values)
            values.view(-1)[2] = bad
            assert not is_finite(values)
    assert is_finite(torch.empty(0))
    assert is_finite(torch.tensor([True, False]))
    assert is_finite(torch.tensor(3))
    assert is_finite(torch.ones(2, dtype=torch.uint16))
