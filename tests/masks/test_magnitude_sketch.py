from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from prunekit.errors import UsageError
from prunekit.masks.threshold_search import MagnitudeSketch

BUCKET = 1 / 128
"""Stated relative width of a bucket."""

finite32 = st.floats(allow_nan=False, allow_infinity=False, width=32)
anything32 = st.floats(width=32)
values32 = arrays.arrays(np.float32, arrays.array_shapes(max_dims=3, max_side=12), elements=finite32)
shares = st.floats(0, 1)
quick = settings(max_examples=60)


def sketch(values: npt.NDArray[np.floating]) -> MagnitudeSketch:
    return MagnitudeSketch().add(torch.from_numpy(values.copy()))


@quick
@given(values32, shares)
def test_a_quantile_is_within_a_bucket_of_the_exact_one(values: npt.NDArray[np.float32], share: float) -> None:
    magnitudes = np.sort(np.abs(values.ravel()).astype(np.float64))
    rank = share * len(magnitudes)  # |x| < t must hold for this many
    exact = magnitudes[max(int(np.ceil(rank)) - 1, 0)]
    found = sketch(values).quantile(share)
    if np.mean(magnitudes == 0) >= share:
        assert found == 0.0
    else:
        assert exact * (1 - BUCKET) - 2e-40 <= found <= exact * (1 + BUCKET) + 2e-40


def test_quantiles_of_a_continuous_distribution() -> None:
    values = np.random.default_rng(0).standard_normal((64, 1000))
    for kind in (np.float64, np.float32, np.float16):
        found = sketch(values.astype(kind))
        for share in (0.01, 0.3, 0.5, 0.9, 0.999):
            assert found.quantile(share) == pytest.approx(np.quantile(np.abs(values), share), rel=2e-3)
            assert np.mean(np.abs(values) < found.quantile(share)) == pytest.approx(share, abs=5e-4)


@quick
@given(arrays.arrays(np.float32, (40,), elements=anything32), st.integers(0, 40))
def test_parts_one_after_the_other_equal_the_whole(values: npt.NDArray[np.float32], cut: int) -> None:
    left, right, whole = sketch(values[:cut]), sketch(values[cut:]), sketch(values)
    assert torch.equal(whole._counts, left.add(torch.from_numpy(values[cut:].copy()))._counts)
    assert right.count + right.non_finite == 40 - cut


@quick
@given(arrays.arrays(np.float64, (30,), elements=st.floats()))
def test_values_are_counted_apart(values: npt.NDArray[np.float64]) -> None:
    found = sketch(values)
    assert found._counts[0] == np.count_nonzero(values == 0)
    assert found.non_finite == np.count_nonzero(~np.isfinite(values))
    assert found.count == np.count_nonzero(np.isfinite(values))


def test_double_precision_beyond_single_stays_finite_and_never_rounds_up() -> None:
    found = sketch(np.array([1e300, -1e-300, 1 - 1e-12, 0.0]))
    assert (found.count, found.non_finite) == (4, 0)
    assert found.quantile(0.25) == 0.0
    assert found.quantile(0.75) == 1.0
    assert 0 < found.quantile(0.5) < 2e-40
    assert found.quantile(1.0) == 2.0**128


@quick
@given(values32, st.sampled_from([torch.float16, torch.bfloat16]))
def test_half_precision_counts_as_its_single_precision(values: npt.NDArray[np.float32], kind: torch.dtype) -> None:
    half = torch.from_numpy(values.copy()).to(kind)
    assert torch.equal(MagnitudeSketch().add(half)._counts, MagnitudeSketch().add(half.float())._counts)


def test_any_layout_counts_alike() -> None:
    values = torch.randn(3, 4, 5, 6, requires_grad=True)
    expected = MagnitudeSketch().add(values)._counts
    for same in (values.to(memory_format=torch.channels_last), values.transpose(1, 3), values.flatten()):
        assert torch.equal(MagnitudeSketch().add(same)._counts, expected)
    assert MagnitudeSketch().add(torch.ones(1, 1).expand(7, 9)[::2, ::3]).count == 12
    assert MagnitudeSketch().add(torch.tensor(0.5)).count == 1


def test_many_blocks_count_as_one() -> None:
    values = torch.randn(700, 1000)
    found = MagnitudeSketch().add(values)
    assert found.count == 700_000
    parts = [MagnitudeSketch().add(part)._counts for part in values.split(100)]
    assert torch.equal(found._counts, torch.stack(parts).sum(0))


def test_wrong_use() -> None:
    empty = MagnitudeSketch().add(torch.tensor([torch.nan, -torch.inf])).add(torch.empty(0, 3))
    assert (empty.count, empty.non_finite) == (0, 2)
    with pytest.raises(UsageError, match="counted no finite value"):
        empty.quantile(0.5)
    with pytest.raises(UsageError, match=r"expected a share from 0 to 1, got 1\.5"):
        empty.quantile(1.5)
    with pytest.raises(UsageError, match=r"got torch\.int64"):
        MagnitudeSketch().add(torch.arange(3))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_device_counts_as_the_cpu_does() -> None:
    values = torch.randn(100, 1000).relu()
    assert torch.equal(MagnitudeSketch().add(values.cuda())._counts.cpu(), MagnitudeSketch().add(values)._counts)


def test_zeros_are_a_share_of_the_finite_values() -> None:
    assert MagnitudeSketch().zero_share == 0
    values = torch.tensor([0.0, -0.0, 1e-42, 3.0, torch.inf])
    assert MagnitudeSketch().add(values).zero_share == 0.5
