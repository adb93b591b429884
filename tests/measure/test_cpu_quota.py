"""CPU quotas of containers, as Linux reports them."""

from __future__ import annotations

from pathlib import Path

import pytest

from prunekit.measure.latency import machine
from prunekit.measure.latency.row_text import machine_text

STATS = "usage_usec 12\nnr_periods {}\nnr_throttled {}\nthrottled_usec 5\n"


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tree of cgroups without any."""
    monkeypatch.setattr(machine, "GROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(machine, "MEMBERSHIP", tmp_path / "self")
    return tmp_path / "cgroup"


def write(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("_", ".", 1)).write_text(text)


def belongs(groups: Path, *lines: str) -> None:
    (groups.parent / "self").write_text("".join(f"{line}\n" for line in lines))


def test_without_cgroups_there_is_no_quota(groups: Path) -> None:
    assert (machine.cpu_quota(), machine.quota_periods()) == (None, {})
    belongs(groups, "0::/")
    assert machine.cpu_quota() is None


def test_the_smallest_quota_of_all_groups_that_a_process_lies_in_counts(groups: Path) -> None:
    belongs(groups, "0::/slurm/job/step")
    write(groups / "slurm", cpu_max="800000 100000\n")
    write(groups / "slurm/job", cpu_max="150000 100000\n", cpu_stat=STATS.format(10, 2))
    write(groups / "slurm/job/step", cpu_max="max 100000\n")
    write(groups / "other", cpu_max="1000 100000\n")
    assert machine.cpu_quota() == 1.5
    before = machine.quota_periods()
    assert before[groups / "slurm/job"] == (10, 2)
    write(groups / "slurm/job", cpu_stat=STATS.format(18, 8))
    assert machine.throttled_share(before, machine.quota_periods()) == 0.75
    assert machine.throttled_share(before, before) == machine.throttled_share(before, {}) == 0


@pytest.mark.parametrize("path", ["/", "/../..", "/docker/0123"])
def test_in_a_container_the_topmost_group_is_its_own(groups: Path, path: str) -> None:
    belongs(groups, f"0::{path}")
    write(groups, cpu_max="50000 100000\n")
    assert machine.cpu_quota() == 0.5


def test_the_first_version_of_cgroups(groups: Path) -> None:
    belongs(groups, "5:memory:/a", "2:cpu,cpuacct:/docker/0123", "1:name=systemd:/", "0::/")
    write(groups / "cpu,cpuacct", cpu_cfs_quota_us="-1\n", cpu_cfs_period_us="100000\n")
    assert machine.cpu_quota() is None
    write(groups / "cpu,cpuacct/docker/0123", cpu_cfs_quota_us="250000\n", cpu_cfs_period_us="100000\n")
    assert machine.cpu_quota() == 2.5
    write(groups / "cpu,cpuacct/docker/0123", cpu_stat="nr_periods 4\nnr_throttled 1\nthrottled_time 9\n")
    assert list(machine.quota_periods().values()) == [(4, 1)]


@pytest.mark.slow
def test_what_was_held_back_is_seen_and_said(groups: Path) -> None:
    belongs(groups, "0::/")
    write(groups, cpu_max="100000 100000\n", cpu_stat=STATS.format(0, 0))
    load = machine.Load()
    with load.watched():
        write(groups, cpu_stat=STATS.format(4, 3))
    found = load.contention(2)
    assert (found.threads, found.quota, found.throttled, found.oversubscribed) == (2, 1.0, 0.75, True)
    described = machine.describe_machine()
    assert described["cpu_quota"] == 1.0
    assert "cores (a quota of 1), clock" in machine_text(described | {"clock_mhz_after": None})
