"""Latency: what is timed, in which order, and what the figures say."""

from __future__ import annotations

import gc
import json

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune as torch_prune

from prunekit.measure.latency import comparison, machine, timing, timing_job
from prunekit.measure.latency.comparison import measure_latency
from prunekit.measure.latency.timing import alternate, paired_ratio, warm_up
from prunekit.measure.measurement_effort import Effort
from prunekit.settings.deployment import LatencySettings

CPU = torch.device("cpu")


class Recorder(nn.Module):
    """Remembers the circumstances of each call, in a list that copies share."""

    def __init__(self, name: str, calls: list[tuple[object, ...]]) -> None:
        super().__init__()
        self.name, self.calls = name, Shared(calls)
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        state = (tuple(x.shape), x.dtype, torch.get_num_threads(), self.training, torch.is_inference_mode_enabled())
        self.calls.append((self.name, *state))
        return x * self.weight


class Shared(list[tuple[object, ...]]):
    """A list that a deep copy shares instead of copying."""

    def __init__(self, inner: list[tuple[object, ...]]) -> None:
        super().__init__()
        self.inner = inner

    def append(self, item: tuple[object, ...]) -> None:
        self.inner.append(item)

    def __deepcopy__(self, memo: object) -> Shared:
        return self


@pytest.mark.slow
@pytest.mark.usefixtures("here")
def test_rows_say_what_was_timed() -> None:
    calls: list[tuple[object, ...]] = []
    models = {name: Recorder(name, calls) for name in ("a", "b", "c")}
    before = torch.get_num_threads()
    settings = LatencySettings(batches=(1, 4), threads=(1, 2), repeats=6, dtypes=("bf16",))
    report = measure_latency(models, (3, 8, 8), settings, [CPU])
    assert torch.get_num_threads() == before
    assert all(model.training for model in models.values())
    assert all(model.weight.dtype == torch.float32 for model in models.values())
    assert [(row["threads"], row["batch"], row["model"]) for row in report.rows] == [
        (threads, batch, name) for threads in (1, 2) for batch in (1, 4) for name in "abc"
    ]
    assert {(row["device"], row["runtime"], row["dtype"]) for row in report.rows} == {("cpu", "eager", "bfloat16")}
    seen = {call[1:] for call in calls if call[2] == torch.bfloat16}
    assert seen == {((batch, 3, 8, 8), torch.bfloat16, threads, False, True) for batch in (1, 4) for threads in (1, 2)}
    references = [call for call in calls if call[2] == torch.float32]
    assert len(references) == 2 * 3


@pytest.mark.slow
@pytest.mark.usefixtures("here")
def test_percentiles_come_from_the_samples() -> None:
    models = {"a": nn.Linear(8, 8), "b": nn.Linear(8, 8)}
    report = measure_latency(models, (8,), LatencySettings(batches=(1,), repeats=9), [CPU])
    assert len(report.rows) == len(report.samples) == 2
    for row, samples in zip(report.rows, report.samples, strict=True):
        assert len(samples) == 9
        assert all(ms > 0 for ms in samples)
        expected = np.percentile(samples, (10, 50, 90, 99))
        assert [row[key] for key in ("p10_ms", "median_ms", "p90_ms", "p99_ms")] == pytest.approx(expected.tolist())
        assert row["low_ms"] <= row["median_ms"] <= row["high_ms"]
        assert row["samples_per_s"] == pytest.approx(1000 / np.median(samples))
        assert row["stable"] is (not row["doubts"])
        assert (row["repeats"], row["peak_memory_bytes"]) == (9, None)
        assert row["warm_up"] >= 10
        assert (row["clock_mhz"] is None) is (machine.clock_mhz() is None)
    long = list(report.sample_rows())
    assert [row["ms"] for row in long] == [*report.samples[0], *report.samples[1]]
    assert list(long[0]) == ["model", "device", "runtime", "batch", "threads", "dtype", "memory_format", "ms"]
    json.dumps([*report.rows, *report.speedup], allow_nan=False)


@pytest.mark.slow
@pytest.mark.usefixtures("here")
def test_the_speedup_is_the_median_of_paired_ratios() -> None:
    small, large = nn.Linear(8, 8), nn.Sequential(*(nn.Linear(256, 256) for _ in range(8)))
    models = {"dense": Pad(large, 256), "pruned": Pad(small, 8)}
    report = measure_latency(models, (8,), LatencySettings(batches=(1, 2), repeats=7), [CPU])
    assert [row["model"] for row in report.rows] == ["dense", "pruned"] * 2
    assert [row["batch"] for row in report.speedup] == [1, 2]
    for index, row in enumerate(report.speedup):
        dense, pruned = (np.array(report.samples[2 * index + part]) for part in (0, 1))
        assert row["model"] == "pruned"
        assert row["median"] == pytest.approx(np.median(dense / pruned))
        assert row["low"] <= row["median"] <= row["high"]


class Pad(nn.Module):
    """Feeds a model that is wider than the input."""

    def __init__(self, inner: nn.Module, width: int) -> None:
        super().__init__()
        self.inner, self.width = inner, width

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(nn.functional.pad(x, (0, self.width - x.shape[-1])))
        return out


class Turned(nn.Module):
    """A complex filter, whose imaginary part is all that the output has."""

    def __init__(self) -> None:
        super().__init__()
        self.turn = nn.Parameter(torch.full((4,), 1 + 2j))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.turn).imag


@pytest.mark.slow
@pytest.mark.usefixtures("here")
@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated:FutureWarning")
def test_models_that_python_does_not_copy_are_timed_with_the_outputs_they_have(monkeypatch: pytest.MonkeyPatch) -> None:
    normed, halved = nn.utils.weight_norm(nn.Linear(4, 4)), nn.Linear(4, 4)
    torch_prune.l1_unstructured(halved, "weight", 0.5)
    models = {"complex": Turned(), "normed": normed, "halved": halved}
    jobs: list[timing_job.TimingJob] = []
    apart = comparison.run_job_apart
    monkeypatch.setattr(comparison, "run_job_apart", lambda job, folder: (jobs.append(job), apart(job, folder))[1])
    report = measure_latency(models, (4,), LatencySettings(batches=(2,), repeats=5), [CPU])
    assert [row["model"] for row in report.rows] == list(models)
    x = jobs[0].inputs.sample(2)
    for name, model in models.items():
        assert torch.equal(jobs[0].expected[name, 2][0], model(*x)), name


def test_a_known_ratio_and_its_interval() -> None:
    reference = np.random.default_rng(0).uniform(1, 2, 200)
    assert paired_ratio(2 * reference, reference) == pytest.approx((2, 2, 2))
    noisy = reference * np.random.default_rng(1).uniform(0.9, 1.1, 200)
    median, low, high = paired_ratio(3 * reference, noisy)
    assert low < median < high
    assert high - low < 0.2
    assert paired_ratio(3 * reference, noisy) == (median, low, high)


@pytest.mark.slow
@pytest.mark.usefixtures("here")
def test_one_model_has_no_speedup_and_missing_cuda_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = LatencySettings(batches=(1,), repeats=5)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    report = measure_latency({"only": nn.Linear(4, 4)}, (4,), settings, [CPU])
    assert report.speedup == ()
    assert report.notes == ("no CUDA device",)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert "not asked for" in measure_latency({"only": nn.Linear(4, 4)}, (4,), settings, [CPU]).notes[0]


def test_the_order_is_turned_round_every_time() -> None:
    order: list[str] = []
    collecting: list[bool] = []

    def run(name: str) -> float:
        order.append(name)
        collecting.append(gc.isenabled())
        return float(len(order))

    times = alternate([lambda: run("a"), lambda: run("b")], 4)
    assert "".join(order) == "abbaabba"
    assert times.tolist() == [[1, 4, 5, 8], [2, 3, 6, 7]]
    assert not any(collecting)
    assert gc.isenabled()


def test_rounds_end_at_the_limit_but_for_the_first_few() -> None:
    assert alternate([lambda: 1.0, lambda: 2.0], 50, limit_s=0.0).tolist() == [[1.0] * 5, [2.0] * 5]
    assert alternate([lambda: 1.0], 8, limit_s=60.0).shape == (1, 8)


def test_warm_up_waits_until_it_is_stable() -> None:
    left = [2.0**-n for n in range(20)] + [1e-6] * 20
    assert warm_up(lambda: left.pop(0)) == 28  # the first ten of which the later five equal the middle of the earlier
    assert warm_up(lambda: 1.0) == 10


def test_warm_up_ends_where_nothing_is_stable() -> None:
    assert warm_up(iter([1e-6 * 1.2**n for n in range(200)]).__next__) == Effort.warm_up_calls
    assert warm_up(iter([2.0**n for n in range(200)]).__next__) == 12  # 4 seconds


def test_a_gpu_has_work_until_its_clock_is_steady(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = iter(n / 8 for n in range(1000))
    monkeypatch.setattr(timing.time, "perf_counter", lambda: next(seconds))
    assert warm_up(lambda: 1.0, "cuda") == 7 + 10  # what is timed in the first second counts for nothing
    assert warm_up(lambda: 1.0, "cpu") == 10


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_cuda_is_timed_by_events() -> None:
    settings = LatencySettings(batches=(2,), threads=(1, 2), repeats=5, runtimes=("eager",))
    report = measure_latency(
        {"dense": nn.Linear(64, 64), "pruned": nn.Linear(64, 8)}, (64,), settings, [CPU, torch.device("cuda", 0)]
    )
    assert [(row["device"], row["threads"]) for row in report.speedup] == [("cpu", 1), ("cpu", 2), ("cuda:0", 1)]
    assert (report.notes, report.failures) == ((), ())
    assert all(row["peak_memory_bytes"] > 0 for row in report.rows if row["device"] == "cuda:0")
    assert all(row["clock_mhz"] > 0 for row in report.rows if row["device"] == "cuda:0")
    assert all(ms > 0 for samples in report.samples for ms in samples)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_replayed_cuda_graph_is_timed_beside_eager() -> None:
    settings = LatencySettings(batches=(1, 2), repeats=5, runtimes=("eager", "cudagraphs"), dtypes=("fp32", "fp16"))
    report = measure_latency(
        {"dense": nn.Linear(64, 64), "pruned": nn.Linear(64, 8)}, (64,), settings, [torch.device("cuda", 0)]
    )
    assert report.failures == ()
    assert len(report.speedup) == 2 * 2 * 2
