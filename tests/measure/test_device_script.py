"""The script in a kit, in a process of its own that has neither prunekit nor torch."""

from __future__ import annotations

import ast
import gzip
import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from prunekit.measure.device import measure
from prunekit.utils.files import with_checksum
from tests.exported_files import classifier, exported

pytest.importorskip("onnxruntime")
SCRIPT = Path(measure.__file__)
ALONE = """
import runpy, sys
sys.argv[0] = "measure.py"
try:
    runpy.run_path("measure.py", run_name="__main__")
finally:
    assert not {"prunekit", "torch"} & set(sys.modules)
"""


def write_kit(folder: Path, files: dict[str, Path], x: torch.Tensor, outputs: dict[str, torch.Tensor]) -> Path:
    """A kit of ONNX files by the names of their networks, with one input and one output."""
    for name in ("files", "inputs", "outputs"):
        (folder / name).mkdir(parents=True)
    (folder / "measure.py").write_bytes(SCRIPT.read_bytes())
    (folder / "inputs" / "0.bin").write_bytes(x.numpy().tobytes())
    networks = []
    for name, file in files.items():
        data, made = file.read_bytes(), outputs[name]
        (folder / "files" / f"{name}.onnx.gz").write_bytes(gzip.compress(data))
        (folder / "outputs" / f"{name}.0.bin").write_bytes(made.numpy().tobytes())
        output = {"name": "output", "dtype": "float32", "shape": list(made.shape)}
        sums = {f"{name}.onnx": hashlib.sha256(data).hexdigest()}
        networks.append({"name": name, "files": sums, "main": f"{name}.onnx", "outputs": [output]})
    kit = {
        "format": 1, "kit": "ab" * 32, "prunekit": "0.4.0", "model": "Photos", "device": "pi5",
        "runtime": "onnxruntime", "batch": 2, "threads": 1, "dtype": "float32", "tolerance": 0.02, "rounds": 6,
        "inputs": [{"name": "input", "dtype": "float32", "shape": list(x.shape)}], "networks": networks,
    }  # fmt: skip
    (folder / "kit.json").write_text(json.dumps(kit))
    return folder


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    torch.manual_seed(0)
    folder, x = tmp_path_factory.mktemp("nets"), torch.randn(2, 3, 8, 8)
    models = {"dense": classifier(8), "network-01": classifier(4)}
    files = {name: exported(model, (x,), "onnx", folder / name) for name, model in models.items()}
    with torch.no_grad():
        return {"files": files, "x": x, "outputs": {name: model(x) for name, model in models.items()}}


@pytest.fixture
def kit(whole: dict[str, Any], tmp_path: Path) -> Path:
    return write_kit(tmp_path / "kit", **whole)


def run(kit: Path, *options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | environment
    command = [sys.executable, "-c", ALONE, "--minutes", "0.02", *options]
    return subprocess.run(command, cwd=kit, env=clean, capture_output=True, text=True, check=False)


def times(kit: Path) -> dict[str, Any]:
    return dict(json.loads((kit / "times.json").read_text()))


def change(kit: Path, **values: Any) -> None:
    known = json.loads((kit / "kit.json").read_text())
    (kit / "kit.json").write_text(json.dumps({**known, **values}))


def test_it_is_a_program_of_python_3_8_that_imports_nothing_but_the_standard_library() -> None:
    tree = ast.parse(SCRIPT.read_text(encoding="utf-8"), feature_version=(3, 8))
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    imported |= {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert {name.partition(".")[0] for name in imported} <= {*sys.stdlib_module_names}


def test_a_kit_is_measured_and_goes_on_where_it_was_stopped(kit: Path) -> None:
    done = run(kit, "--only", "dense")
    assert done.returncode == 0, done.stderr
    assert "Not measured yet: network-01" in done.stdout
    first = times(kit)
    assert not first["complete"]
    assert [*first["networks"]] == ["dense"]
    done = run(kit)
    assert done.returncode == 0, done.stderr
    assert "network-01" in done.stdout
    assert "dense  " not in done.stdout.split("]")[0]
    found = times(kit)
    assert found["networks"]["dense"] == first["networks"]["dense"]
    assert found == with_checksum(found)
    assert (found["format"], found["kit"], found["complete"], found["failed"]) == (1, "ab" * 32, True, {})
    assert found["seconds"] > first["seconds"] > 0
    assert found["device"]["runtime"].startswith("onnxruntime ")
    assert {*found["watched"]} == {"temperature_c", "frequency_mhz"}
    for one in found["networks"].values():
        pairs = np.array(one["ms"])
        assert pairs.shape[0] >= 5
        assert pairs.shape[1] == 2
        assert (pairs > 0).all()
        assert 0 <= one["difference"] < 1e-3
        assert any("linear" in name for name in one["layers_us"])
        assert min(one["layers_us"].values()) > 0
    assert {one.name for one in kit.iterdir()} == {"files", "inputs", "outputs", "kit.json", "measure.py", "times.json"}
    before = (kit / "times.json").read_bytes()
    assert run(kit).returncode == 0
    assert (kit / "times.json").read_bytes() == before


def test_a_network_that_computes_something_else_is_refused_and_the_rest_goes_on(kit: Path) -> None:
    file = kit / "outputs" / "network-01.0.bin"
    numbers = np.frombuffer(file.read_bytes(), np.float32)
    for wrong in (numbers + 1, np.full_like(numbers, np.nan)):
        file.write_bytes(wrong.astype(np.float32).tobytes())
        done = run(kit)
        assert done.returncode == 0
        found = times(kit)
        assert [*found["networks"]] == ["dense"]
        assert "its outputs are off by" in found["failed"]["network-01"]
        assert found["complete"]
    file.write_bytes(numbers.tobytes())
    assert run(kit).returncode == 0
    assert times(kit)["failed"] == {}
    (kit / "outputs" / "dense.0.bin").write_bytes((0 * numbers).tobytes())
    done = run(kit, "--again")
    assert done.returncode == 1
    assert "the dense network, which all others need, failed" in done.stderr


def damage_file(kit: Path) -> None:
    (kit / "files" / "network-01.onnx.gz").write_bytes(gzip.compress(b"something else"))


def cut_file(kit: Path) -> None:
    file = kit / "files" / "dense.onnx.gz"
    file.write_bytes(file.read_bytes()[:-20])


def lose_file(kit: Path) -> None:
    (kit / "files" / "network-01.onnx.gz").unlink()


def cut_input(kit: Path) -> None:
    (kit / "inputs" / "0.bin").write_bytes(bytes(8))


def lose_kit(kit: Path) -> None:
    (kit / "kit.json").unlink()


def cut_kit(kit: Path) -> None:
    (kit / "kit.json").write_text("{")


def newer(kit: Path) -> None:
    change(kit, format=2)


def no_threads(kit: Path) -> None:
    change(kit, threads=0)


def not_installed(kit: Path) -> None:
    change(kit, runtime="ncnn")


def leave(kit: Path) -> None:
    (kit.parent / "other.onnx.gz").write_bytes((kit / "files" / "dense.onnx.gz").read_bytes())
    known = json.loads((kit / "kit.json").read_text())["networks"]
    sums = {"../../other.onnx": known[0]["files"]["dense.onnx"]}
    change(kit, networks=[{**known[0], "files": sums, "main": "../../other.onnx"}, known[1]])


def leave_by_name(kit: Path) -> None:
    known = json.loads((kit / "kit.json").read_text())["networks"]
    change(kit, networks=[known[0], {**known[1], "name": str(kit.parent), "outputs": []}])


def leave_by_link(kit: Path) -> None:
    (kit / "files").rename(kit.parent / "files")
    (kit / "files").symlink_to(kit.parent / "files")


def other_kit(kit: Path) -> None:
    (kit / "times.json").write_text(
        json.dumps(with_checksum({"format": 1, "kit": "cd" * 32, "device": {}, "networks": {}}))
    )


def edited_times(kit: Path) -> None:
    (kit / "times.json").write_text(json.dumps({**with_checksum({"format": 1, "kit": "ab" * 32}), "seconds": 3}))


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (damage_file, "network-01.onnx.gz: damaged, its SHA-256 is not the one in kit.json"),
        (cut_file, "dense.onnx.gz: cannot be unpacked"),
        (lose_file, "network-01.onnx.gz: expected a file of the kit, and there is none"),
        (cut_input, "0.bin: expected 1536 bytes, got 8"),
        (lose_kit, "kit.json: expected a file of the kit, and there is none"),
        (cut_kit, "kit.json: damaged (JSONDecodeError"),
        (newer, "kit.json: format 2 for 'onnxruntime'; this measure.py reads format 1"),
        (no_threads, "kit.json: damaged (ValueError: threads, rounds or tolerance)"),
        (not_installed, f"{sys.executable} -m pip install ncnn"),
        (leave, "out of the kit's folder"),
        (leave_by_name, "kit.json: damaged (ValueError: names of networks, or its id)"),
        (leave_by_link, "'files': leads, or may lead, out of the kit's folder"),
        (other_kit, "times.json: of another kit (cdcd"),
        (edited_times, "times.json: damaged; --again replaces it"),
    ],
)
def test_a_kit_that_cannot_be_measured_says_why(
    fault: Any, said: str, kit: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    find = measure.importlib.util.find_spec
    monkeypatch.setitem(sys.modules, "ncnn", None)
    monkeypatch.setattr(measure.importlib.util, "find_spec", lambda name: None if name == "ncnn" else find(name))
    fault(kit)
    assert measure.main(["--kit", str(kit), "--minutes", "0.01"]) == 2
    assert said in capsys.readouterr().err
    if "times.json" in said:
        assert measure.main(["--kit", str(kit), "--minutes", "0.01", "--again"]) == 0
        assert times(kit)["complete"]


def test_wrong_usage_says_what_is_known(kit: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert measure.main(["--kit", str(kit), "--only", "network-9"]) == 2
    assert "no network 'network-9'; it has dense, network-01" in capsys.readouterr().err
    with pytest.raises(SystemExit) as stopped:
        measure.main(["--minutes", "0"])
    assert stopped.value.code == 2


def test_an_interrupted_run_says_how_to_go_on(
    kit: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    turns, calls = measure.take_turns, list[int]()

    def stop(*given: Any) -> Any:
        calls.append(1)
        if len(calls) > 1:
            raise KeyboardInterrupt
        return turns(*given)

    monkeypatch.setattr(measure, "take_turns", stop)
    assert measure.main(["--kit", str(kit), "--minutes", "0.01"]) == 130
    assert "the same command" in capsys.readouterr().out
    assert [*times(kit)["networks"]] == ["dense"]
    assert times(kit)["failed"] == {"network-01": "the process ended while it was measured"}
    assert times(kit) == with_checksum(times(kit))


def made_up(**networks: list[float]) -> dict[str, Any]:
    """Times of networks, whose dense pairs are these numbers of milliseconds."""
    pairs = {name: {"ms": [[one / 2, one] for one in dense]} for name, dense in networks.items()}
    watched = {"temperature_c": [40.0, 81.0], "frequency_mhz": [2400.0, 2400.0]}
    return {"device": {"threads": 1, "cores": 4, "governor": "ondemand"}, "watched": watched, "networks": pairs}


def test_doubts_are_drift_wide_intervals_a_slower_clock_and_shared_cores() -> None:
    steady = [10.0 + at / 100 for at in range(20)]
    assert measure.doubts(made_up(dense=steady, small=steady)) == {}
    slower = measure.doubts(made_up(dense=steady, small=[1.2 * one for one in steady]))
    assert [*slower.values()] == ["cooling and mains power"]
    noisy = made_up(dense=steady)
    noisy["networks"]["dense"]["ms"] = [[10.0 if at % 2 else 14.0, 10.0] for at in range(20)]
    ((sentence, remedy),) = measure.doubts(noisy).items()
    assert "wider than 10% of the median for dense" in sentence
    assert "`performance`" in remedy
    hot = made_up(dense=steady)
    hot["watched"]["frequency_mhz"] = [2400.0, 1500.0]
    assert [*measure.doubts(hot)] == ["the clock fell from 2400 to 1500 MHz at 81 C"]
    shared = made_up(dense=steady)
    shared["device"]["threads"] = 8
    assert [*measure.doubts(shared)] == ["the 8 threads had to share 4 cores"]


def test_intervals_are_those_of_the_order_statistics() -> None:
    assert measure.interval([3.0, 1.0, 2.0, 5.0, 4.0]) == (3.0, 1.0, 5.0)
    assert measure.interval([float(one) for one in range(1, 11)]) == (5.5, 2.0, 9.0)  # as tables of the sign test say
    assert measure.interval([float(one) for one in range(1, 31)]) == (15.5, 10.0, 21.0)


@pytest.mark.parametrize(
    ("found", "expected", "apart"),
    [
        ([1.0, 2.0], [1.0, 4.0], 0.5),
        ([float("nan")], [1.0], float("inf")),
        ([float("inf")], [1.0], float("inf")),
        ([-float("inf"), float("nan"), 1.0], [-float("inf"), float("nan"), 1.0], 0.0),
        ([0.5], [0.0], 0.5),
    ],
)
def test_the_difference_is_a_share_of_the_largest_expected_number(
    found: list[float], expected: list[float], apart: float
) -> None:
    assert measure.difference(found, expected) == apart


def test_times_of_trtexec_are_those_of_the_gpu() -> None:
    text = '[\n  { "startEnqMs" : 0.1, "computeMs" : 2.5 }\n, { "computeMs" : 3.5 }\n, { "computeMs" : 2 }\n]\n'
    assert measure.trtexec_ms(text) == 2.5


def test_layers_of_onnxruntime_are_means_over_the_last_passes() -> None:
    def one_pass(*durations: int) -> list[dict[str, Any]]:
        kinds = zip(("Conv", "Add"), "ab", durations, strict=True)
        nodes = [{"name": f"{name}_kernel_time", "dur": dur, "args": {"op_name": kind}} for kind, name, dur in kinds]
        return [{"name": "a_fence_before", "dur": 9}, *nodes, {"name": "model_run", "dur": 99}]

    events = [*one_pass(100, 100), *one_pass(10, 20), *one_pass(12, 22)]
    assert measure.onnxruntime_layers(events, 2) == {"Conv a": 11.5, "Add b": 21.5}
