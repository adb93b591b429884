"""What the machine did while something was timed."""

from __future__ import annotations

import json

import pytest
import torch

from prunekit.measure import machine
from prunekit.measure.memory import PeakMemory
from prunekit.measure.wording import surroundings


def test_others_are_what_the_system_took_beyond_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    clocks = {"system": iter([100.0, 103.5]), "own": iter([7.0, 9.0]), "wall": iter([0.0, 2.0, 2.0])}
    monkeypatch.setattr(machine, "_system_seconds", lambda: next(clocks["system"]))
    monkeypatch.setattr(machine.time, "process_time", lambda: next(clocks["own"]))
    monkeypatch.setattr(machine.time, "perf_counter", lambda: next(clocks["wall"]))
    load = machine.Load()
    with load.watched():
        pass
    assert (load.seconds, load.others) == (2.0, 0.75)


def test_this_machine_is_described() -> None:
    found = machine.surroundings()
    assert json.loads(json.dumps(found)) == found
    assert found["cores"] >= 1
    assert 0 <= found["other_busy_cores"] <= found["cores"] + 1
    text = surroundings(found | {"clock_mhz_after": None})
    assert found["cpu"] in text
    assert surroundings({}) == ""


def test_peak_memory_is_what_was_added_at_the_peak() -> None:
    size = 2**26
    peak = PeakMemory("cpu")
    if peak.before is None:
        pytest.skip("this system does not tell")
    held = torch.ones(size // 4)
    found = peak.of(lambda: torch.ones(size // 4).sum())
    assert found is not None
    assert 1.9 * size < found < 2.2 * size  # resident pages, of 2 * size bytes
    assert held.sum() > 0
    assert PeakMemory("cpu").of(lambda: torch.ones(100)) is None
