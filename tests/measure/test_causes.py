"""Causes as functions of measured figures: here of made-up ones, on both sides of what shows a cause."""

from __future__ import annotations

from dataclasses import replace

import pytest

from prunekit.measure.causes import overhead_causes, width_causes
from prunekit.measure.causes.breakdown import Breakdown, OperatorFigures, OperatorRow, operator_rows
from prunekit.measure.causes.width_causes import KernelTimes, TimedWidths, WidthTimes, rounded
from prunekit.measure.latency.timing import Contention, Estimate, PairedTiming

PRUNED_MS = 10.0


def side(ms: float, macs: float | None = 0, moved: int = 1000, calls: int = 1) -> OperatorFigures:
    return OperatorFigures(ms, calls, macs, moved, macs / moved if macs else None)


def rows(
    pruned: dict[tuple[str, str], OperatorFigures], dense: dict[tuple[str, str], OperatorFigures]
) -> tuple[OperatorRow, ...]:
    return operator_rows(dense, pruned, 2.0, PRUNED_MS)


def paired(now: float, other: float, spread: float = 0.02) -> PairedTiming:
    gain = now / other
    return PairedTiming(now, other, Estimate(gain, gain * (1 - spread), gain * (1 + spread)))


NET = rows(
    {
        ("conv", "convolution"): side(4, 1e6),
        ("bn", "native_batch_norm"): side(3),
        ("", "clone"): side(2, moved=2_000_000),
    },
    {("conv", "convolution"): side(8, 2e6), ("bn", "native_batch_norm"): side(4), ("fc", "addmm"): side(1, 5)},
)


def test_rows_say_what_was_reached_of_the_ideal() -> None:
    found = {(row.module, row.operator): row for row in NET}
    assert [row.module for row in NET] == ["conv", "bn", "", "fc"]
    conv, norm, only_dense, only_pruned = (found[key] for key in (
        ("conv", "convolution"), ("bn", "native_batch_norm"), ("fc", "addmm"), ("", "clone")
    ))  # fmt: skip
    assert (conv.speedup, conv.ideal, conv.share, conv.excess_ms) == (2, 2, 0.4, 0)
    assert (norm.speedup, norm.ideal, norm.excess_ms) == (pytest.approx(4 / 3), None, 1)
    assert (only_dense.pruned, only_dense.speedup, only_dense.share, only_dense.excess_ms) == (None, None, 0, -0.5)
    assert (only_pruned.dense, only_pruned.speedup, only_pruned.excess_ms) == (None, None, 2)


def test_norms_copies_and_operators_without_macs() -> None:
    norms = overhead_causes.unfused_norms(NET, PRUNED_MS, None)
    assert norms is not None
    assert (norms.ms, norms.modules) == (3, ("bn",))
    copies = overhead_causes.layout_conversions(NET, PRUNED_MS)
    assert copies is not None
    assert copies.ms == 2
    assert "1 operator (clone) only copy: 2 ms for 2 MB, at (root)" in copies.evidence
    assert overhead_causes.without_macs(NET, 2.0, PRUNED_MS) is None  # norms and copies are named already
    pools = rows({("pool", "max_pool2d"): side(3)}, {("pool", "max_pool2d"): side(3)})
    found = overhead_causes.without_macs(pools, 2.0, PRUNED_MS)
    assert found is not None
    assert found.ms == 1.5
    assert "1.00× faster where multiply-accumulates say 2.00×" in found.evidence
    for nothing, ms in ((NET, 1000), ((), PRUNED_MS)):
        assert overhead_causes.unfused_norms(nothing, ms, None) is None
        assert overhead_causes.layout_conversions(nothing, ms) is None


def test_norms_that_were_folded_count_by_what_it_saved() -> None:
    found = overhead_causes.unfused_norms(NET, PRUNED_MS, paired(10, 8))
    assert found is not None
    assert found.ms == 2
    assert "folded, the model runs in 8 ms in place of 10 ms: 1.25× [" in found.evidence
    assert overhead_causes.unfused_norms(NET, PRUNED_MS, paired(10, 10)) is None


def test_memory_bound_is_near_a_copy_and_far_from_the_best_layer() -> None:
    def copy_ms(moved: float) -> float:
        return moved / 1e6

    fast, slow = ("conv", "convolution"), ("fc", "addmm")
    both = {fast: side(2, 100e6, 100_000), slow: side(4, 10e6, 3_000_000)}
    found = overhead_causes.memory_bound(rows(both, {slow: side(6, 30e6)}), copy_ms, 0.001, PRUNED_MS, 1)
    assert found is not None
    assert found.modules == ("fc",)
    assert found.ms == 2  # 4 ms where the ideal leaves 6 / 3
    for moved, macs in ((1_000_000, 10e6), (3_000_000, 60e6)):  # far below the speed of a copy; near that of the best
        other = {fast: both[fast], slow: side(4, macs, moved)}
        assert overhead_causes.memory_bound(rows(other, {}), copy_ms, 0.001, PRUNED_MS, 1) is None
    # an empty operator takes as long
    assert overhead_causes.memory_bound(rows(both, {}), copy_ms, 2.0, PRUNED_MS, 1) is None


def broken_down(outside: float, calls: int) -> Breakdown:
    one = rows({("a", "relu"): side(6, calls=calls)}, {("a", "relu"): side(8, calls=calls)})
    return Breakdown(12.0, PRUNED_MS, Estimate(1.2, 1.1, 1.3), 2.0, outside, outside, 8.0, 6.0, 0.01, one, {}, {})


def test_launch_bound_is_time_that_channels_do_not_shorten() -> None:
    found = overhead_causes.launch_bound(broken_down(3.0, 100), cuda=False)
    assert found is not None
    assert found.ms == pytest.approx(4 - 4 / 2)
    assert "40 % of the time" in found.evidence
    assert "torch.compile" in found.fix
    graphs = overhead_causes.launch_bound(broken_down(3.0, 100), cuda=True)
    assert graphs is not None
    assert "CUDA graphs" in graphs.fix
    assert overhead_causes.launch_bound(broken_down(0.5, 10), cuda=False) is None
    noise = replace(broken_down(0.0, 10), pruned_outside_ms=5.0)  # the same Python took the dense model no time
    assert overhead_causes.launch_bound(noise, cuda=False) is None


def kernel(dense_ms: float, *, spread: float = 0.01, module: str = "conv") -> KernelTimes:
    ratio = dense_ms / 2
    relative = Estimate(ratio, ratio * (1 - spread), ratio * (1 + spread))
    now, dense = TimedWidths((256, 256), 2.0), TimedWidths((512, 512), dense_ms)
    return KernelTimes(module, 4.0, now, dense, 4.0, relative)


def test_kernels_that_are_slower_at_these_widths_name_both() -> None:
    found = width_causes.slower_kernels([kernel(6.0, module="b"), kernel(4.0, module="a"), kernel(8.0)], PRUNED_MS)
    assert found is not None
    assert found.ms == pytest.approx(4.0 * (1 - 3 / 4) + 4.0 * (1 - 2 / 4))
    assert found.modules == ("a", "b")  # that which is as fast as it was is not one of them
    assert "in 2 layers: a 256→256" in found.evidence
    assert "a 256→256 2 ms, 512→512 4 ms for 4 times as many" in found.evidence
    assert "prune.budget.speedup" in found.fix


def test_kernels_that_are_hardly_or_not_surely_slower_are_none() -> None:
    for times in ([], [kernel(7.5)], [kernel(6.5, spread=0.2)], [kernel(9.0)]):
        assert width_causes.slower_kernels(times, PRUNED_MS) is None
    assert width_causes.slower_kernels([kernel(6.0)], 1000) is None


def width(up_ms: float, *, step: int = 8, spread: float = 0.01, module: str = "conv") -> WidthTimes:
    relative = Estimate(up_ms / 2.0, up_ms / 2.0 * (1 - spread), up_ms / 2.0 * (1 + spread))
    now, down, up = TimedWidths((57, 57), 2.0), TimedWidths((56, 56), 1.6), TimedWidths((64, 64), up_ms)
    return WidthTimes(module, 4.0, step, now, down, up, relative)


def test_widths_are_a_cause_where_more_channels_cost_no_more() -> None:
    found = width_causes.off_step_widths(
        [width(2.0), width(1.5, step=16, module="a"), width(3.0, module="b")], PRUNED_MS
    )
    assert found is not None
    assert found.modules == ("a",)
    assert "prune.round_to=16" in found.fix
    assert found.ms == pytest.approx(4.0 * (1 - 1.5 / 2))
    flat = width_causes.off_step_widths([width(2.0)], PRUNED_MS)
    assert flat is not None
    line = 1.6 + 0.4 * (57**2 - 56**2) / (64**2 - 56**2)
    assert flat.ms == pytest.approx(4.0 * (1 - line / 2.0))
    for slower in (width(2.2), width(2.0, spread=0.3), replace(width(2.0), down=TimedWidths((56, 56), 2.0))):
        assert width_causes.off_step_widths([slower], PRUNED_MS) is None
    assert width_causes.off_step_widths([], PRUNED_MS) is None


@pytest.mark.parametrize(
    ("now", "dense", "tied", "expected"),
    [
        ((57, 64), (64, 64), False, ((56, 64), (64, 64))),
        ((57, 30), (64, 64), False, ((56, 24), (64, 32))),
        ((3, 57), (3, 64), False, ((3, 56), (3, 64))),
        ((57, 10), (60, 10), False, ((56, 10), (60, 10))),
        ((5, 5), (16, 16), True, None),  # below the first step there is nothing to round down to
        ((13, 13), (16, 16), True, ((8, 8), (16, 16))),
        ((56, 64), (64, 64), False, None),
        ((57, 57), (57, 57), False, None),
    ],
)
def test_pruned_widths_are_rounded(
    now: tuple[int, int], dense: tuple[int, int], tied: bool, expected: tuple[tuple[int, int], tuple[int, int]] | None
) -> None:
    assert rounded(now, dense, 8, tied=tied) == expected


def test_a_batch_is_too_small_where_a_larger_one_is_surely_better() -> None:
    now = Estimate(1.2, 1.1, 1.3)
    found = overhead_causes.small_batch(now, PRUNED_MS, paired(40, 20), 1, 8)
    assert found is not None
    assert found.ms == pytest.approx(PRUNED_MS * (1 - 1.2 / 2))
    assert "a sample takes 2.5 ms in a batch of 8 and 10 ms in one of 1" in found.evidence
    assert overhead_causes.small_batch(now, PRUNED_MS, paired(40, 20, spread=0.4), 1, 8) is None
    assert overhead_causes.small_batch(now, PRUNED_MS, paired(24, 20), 1, 8) is None


def test_another_memory_format() -> None:
    found = overhead_causes.memory_format(paired(10, 5))
    assert found is not None
    assert found.ms == 5
    for none in (None, paired(10, 5, spread=0.6), paired(10, 9.95, spread=0.0), paired(10, 12)):
        assert overhead_causes.memory_format(none) is None


def test_subnormal_numbers_need_a_count_and_an_effect() -> None:
    found = overhead_causes.subnormal_numbers({"a": 3, "b": 40}, {"c": 1}, paired(10, 2))
    assert found is not None
    assert found.modules == ("b", "a", "c")
    assert "43 subnormal weights (b, a) and 1 subnormal activation (c)" in found.evidence
    assert overhead_causes.subnormal_numbers({}, {}, paired(10, 2)) is None
    harmless = overhead_causes.subnormal_numbers({"a": 3}, {}, paired(10, 10))
    assert harmless is not None
    assert harmless.ms == 0
    assert "no difference on this processor" in harmless.evidence
    assert overhead_causes.subnormal_numbers({"a": 3}, {}, None) is None


def test_masks_and_zeros_that_stayed() -> None:
    found = overhead_causes.masks_attached(4, {}, paired(10, 9), 0.0, PRUNED_MS)
    assert found is not None
    assert found.ms == 1
    assert "4 hooks of masks run with every forward pass: without them 9 ms" in found.evidence
    assert "prunekit.compact" in found.fix
    zeros = overhead_causes.masks_attached(0, {"a": (3, 8), "b": (1, 8)}, None, 2.0, PRUNED_MS)
    assert zeros is not None
    assert (zeros.ms, zeros.modules) == (2, ("a", "b"))
    assert "4 of 16 output channels hold nothing but zeros" in zeros.evidence
    assert overhead_causes.masks_attached(0, {}, None, 0.0, PRUNED_MS) is None
    assert overhead_causes.masks_attached(0, {"a": (1, 8)}, None, 0.01, PRUNED_MS) is None


def test_too_many_threads() -> None:
    fewer = {1: paired(10, 4), 2: paired(10, 6)}
    found = overhead_causes.too_many_threads(Contention(4, 2, 1.0), fewer)
    assert found is not None
    assert (found.name, found.ms) == ("threads oversubscribed", 6)
    assert "is void" in found.evidence
    assert "OMP_NUM_THREADS=1" in found.fix
    calm = overhead_causes.too_many_threads(Contention(4, 8, 1.0), fewer)
    assert calm is not None
    assert calm.name == "more threads than it has work for"
    assert "void" not in calm.evidence
    assert "4 on 2 cores, of which other processes kept 1.0 busy" in found.evidence
    assert overhead_causes.too_many_threads(Contention(4, 2, 1.0), {1: paired(10, 12)}) is None
