"""Where one tensor is pruned: what is written there, and where is looked."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from prunekit.masks.pruned_entries import PrunedEntries, evenly


@st.composite
def masks(draw: st.DrawFn) -> tuple[Tensor, torch.Size]:
    """Bool masks as plans make them, and the shapes of their tensors: (O, I, k, k) or (O, I)."""
    outputs, inputs, taps = draw(st.integers(1, 6)), draw(st.integers(1, 90)), draw(st.sampled_from([0, 1, 3]))
    shape = torch.Size((outputs, inputs, *[taps] * (2 if taps else 0)))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))
    ones = [1] * (len(shape) - 2)
    rows, columns = (torch.rand(size, generator=generator) < draw(st.floats(0, 1)) for size in shape[:2])
    kind = draw(st.sampled_from(["rows", "columns", "both", "pairs", "single"]))
    keep = {
        "rows": lambda: rows.view(-1, 1, *ones),
        "columns": lambda: columns.view(1, -1, *ones),
        "both": lambda: (rows[:, None] & columns).view(*shape[:2], *ones),
        "pairs": lambda: (torch.rand(shape[:2], generator=generator) < 0.5).view(*shape[:2], *ones),
        "single": lambda: torch.rand(shape, generator=generator) < 0.5,
    }[kind]()
    return keep, shape


@settings(max_examples=60)
@given(masks(), st.sampled_from([torch.float16, torch.float32, torch.float64]), st.booleans())
def test_zeros_are_written_where_it_is_pruned_and_nowhere_else(
    made: tuple[Tensor, torch.Size], dtype: torch.dtype, channels_last: bool
) -> None:
    keep, shape = made
    before = torch.randn(shape, dtype=dtype)
    before.view(-1)[::3] = torch.nan
    before.view(-1)[1::3] = -0.0
    if channels_last and len(shape) == 4:
        before = before.to(memory_format=torch.channels_last)
    after, entries = before.clone(), PrunedEntries(keep)
    entries.zero_(after)
    assert torch.equal(signed(after), torch.where(keep, signed(before), 0))


def signed(tensor: Tensor) -> Tensor:
    """Bits, so that NaN equals NaN and -0.0 does not equal 0.0."""
    return tensor.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])


@pytest.mark.parametrize("both", [False, True])
def test_masks_of_whole_channels_take_little_memory(both: bool) -> None:
    keep = (torch.arange(512) % 2 == 0).view(-1, 1, 1, 1)
    weight = torch.randn(512, 512, 3, 3)
    entries = PrunedEntries(keep & (torch.arange(512) % 3 == 0).view(1, -1, 1, 1) if both else keep)
    assert sum(mask.untyped_storage().nbytes() for mask in entries.masks(weight)) < weight.nbytes / 100


def test_positions_spread_over_more_than_float32_counts() -> None:
    length = 3 * 9 * 2**20 - 1
    assert evenly(4, length).tolist() == [0, (length - 1) // 3, 2 * (length - 1) // 3, length - 1]
    assert evenly(1, length).tolist() == [0]


def test_probes_are_spread_over_a_kernels_taps() -> None:
    shape = torch.Size((8, 8, 3, 3))
    found = PrunedEntries((torch.arange(8) > 3).view(8, 1, 1, 1)).some(8, shape)
    assert {index[0] for index in found} <= {0, 1, 2, 3}
    assert {index[2:] for index in found} == {(0, 0), (1, 1), (2, 2)}
