"""Profiles: every layer has its time, and what was measured is not measured again. No time itself is asserted."""

from __future__ import annotations

import errno
import json
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch
from mutants import changed_json, unclean
from torch import Tensor, nn

from prunekit.backends.backend import RUNTIMES, FunctionBackend
from prunekit.backends.session import LayerClock, Sample, Session, Setting, Source, inputs_of
from prunekit.errors import RunError, UsageError
from prunekit.measure.latency.timing_job import SettingFailure
from prunekit.measure.latency_profile import network_timing
from prunekit.measure.latency_profile.network_timing import (
    LayerTimes,
    Network,
    NetworkTimer,
    PreparedNetwork,
    has_layer_clock,
    read_times,
    structure_hash,
    time_networks,
    write_times,
)
from prunekit.measure.measurement_effort import Effort, effort_of

EAGER = Setting("eager", "cpu", 1, 1)


def net(width: int = 8) -> nn.Sequential:
    torch.manual_seed(width)
    layers: Sequence[nn.Module] = [nn.Conv2d(3, width, 3), nn.BatchNorm2d(width), nn.ReLU(), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(width * 16, 5)).eval()


def given(name: str, network: nn.Module) -> Network:
    return Network(name, network, lambda: network)


def profile(widths: Sequence[int], cache: Path | None, setting: Setting = EAGER, **others: object) -> list[LayerTimes]:
    settings = {"inputs": (3, 6, 6), "repeats": 5} | others
    named = [given(f"of width {width}", net(width)) for width in widths]
    return list(time_networks(net(), named, setting=setting, cache=cache, **settings))  # type: ignore[arg-type]


class Spy:
    """Stands for the process that measures: counts, and says what it was asked for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: list[str] = []
        monkeypatch.setattr(network_timing, "WorkerProcess", self.process)

    def process(self, pair: NetworkTimer, folder: Path) -> Spy:
        return self

    def __enter__(self) -> Spy:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def ask(self, network: PreparedNetwork) -> LayerTimes | SettingFailure:
        self.asked.append(network.name)
        return LayerTimes(float(len(self.asked)), 9.0, {"0": 0.25, "": 0.5}, 0.125, ("a doubt",))


@pytest.fixture(autouse=True)
def _short() -> Iterator[None]:
    with effort_of(Effort(network_ms=0.0)):
        yield


@pytest.fixture
def spy(monkeypatch: pytest.MonkeyPatch) -> Spy:
    return Spy(monkeypatch)


def test_an_interrupted_profile_measures_only_what_is_missing(spy: Spy, tmp_path: Path) -> None:
    started = time_networks(
        net(), (given(str(width), net(width)) for width in (4, 5, 6)), (3, 6, 6), EAGER, repeats=5, cache=tmp_path
    )
    first = [next(started), next(started)]
    started.close()
    assert spy.asked == ["4", "5"]
    lines: list[str] = []
    again = profile((4, 5, 6, 7), tmp_path, log=lines.append)
    assert spy.asked == ["4", "5", "of width 6", "of width 7"]
    assert again[:2] == first
    assert [line.rpartition(", ")[2] for line in lines] == ["measured before"] * 2 + ["measured"] * 2
    assert len(list(tmp_path.iterdir())) == 4


def test_what_there_are_doubts_about_is_measured_again_where_that_is_asked_for(spy: Spy, tmp_path: Path) -> None:
    profile((4, 5), tmp_path)
    sure = LayerTimes(3.0, 9.0, {"0": 0.25}, 0.125, ())
    files = {file: read_times(file) for file in tmp_path.iterdir()}
    write_times(next(file for file, found in files.items() if found is not None and found.whole_ms == 1.0), sure)
    spy.asked.clear()
    assert [found.whole_ms for found in profile((4, 5), tmp_path)] == [3.0, 2.0]
    assert spy.asked == []
    assert [found.whole_ms for found in profile((4, 5), tmp_path, again=True)] == [3.0, 1.0]
    assert spy.asked == ["of width 5"]
    assert [found.whole_ms for found in profile((4, 5), tmp_path)] == [3.0, 1.0]  # which the new figure is kept for


def test_of_two_doubtful_measurements_the_shares_of_the_dense_network_are_averaged() -> None:
    first = LayerTimes(2.0, 10.0, {"0": 1.0}, 0.5, ("noise",))
    loaded = LayerTimes(6.0, 20.0, {"0": 2.0, "1": 4.0}, 0.0, ("more noise",))  # a slower machine, for both networks
    both = first.settled(loaded)
    assert (both.whole_ms / both.dense_ms, both.dense_ms) == pytest.approx(((0.2 + 0.3) / 2, 15.0))
    assert both.modules_ms == pytest.approx({"0": 1.5, "1": 1.5})
    assert (both.rest_ms, both.doubts, both.averaged) == (0.375, ("more noise",), True)
    quiet = LayerTimes(6.0, 20.0, {"0": 2.0}, 0.0)
    assert first.settled(quiet) is quiet


def test_code_of_the_user_that_changed_makes_another_network() -> None:
    def before() -> nn.Module:
        class Own(nn.Linear):
            pass

        return Own(4, 4)

    def after() -> nn.Module:
        class Own(nn.Linear):
            def forward(self, x: Tensor) -> Tensor:
                return super().forward(x).relu()

        return Own(4, 4)

    assert repr(before()) == repr(after())
    assert structure_hash(before()) == structure_hash(before())
    assert structure_hash(before()) != structure_hash(after())


def test_nothing_is_started_where_all_was_measured_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        Spy(patched)
        before = profile((4,), tmp_path)
    monkeypatch.setattr(network_timing, "WorkerProcess", None)
    assert profile((4,), tmp_path) == before

    def never() -> nn.Module:
        pytest.fail("built, though it was measured before")

    outline = Network("of width 4", net(4).to("meta"), never)
    assert list(time_networks(net(), [outline], (3, 6, 6), EAGER, repeats=5, cache=tmp_path)) == before


@pytest.mark.parametrize(
    "others",
    [
        {"setting": Setting("eager", "cpu", 2, 1)},
        {"setting": Setting("eager", "cpu", 1, 2)},
        {"setting": Setting("eager", "cpu", 1, 1, "bfloat16")},
        {"setting": Setting("eager", "cpu", 1, 1, memory_format="channels_last")},
        {"repeats": 6},
    ],
    ids=str,
)
def test_what_was_measured_in_other_conditions_is_measured_anew(
    spy: Spy, tmp_path: Path, others: dict[str, object]
) -> None:
    profile((4,), tmp_path)
    profile((4,), tmp_path, **others)  # type: ignore[arg-type]
    assert len(spy.asked) == len(list(tmp_path.iterdir())) == 2
    profile((4,), tmp_path, **others)  # type: ignore[arg-type]
    assert len(spy.asked) == 2


@pytest.mark.parametrize("change", ["input", "stride", "dense", "function"])
def test_other_networks_and_inputs_have_files_of_their_own(spy: Spy, tmp_path: Path, change: str) -> None:
    def measured(dense: nn.Module, network: nn.Module, pixels: int) -> None:
        list(time_networks(dense, [given("it", network)], (3, pixels, pixels), EAGER, repeats=5, cache=tmp_path))

    def pooled(width: int, stride: int = 1, function: type[nn.Module] = nn.ReLU) -> nn.Module:
        return nn.Sequential(nn.Conv2d(3, width, 3, stride), function(), nn.AdaptiveAvgPool2d(1))

    measured(pooled(8), pooled(4), 6)
    dense, network = pooled(7 if change == "dense" else 8), pooled(4)
    network = pooled(4, 2) if change == "stride" else pooled(4, 1, nn.GELU) if change == "function" else network
    measured(dense, network, 8 if change == "input" else 6)
    assert len(spy.asked) == len(list(tmp_path.iterdir())) == 2


def test_a_layout_is_measured_on_its_own(spy: Spy, tmp_path: Path) -> None:
    for form in (torch.contiguous_format, torch.channels_last):
        network = net(4).to(memory_format=form)  # type: ignore[call-overload]
        list(time_networks(net(), [given("it", network)], (3, 6, 6), EAGER, repeats=5, cache=tmp_path))
    assert len(spy.asked) == len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: "",
        lambda text: text[: len(text) // 2],
        lambda text: "[]",
        lambda text: text.replace("9.0", "NaN"),
        lambda text: text.replace("9.0", "-9.0"),
        lambda text: text.replace("9.0", '"9.0"'),
        lambda text: text.replace("rest_ms", "rest"),
        lambda text: text.replace("0.25", "null"),
    ],
)
def test_a_damaged_file_is_measured_anew(spy: Spy, tmp_path: Path, damage: Callable[[str], str]) -> None:
    profile((4,), tmp_path)
    (file,) = tmp_path.iterdir()
    whole = file.read_text()
    assert damage(whole) != whole
    file.write_text(damage(whole))
    (times,) = profile((4,), tmp_path)
    assert (len(spy.asked), times.whole_ms) == (2, 2.0)
    assert profile((4,), tmp_path) == [times]
    assert len(spy.asked) == 2


def test_a_cache_that_cannot_be_written_is_said_first_and_costs_no_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spy, said = Spy(monkeypatch), list[str]()
    (tmp_path / "file").touch()
    times = profile((4, 5), tmp_path / "file" / "latency", log=said.append)
    assert (len(times), len(spy.asked)) == (2, 2)
    assert said[0].startswith("profile: times are not cached, so that another profile measures again: ")
    assert said[0].endswith("file is a file; choose another with PRUNEKIT_CACHE")
    assert len(said) == 3


def test_a_disk_that_fills_up_is_said_once_and_costs_no_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spy, said = Spy(monkeypatch), list[str]()
    profile((4,), tmp_path)

    def full(file: Path, times: LayerTimes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(file))

    monkeypatch.setattr(network_timing, "write_times", full)
    assert len(profile((4, 5, 6), tmp_path, log=said.append)) == 3
    assert len(spy.asked) == 3  # the first was measured before
    assert ["No space left on device" in line for line in said] == [False, True, False, False]


@pytest.mark.slow
def test_mutants_of_cached_times_are_whole_or_a_miss(tmp_path: Path) -> None:
    sound = {"whole_ms": 1.0, "dense_ms": 2.0, "modules_ms": {"": 0.5, "0": 0.25}, "rest_ms": 0.0, "doubts": ["noisy"]}

    def read(mutant: bytes) -> None:
        (tmp_path / "x.json").write_bytes(mutant)
        found = read_times(tmp_path / "x.json")
        assert found is None or all(0 <= ms < math.inf for ms in (found.whole_ms, *found.modules_ms.values()))

    assert unclean(read, changed_json(sound, 200, seed=50)) == []
    read(json.dumps(sound).encode())
    assert read_times(tmp_path / "x.json") is not None


def test_times_are_lower_quartiles_of_passes_that_were_timed() -> None:
    """A runtime with a clock of its own: what the quartiles are of is known."""
    runs: list[int] = []

    def open_session(source: Source, sample: Sample, setting: Setting) -> Session:
        def passes(count: int) -> list[dict[str | None, float]]:
            assert len(runs) > count, "warmed up before"
            return [{"a": float(index), None: 2.0} | ({"": 1.0} if index else {}) for index in range(count)]

        assert source.module is not None
        module = source.module
        return Session(lambda: module(*sample), layers=lambda: LayerClock(lambda: runs.append(1), passes))

    runtime = FunctionBackend("own", open_session, times_layers=True)
    x = torch.randn(1, 3, 6, 6, generator=torch.Generator().manual_seed(0))
    dense, network = (PreparedNetwork(str(width), Source(net(width)), [net(width)(x).detach()]) for width in (8, 4))
    times = NetworkTimer(runtime, dense, inputs_of((3, 6, 6)), EAGER, 5)(network)
    assert isinstance(times, LayerTimes), times
    assert times.modules_ms == {"a": 1.0, "": 1.0}
    assert times.rest_ms == 2.0
    assert times.whole_ms > 0 < times.dense_ms


def test_outputs_are_checked_against_eager() -> None:
    x = torch.randn(1, 3, 6, 6, generator=torch.Generator().manual_seed(0))
    expected = [net(4)(x).detach()]
    pair = NetworkTimer(
        RUNTIMES.get("eager"), PreparedNetwork("dense", Source(net(4)), expected), inputs_of((3, 6, 6)), EAGER, 5
    )
    other = pair(PreparedNetwork("b", Source(net(5)), expected))
    assert isinstance(other, SettingFailure)
    assert other.reason.startswith("b computes something else than in eager float32")


class Breaks(nn.Module):
    """Computes, and only in eager where the process is the one that made it."""

    def forward(self, x: Tensor) -> Tensor:
        if torch.get_num_threads() == 1:
            raise ValueError("one thread is too few")
        return x


@pytest.mark.slow
def test_a_network_that_fails_is_named() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        named = [given("good", nn.ReLU()), given("bad", Breaks())]
        found = time_networks(nn.Identity(), named, (4,), EAGER, repeats=5, cache=None)
        assert set(next(found).modules_ms) == {""}
        with pytest.raises(RunError, match="bad: not measured in eager: ValueError: one thread is too few"):
            next(found)
    finally:
        torch.set_num_threads(before)


def test_a_runtime_without_a_layer_clock_is_refused_before_anything_runs() -> None:
    assert {name for name in RUNTIMES.names if has_layer_clock(name)} >= {"eager"}
    with pytest.raises(
        UsageError, match="'compile' cannot tell how long each layer takes; these can: eager, onnxruntime, openvino"
    ):
        profile((4,), None, Setting("compile", "cpu", 1, 1))


@pytest.mark.slow
def test_what_only_this_process_has_is_timed_here() -> None:
    class Local(nn.Linear):
        pass

    lines: list[str] = []
    (times,) = time_networks(
        nn.Linear(4, 4),
        [given("local", nn.Sequential(Local(4, 4)))],
        (4,),
        EAGER,
        repeats=5,
        cache=None,
        log=lines.append,
    )
    assert "timed in this process" in lines[0]
    assert "Local" in lines[0]
    assert set(times.modules_ms) == {"0"}
