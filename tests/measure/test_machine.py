"""What the machine did while something was timed."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from prunekit.measure.latency import machine
from prunekit.measure.latency.machine import PeakMemory
from prunekit.measure.latency.row_text import machine_text


def test_others_are_what_the_system_took_beyond_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    clocks = {"system": iter([100.0, 103.5]), "own": iter([7.0, 9.0]), "wall": iter([0.0, 2.0, 2.0])}
    monkeypatch.setattr(machine, "system_seconds", lambda: next(clocks["system"]))
    monkeypatch.setattr(machine.time, "process_time", lambda: next(clocks["own"]))
    monkeypatch.setattr(machine.time, "perf_counter", lambda: next(clocks["wall"]))
    load = machine.Load()
    with load.watched():
        pass
    assert (load.seconds, load.others) == (2.0, 0.75)


def test_cores_that_this_process_may_not_use_make_no_load(monkeypatch: pytest.MonkeyPatch) -> None:
    times = [SimpleNamespace(_asdict=lambda n=n: {"user": 10.0**n, "idle": 5.0}) for n in range(4)]
    monkeypatch.setattr(machine.psutil, "cpu_times", lambda percpu: times)
    monkeypatch.setattr(machine.os, "cpu_count", lambda: 4)
    monkeypatch.setattr(machine.os, "sched_getaffinity", lambda pid: {1, 3}, raising=False)
    assert machine.system_seconds() == 1010.0
    monkeypatch.setattr(machine.os, "cpu_count", lambda: 8)  # some are switched off: which is which is not known
    assert machine.system_seconds() == 1111.0
    monkeypatch.setattr(machine.os, "cpu_count", lambda: 4)
    monkeypatch.setattr(machine.os, "sched_getaffinity", lambda pid: {12, 13})  # the host's, in a container of four
    assert machine.system_seconds() == 1111.0


def test_this_machine_is_described() -> None:
    found = machine.describe_machine()
    assert json.loads(json.dumps(found)) == found
    assert found["cores"] >= 1
    assert 0 <= found["other_busy_cores"] <= found["cores"] + 1
    text = machine_text(found | {"clock_mhz_after": None})
    assert found["cpu"] in text
    assert machine_text({}) == ""


@pytest.fixture
def nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A driver's tool that says what it was asked, where it is told nothing else."""
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/asked\necho 1755\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    properties = SimpleNamespace(uuid="8f6d4c1e-0000-0000-0000-000000000001")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    return tool


def test_the_clock_of_a_gpu_is_asked_for_by_its_uuid(nvidia_smi: Path) -> None:
    assert machine.clock_mhz("cuda:1") == 1755.0
    asked = nvidia_smi.with_name("asked").read_text().split()
    assert asked[:2] == ["--id=GPU-8f6d4c1e-0000-0000-0000-000000000001", "--query-gpu=clocks.current.sm"]


@pytest.mark.parametrize("says", ["echo '[N/A]'", "echo 'No devices were found'; exit 6"])
def test_a_clock_that_a_driver_does_not_tell_is_unknown(nvidia_smi: Path, says: str) -> None:
    nvidia_smi.write_text(f"#!/bin/sh\n{says}\n")
    assert machine.clock_mhz("cuda") is None
    nvidia_smi.unlink()
    assert machine.clock_mhz("cuda") is None
    assert machine.clock_mhz("mps") is None


def test_clocks_of_gpus_are_said_of_each() -> None:
    clocks = [("cpu", 2600.0), ("cuda:0", 1980.0), ("cuda:0", 1755.0), ("cuda:1", 1410.0), ("cuda:2", None)]
    rows = [{"device": device, "clock_mhz": clock} for device, clock in clocks]
    text = machine_text(machine.describe_machine() | {"clock_mhz_after": None}, [*rows, {"device": "cuda:3"}])
    assert text.endswith("; cuda:0 at 1755 to 1980 MHz right after timing; cuda:1 at 1410 MHz right after timing")


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


def test_peak_memory_is_unknown_on_another_system(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(name: str | None) -> None:
        raise TypeError(f"LoadLibrary() argument 1 must be str, not {type(name).__name__}")

    monkeypatch.setattr("sys.platform", "win32")
    monkeypatch.setattr("ctypes.CDLL", refused)
    peak = PeakMemory("cpu")
    assert peak.before is None
    assert peak.of(lambda: torch.ones(100)) is None
