"""Patterns of zeros: what is planted is found, whatever the layout of the weight."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune as torch_prune

from prunekit.compaction.zero_patterns import zero_pattern, zero_patterns


def n_of_m(rows: int, columns: int, n: int, m: int) -> Tensor:
    """Return a weight of which n of m neighbors in each row are not zero."""
    scores = torch.rand(rows, columns // m, m, generator=torch.Generator().manual_seed(0))
    return (scores.argsort(-1).argsort(-1) < n).flatten(1).float()


@pytest.mark.parametrize(
    ("n", "m", "name"), [(2, 4, "2:4"), (1, 4, "1:4"), (4, 8, "4:8"), (2, 8, "2:8"), (3, 4, "3:4"), (12, 16, "12:16")]
)
def test_groups_that_are_planted_are_found(n: int, m: int, name: str) -> None:
    found = zero_pattern(n_of_m(32, 32, n, m))
    assert found.name == name
    assert found.share == 1 - n / m
    assert found.two_of_four == (n <= 2)
    assert found.in_channels == 0


@pytest.mark.parametrize("shape", [(4, 1), (1, 4), (16, 16)])
def test_blocks_that_are_planted_are_found(shape: tuple[int, int]) -> None:
    kept = torch.rand(64 // shape[0], 64 // shape[1], generator=torch.Generator().manual_seed(1)) >= 0.5
    found = zero_pattern(kept.repeat_interleave(shape[0], 0).repeat_interleave(shape[1], 1).float())
    assert found.name == f"blocks {shape[0]}x{shape[1]}"
    assert found.blocks[shape] == 1
    assert not found.two_of_four


def test_zeros_without_a_pattern_and_no_zeros() -> None:
    kept = torch.rand(64, 64, generator=torch.Generator().manual_seed(2)) >= 0.5
    assert zero_pattern(kept.float()).name == "unstructured"
    assert zero_pattern(torch.ones(8, 8)).name == "dense"
    assert not zero_pattern(torch.ones(8, 8)).two_of_four
    odd = zero_pattern(torch.tensor([[1.0, 0.0, 2.0]]))
    assert (odd.name, odd.most, odd.blocks) == ("unstructured", {}, {})
    assert not odd.two_of_four
    empty = zero_pattern(torch.ones(4, 0))
    assert (empty.share, empty.name) == (0, "dense")


def test_groups_run_along_inputs_at_each_kernel_position() -> None:
    weight = n_of_m(8 * 9, 16, 2, 4).view(8, 9, 16).movedim(1, 2).reshape(8, 16, 3, 3)
    assert zero_pattern(weight).two_of_four
    assert not zero_pattern(weight.transpose(0, 1).contiguous()).two_of_four
    assert zero_pattern(weight.transpose(0, 1), transposed=True) == zero_pattern(weight)
    # in the unfolded matrix neighbors are of one input channel
    assert (weight.flatten(1).unflatten(1, (-1, 4)) != 0).sum(-1).max() > 2


def test_groups_of_a_grouped_convolution_are_told_apart() -> None:
    first, second = n_of_m(8, 16, 2, 4), torch.ones(8, 16)
    weight = torch.cat([first, second]).view(16, 16, 1, 1)
    assert zero_pattern(weight, groups=2).most[4] == 4
    by_input = torch.cat([first.t(), n_of_m(8, 16, 1, 4).t()]).view(32, 8, 1, 1)  # transposed: 2 groups of 16 inputs
    assert zero_pattern(by_input, groups=2, transposed=True).two_of_four


def test_channels_of_zeros_are_counted_apart() -> None:
    weight = torch.ones(8, 4, 3, 3)
    weight[:2] = 0
    weight[:, 1] = 0
    weight[3, 0, 0, 0] = 0
    found = zero_pattern(weight)
    assert found.in_channels == 2 * 4 * 9 + 6 * 9
    assert found.zeros == found.in_channels + 1
    assert found.single_share == 1 / weight.numel()


def test_a_model_is_read_layer_by_layer() -> None:
    model = nn.Sequential(nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(8, 16), nn.Embedding(4, 4))
    model[0].weight.data *= n_of_m(8 * 9, 8, 2, 4).view(8, 9, 8).movedim(1, 2).reshape(8, 8, 3, 3)
    found = zero_patterns(model)
    assert list(found.layers) == ["0.weight", "3.weight"]
    assert found.two_of_four == ("0.weight",)
    assert found.share == found.single_share == 288 / (576 + 128)
    assert found.many
    assert str(found) == "40.9 % of the weights are zero, 2:4 in 1 of 2 layers"
    assert list(zero_patterns(nn.MultiheadAttention(8, 2)).layers) == ["in_proj_weight", "out_proj.weight"]
    assert zero_patterns(nn.ReLU()).pattern == "dense"


def test_weights_that_others_compute_are_left_out() -> None:
    layer = nn.Linear(8, 8)
    torch_prune.l1_unstructured(layer, "weight", 0.5)  # type: ignore[no-untyped-call]
    assert zero_patterns(layer).layers == {}
