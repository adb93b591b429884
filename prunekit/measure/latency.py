"""Latency of models beside each other: timed alternately, so that what slows the machine slows all of them."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from prunekit.context import threads as with_threads
from prunekit.measure.settings import LatencySettings
from prunekit.measure.timing import Timer, alternate, warm_up

Row = dict[str, Any]
RESAMPLES = 2000


@dataclass(frozen=True)
class LatencyReport:
    """What was timed.

    Attributes:
        rows: one per model and setting: model, device, runtime, batch, threads, dtype, and the milliseconds of one
            forward of the whole batch: median_ms, p10_ms, p90_ms, p99_ms.
        speedup: one per setting and model after the first: model, device, runtime, batch, threads, and how many times
            faster than the first: median of the paired ratios, low and high of its 95 % interval.
        samples: the milliseconds behind each row, in the order they were taken; `samples[i]` belongs to `rows[i]`.
        notes: what could not be measured here.
    """

    rows: tuple[Row, ...]
    speedup: tuple[Row, ...]
    samples: tuple[tuple[float, ...], ...]
    notes: tuple[str, ...]

    def sample_rows(self) -> Iterator[Row]:
        """Every sample as a row of its own: model, device, runtime, batch, threads, dtype, ms."""
        keys = ("model", "device", "runtime", "batch", "threads", "dtype")
        for row, samples in zip(self.rows, self.samples, strict=True):
            yield from ({key: row[key] for key in keys} | {"ms": ms} for ms in samples)


@dataclass(frozen=True)
class _Setting:
    device: torch.device
    batch: int
    threads: int
    dtype: torch.dtype

    def row(self) -> Row:
        dtype = str(self.dtype).removeprefix("torch.")
        return {
            "device": str(self.device), "runtime": "eager", "batch": self.batch, "threads": self.threads, "dtype": dtype
        }  # fmt: skip


def compare_latency(
    dense: nn.Module,
    compact: nn.Module,
    sample_shape: Sequence[int],
    settings: LatencySettings,
    devices: Sequence[torch.device],
    dtype: torch.dtype = torch.float32,
) -> LatencyReport:
    """`measure_latency` of two models, named "dense" and "pruned"; the speedup is dense over pruned."""
    return measure_latency({"dense": dense, "pruned": compact}, sample_shape, settings, devices, dtype)


def measure_latency(
    models: Mapping[str, nn.Module],
    sample_shape: Sequence[int],
    settings: LatencySettings,
    devices: Sequence[torch.device],
    dtype: torch.dtype = torch.float32,
) -> LatencyReport:
    """Times copies of the models in eval and inference mode, on random input.

    Every model is warmed up until its times are stable; then each round times every model once, in an order that is
    turned round each time. Threads apply to the CPU; another device is timed with the first thread count alone.

    Args:
        models: name -> model; the first is what the others' speedup is relative to.
        sample_shape: shape of one input without the batch, such as (3, 224, 224).
        settings: batches, CPU threads, and how many rounds.
        devices: where to time; CUDA is timed with its own events, every run synchronised.
        dtype: of parameters and input.
    """
    rows: list[Row] = []
    speedup: list[Row] = []
    samples: list[tuple[float, ...]] = []
    for device in devices:
        copies = {name: copy.deepcopy(model).to(device, dtype).eval() for name, model in models.items()}
        for setting in _settings(settings, device, dtype):
            times = _time(copies, sample_shape, setting, settings.repeats)  # (models, rounds)
            rows += [{"model": name} | setting.row() | _percentiles(t) for name, t in zip(models, times, strict=True)]
            speedup += _speedups(list(models), times, setting)
            samples += [tuple(t.tolist()) for t in times]
    return LatencyReport(tuple(rows), tuple(speedup), tuple(samples), _notes(devices))


def _settings(settings: LatencySettings, device: torch.device, dtype: torch.dtype) -> Iterator[_Setting]:
    for threads in settings.threads if device.type == "cpu" else settings.threads[:1]:
        for batch in settings.batches:
            yield _Setting(device, batch, threads, dtype)


def _time(
    models: Mapping[str, nn.Module], sample_shape: Sequence[int], setting: _Setting, repeats: int
) -> np.ndarray[Any, Any]:
    sample = _random(sample_shape, setting)
    with with_threads(setting.threads), torch.inference_mode():
        timers = [Timer(model, sample, setting.device) for model in models.values()]
        for timer in timers:
            warm_up(timer)
        return alternate(timers, repeats)


def _random(sample_shape: Sequence[int], setting: _Setting) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(setting.batch, *sample_shape, generator=generator).to(setting.device, setting.dtype)


def _percentiles(times: np.ndarray[Any, Any]) -> Row:
    p10, median, p90, p99 = np.percentile(times, (10, 50, 90, 99)).tolist()
    return {"median_ms": median, "p10_ms": p10, "p90_ms": p90, "p99_ms": p99}


def _speedups(names: Sequence[str], times: np.ndarray[Any, Any], setting: _Setting) -> Iterator[Row]:
    where = {key: value for key, value in setting.row().items() if key != "dtype"}
    for name, own in zip(names[1:], times[1:], strict=True):
        median, low, high = paired_ratio(times[0], own)
        yield {"model": name} | where | {"median": median, "low": low, "high": high}


def paired_ratio(reference: np.ndarray[Any, Any], other: np.ndarray[Any, Any]) -> tuple[float, float, float]:
    """Median of `reference / other` over pairs, and its 95 % percentile bootstrap interval (Efron 1979), fixed seed.

    Args:
        reference: (N,) times.
        other: (N,) times, each taken right beside the one in `reference`.
    """
    ratios = reference / other
    drawn = np.random.default_rng(0).integers(len(ratios), size=(RESAMPLES, len(ratios)))
    low, high = np.percentile(np.median(ratios[drawn], axis=1), (2.5, 97.5)).tolist()
    return float(np.median(ratios)), low, high


def _notes(devices: Sequence[torch.device]) -> tuple[str, ...]:
    if any(device.type == "cuda" for device in devices):
        return ()
    return ("CUDA was not timed: it was not asked for",) if torch.cuda.is_available() else ("no CUDA device",)
