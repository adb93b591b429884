from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from prunekit.statistics import reductions
from prunekit.statistics.layer_stats import ARRAYS, LayerStats, combine
from prunekit.statistics.reductions import eager_sums

Summarize = Callable[[torch.Tensor, int], LayerStats]


@pytest.fixture
def summarize() -> Summarize:
    return lambda activation, axis: LayerStats.from_rows(reductions.summarize(activation, axis))


def reference(values: np.ndarray) -> dict[str, np.ndarray]:
    """The statistics of values (samples, channels), by their definitions in float64."""
    wide = values.astype(np.float64)
    return {
        "count": np.full(wide.shape[1], len(wide)),
        "mean": wide.mean(0),
        "variance": wide.var(0),
        "mean_abs": np.abs(wide).mean(0),
        "rms": np.sqrt((wide**2).mean(0)),
        "min": wide.min(0),
        "max": wide.max(0),
        "zero_fraction": (wide == 0).mean(0),
    }


def channels_first(activation: torch.Tensor, axis: int) -> np.ndarray:
    return activation.double().movedim(axis, -1).reshape(-1, activation.shape[axis]).numpy()


def assert_equals_reference(stats: LayerStats, values: np.ndarray, rtol: float = 1e-11) -> None:
    for name, expected in reference(values).items():
        np.testing.assert_allclose(getattr(stats, name), expected, rtol=rtol, atol=1e-14, err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("shape", "axis"),
    [
        ((4, 6, 5, 7), 1),
        ((9, 5), 1),
        ((2, 3, 5), -1),
        ((2, 3, 5), 1),
        ((2, 3, 4, 5, 2), 1),
        ((3, 1, 2, 2), 1),
        ((1, 7), 1),
    ],
)
def test_equals_numpy_in_float64(summarize: Summarize, shape: tuple[int, ...], axis: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    activation = torch.randn(shape).mul(3).add(1).relu().to(dtype)
    assert_equals_reference(summarize(activation, axis % len(shape)), channels_first(activation, axis))


def test_many_blocks_equal_one(summarize: Summarize, monkeypatch: pytest.MonkeyPatch) -> None:
    activation = torch.randn(7, 5, 6, 4)
    for block in (1, 24, 50, 10**6):
        monkeypatch.setattr("prunekit.statistics.reductions.CPU_BLOCK", block)
        for layout in (torch.contiguous_format, torch.channels_last):
            stats = summarize(activation.to(memory_format=layout), 1)
            assert_equals_reference(stats, channels_first(activation, 1))


def test_a_strided_view_is_measured_as_it_looks(summarize: Summarize) -> None:
    base = torch.randn(4, 8, 6, 6)
    for view in (base[:, ::2], base[..., 1:5], base.transpose(2, 3), base[:, :3]):
        assert_equals_reference(summarize(view, 1), channels_first(view, 1))


@pytest.mark.parametrize(("mean", "rtol"), [(1e4, 1e-11), (1e8, 1e-9), (-1e12, 1e-5)])
def test_variance_survives_a_large_mean(summarize: Summarize, mean: float, rtol: float) -> None:
    generator = torch.Generator().manual_seed(0)
    activation = torch.randn(8, 3, 20, dtype=torch.float64, generator=generator) + mean
    for layout in (activation, activation.transpose(1, 2).contiguous().transpose(1, 2)):
        stats = summarize(layout, 1)
        np.testing.assert_allclose(stats.variance, channels_first(activation, 1).var(0), rtol=rtol)
    merged = combine([summarize(part, 1) for part in activation.split(2)])
    spacing = np.spacing(abs(mean))  # the mean of a part is known no better than that
    np.testing.assert_allclose(merged.variance, channels_first(activation, 1).var(0), rtol=rtol + spacing)


def test_squares_do_not_overflow_in_half_precision(summarize: Summarize) -> None:
    activation = torch.full((2, 3, 4), 60000.0, dtype=torch.float16)
    activation[0] = -60000.0
    stats = summarize(activation, 1)
    np.testing.assert_allclose(stats.rms, activation.double().abs().max().item())


@pytest.mark.parametrize("axis", [1, 2])
def test_nan_and_inf_are_counted_and_left_out(summarize: Summarize, axis: int) -> None:
    activation = torch.randn(4, 3, 5) + 100  # the mean is far from 0: the second pass leaves them out as well
    activation[0, 0, 0] = torch.nan
    activation[1, 0, 1] = torch.inf
    activation[2, 1, 2] = -torch.inf
    activation[:, 2] = torch.nan if axis == 1 else activation[:, 2]
    stats = summarize(activation, axis)
    values = channels_first(activation, axis)
    np.testing.assert_array_equal(stats.non_finite, (~np.isfinite(values)).sum(0))
    for channel in range(stats.channels):
        finite = values[np.isfinite(values[:, channel]), channel]
        assert stats.count[channel] == len(finite)
        if len(finite):
            np.testing.assert_allclose(stats.mean[channel], finite.mean(), rtol=1e-12)
            np.testing.assert_allclose(stats.variance[channel], finite.var(), rtol=1e-9)
            assert stats.max[channel] == finite.max()
        else:
            assert (stats.mean[channel], stats.min[channel], stats.max[channel]) == (0.0, np.inf, -np.inf)


def test_no_samples_change_nothing(summarize: Summarize) -> None:
    nothing, something = summarize(torch.zeros(0, 3, 4), 1), summarize(torch.randn(2, 3, 4), 1)
    assert nothing.count.tolist() == [0, 0, 0]
    merged = combine([nothing, something, nothing])
    for name in ARRAYS:
        np.testing.assert_array_equal(getattr(merged, name), getattr(something, name))


def test_constant_channels_have_no_variance_at_all(summarize: Summarize) -> None:
    activation = torch.full((5, 2, 3), 0.1)
    activation[:, 1] = torch.randn(5, 3)
    merged = combine([summarize(part, 1) for part in activation.split(1)])
    assert merged.constant.tolist() == [True, False]
    assert merged.variance[0] == 0.0
    assert not summarize(torch.ones(1, 4), 1).constant.any()  # one value says nothing


def test_arrays_are_read_only(summarize: Summarize) -> None:
    with pytest.raises(ValueError, match="read-only"):
        summarize(torch.randn(2, 3), 1).mean[0] = 1.0


@settings(max_examples=60)
@given(
    values=hnp.arrays(
        np.float64,
        st.tuples(st.integers(2, 40), st.integers(1, 4)),
        elements=st.floats(-1e6, 1e6, allow_subnormal=False) | st.just(0.0),
    ),
    cuts=st.lists(st.integers(0, 40), max_size=5),
)
def test_merge_equals_one_pass_in_any_grouping(values: np.ndarray, cuts: list[int]) -> None:
    def summarized(part: np.ndarray) -> LayerStats:
        return LayerStats.from_rows(reductions.summarize(torch.from_numpy(part.copy()), 1))

    whole, parts = summarized(values), [summarized(part) for part in np.split(values, sorted(cuts))]
    left = parts[0]
    for part in parts[1:]:
        left = combine([left, part])
    right = parts[-1]
    for part in reversed(parts[:-1]):
        right = combine([part, right])
    scale = np.abs(values).max() + 1e-300
    for merged in (combine(parts), left, right):
        for exact in ("count", "min", "max", "zeros", "non_finite"):
            np.testing.assert_array_equal(getattr(merged, exact), getattr(whole, exact))
        np.testing.assert_allclose(merged.mean, values.mean(0), rtol=1e-12, atol=1e-14 * scale)
        np.testing.assert_allclose(merged.mean_abs, np.abs(values).mean(0), rtol=1e-12)
        np.testing.assert_allclose(merged.variance, values.var(0), rtol=1e-9, atol=1e-13 * scale**2)


@pytest.mark.slow
def test_zeros_are_counted_exactly_beyond_what_float32_counts() -> None:
    values = torch.zeros(1, 1, 2**24 + 4, dtype=torch.bfloat16)
    values[0, 0, 5] = 1
    assert eager_sums(values).zeros.tolist() == [2**24 + 3]
