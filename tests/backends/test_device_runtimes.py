"""Runtimes of devices: real ones where they are installed, and stand-ins that run the trace that they are given."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from exporting import require_same, source_of
from torch import Tensor, nn

import prunekit as pk
from prunekit.backends import executorch, litert
from prunekit.backends.backend import FORMATS, RUNTIMES
from prunekit.backends.files.export_source import ExportSource
from prunekit.backends.session import Setting
from prunekit.errors import ArtifactError, RunError, UsageError
from prunekit.models.interface import ModelInterface, interface_of, with_batch

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit:FutureWarning")  # traces, which stand-ins run
DEVICES = ["litert", "ncnn", "executorch"]


class Two(nn.Module):
    """Two inputs, two outputs, and a size in Python."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.linear = nn.Conv2d(3, 4, 3), nn.Linear(8, 4)

    def forward(self, image: Tensor, token: Tensor) -> dict[str, Tensor]:
        features = self.conv(image).relu()
        return {"features": features.view(features.size(0), -1), "scores": self.linear(token) + features.mean((2, 3))}


class Bessel(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.special.bessel_j0(x)  # the line


def two(samples: int) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    return Two().eval(), (torch.randn(samples, 3, 6, 6), torch.randn(samples, 8))


def fixed(model: nn.Module, example: tuple[Tensor, ...], **facts: Any) -> ExportSource:
    return ExportSource(model, example, with_batch(interface_of(model, example, **facts), len(example[0])))


PNNX = f"""#!{sys.executable}
import os, shutil, sys, zipfile
traced, option = sys.argv[1:]
stem = traced.removesuffix(".pt")
assert option == "fp16=0" and os.getcwd() == os.path.dirname(os.path.realpath(traced))
shutil.copyfile(traced, stem + ".ncnn.bin")
with zipfile.ZipFile(traced) as archive:
    lacks = any(b"bessel" in archive.read(name) for name in archive.namelist())
operator = "aten::special_bessel_j0" if lacks else "InnerProduct"
open(stem + ".ncnn.param", "w").write(f"7767517\\n1 1\\n{{operator}}  one 1 1 in0 out0\\n")
open(stem + "_ncnn.py", "w").write('''raise SystemExit("was run")
ex.input("in0", ncnn.Mat(in0.numpy(), batch_index=0).clone())
ex.input("in1", ncnn.Mat(in1.numpy(), batch_index=233).clone())
''')
"""
"""A stand-in for pnnx: the trace itself are the weights."""


class Mat(np.ndarray):
    """A stand-in for ncnn's tensor."""

    def __new__(cls, array: Any) -> Any:
        return array.view(cls)

    def clone(self) -> Any:
        return self.copy().view(Mat)


class Net:
    """A stand-in for a network of ncnn, whose second input keeps the axis of its batch."""

    def __init__(self) -> None:
        self.opt = SimpleNamespace(num_threads=9, use_fp16_storage=True, use_vulkan_compute=True, use_winograd=True)
        Net.last = self

    def load_param(self, path: str) -> int:
        return 0 if Path(path).read_text(encoding="utf-8").startswith("7767517") else -1

    def load_model(self, path: str) -> int:
        self.module = torch.jit.load(path)
        return 0

    def input_names(self) -> list[str]:
        return [f"in{at}" for at, _ in enumerate(list(self.module.graph.inputs())[1:])]

    def create_extractor(self) -> Any:
        given: dict[str, Tensor] = {}

        def extract(name: str) -> tuple[int, Mat]:
            tensors = [one[None] if key == "in0" else one for key, one in sorted(given.items())]
            return 0, Mat(self.module(*tensors)[int(name[3:])][0].detach().numpy())

        return SimpleNamespace(
            input=lambda name, mat: given.update({name: torch.from_numpy(np.array(mat))}), extract=extract
        )


@pytest.fixture
def ncnn(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    program = tmp_path / "pnnx"
    program.write_text(PNNX, encoding="utf-8")
    program.chmod(0o755)
    for name, facts in (("ncnn", {"Net": Net, "Mat": Mat}), ("pnnx", {"EXEC_PATH": str(program)})):
        module = ModuleType(name)
        vars(module).update(facts)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(type(FORMATS.get("ncnn")), "unusable", lambda self: "")
    (tmp_path / "files").mkdir()
    return FORMATS.get("ncnn")


def test_a_batch_runs_in_ncnn_sample_after_sample(ncnn: Any, tmp_path: Path) -> None:
    (model, example), file = two(2), tmp_path / "files" / "net.ncnn.param"
    notes = ncnn.write(source_of(model, example, task="regression"), file)
    assert any("one sample at a time" in note for note in notes)
    assert sorted(one.name for one in file.parent.iterdir()) == [
        "net.ncnn.bin", "net.ncnn.param", "net.ncnn.param.json",
    ]  # fmt: skip
    interface = ncnn.interface(file)
    assert [str(spec) for spec in interface.inputs] == ["image: float32 (batch, 3, 6, 6)", "token: float32 (batch, 8)"]
    assert interface.task == "regression"
    run = ncnn.open_trusted(file, threads=3)
    assert vars(Net.last.opt) == {
        "num_threads": 3, "use_fp16_storage": False, "use_vulkan_compute": False, "use_winograd": True,
    }  # fmt: skip
    for samples in (1, 2, 5):
        require_same(model, run, two(samples)[1])
    session = ncnn.file_session(file, interface, example, Setting("ncnn", "cpu", 2, 1), trusted=True)
    assert all(map(torch.equal, session.tensors(session.run()), run(example)))


def test_an_operator_that_ncnn_lacks_is_named_with_its_line(ncnn: Any, tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(6, 6), Bessel())
    message = r"Sequential cannot be exported to ncnn, .*bessel_j0, at 1 \(test_device_runtimes.py:\d+: .*# the line\)"
    with pytest.raises(RunError, match=message):
        ncnn.write(source_of(model, (torch.randn(2, 6),)), tmp_path / "files" / "net.ncnn.param")
    assert list((tmp_path / "files").iterdir()) == []


@pytest.mark.parametrize("suffix", [".bin", ".param.json"])
def test_what_lies_beside_an_ncnn_network_is_its_own(suffix: str, ncnn: Any, tmp_path: Path) -> None:
    model, example = two(2)
    file, other = tmp_path / "files" / "net.ncnn.param", tmp_path / "other"
    ncnn.write(source_of(model, example), file)
    beside = file.with_name(f"net.ncnn{suffix}")
    shutil.move(beside, other)
    beside.symlink_to(other)
    with pytest.raises(ArtifactError, match="leads elsewhere"):
        ncnn.open_trusted(file)


def test_a_network_of_unknown_origin_is_refused(ncnn: Any, tmp_path: Path) -> None:
    model, example = two(2)
    file = tmp_path / "files" / "net.ncnn.param"
    ncnn.write(source_of(model, example), file)
    setting = Setting("ncnn", "cpu", 2, 1)
    with pytest.raises(ArtifactError, match="on trust; if you trust it, add --allow-code"):
        ncnn.open(file)
    with pytest.raises(ArtifactError, match="on trust"):
        ncnn.file_session(file, ncnn.interface(file), example, setting, trusted=False)


class Interpreter:
    """A stand-in for LiteRT's interpreter, whose file is a trace behind a mark."""

    def __init__(self, path: str, num_threads: int) -> None:
        Path(path).with_name("trace.pt").write_bytes(Path(path).read_bytes()[8:])
        self.module, self.threads = torch.jit.load(Path(path).with_name("trace.pt")), num_threads
        self.given: dict[int, Any] = {}

    def allocate_tensors(self) -> None: ...

    def get_signature_runner(self) -> Any:
        entries = {f"args_{at}": {"index": at, "dtype": np.float32} for at in range(2)}
        results = {f"output_{at}": {"index": at} for at in range(2)}
        return SimpleNamespace(get_input_details=lambda: entries, get_output_details=lambda: results)

    def set_tensor(self, index: int, array: Any) -> None:
        self.given[index] = torch.from_numpy(array)

    def invoke(self) -> None:
        self.found = self.module(*[self.given[at] for at in sorted(self.given)])

    def get_tensor(self, index: int) -> Any:
        return self.found[index].detach().numpy()


@pytest.fixture
def lite(monkeypatch: pytest.MonkeyPatch) -> Any:
    interfaces: list[ModelInterface] = []

    def convert(module: nn.Module, sample: tuple[Tensor, ...]) -> Any:
        traced = torch.jit.trace(module, sample, check_trace=False)

        def export(path: str) -> None:
            traced.save(path)
            Path(path).write_bytes(b"    TFL3" + Path(path).read_bytes())

        return SimpleNamespace(export=export)

    def keep(content: bytes, entries: dict[str, str]) -> bytes:
        interfaces.append(litert.interface_of_json(entries["prunekit"], "here"))
        return content

    for name, facts in (
        ("litert_torch", {"convert": convert}),
        ("ai_edge_litert", {}),
        ("ai_edge_litert.interpreter", {"Interpreter": Interpreter}),
    ):
        module = ModuleType(name)
        vars(module).update(facts)
        monkeypatch.setitem(sys.modules, name, module)
    kind = type(FORMATS.get("litert"))
    monkeypatch.setattr(kind, "unusable", lambda self: "")
    monkeypatch.setattr(kind, "interface", lambda self, path: interfaces[-1])
    monkeypatch.setattr(litert, "with_metadata", keep)
    return FORMATS.get("litert")


def test_a_litert_export_has_one_batch_size_and_says_so(lite: Any, tmp_path: Path) -> None:
    model, example = two(4)
    found = pk.export(model, example, to="litert", path=tmp_path / "net.tflite", timed=())
    assert any("one batch size, 1 here" in note for note in found.notes)
    assert [str(spec) for spec in found.interface.inputs] == ["image: float32 (1, 3, 6, 6)", "token: float32 (1, 8)"]
    require_same(model, lite.open(tmp_path / "net.tflite"), two(1)[1])
    found = pk.export(model, example, to="litert", path=tmp_path / "four.tflite", timed=(), batch=4)
    assert not any("one batch size" in note for note in found.notes)
    require_same(model, lite.open(tmp_path / "four.tflite"), example)


def test_axes_of_any_size_are_refused_where_a_file_has_none(lite: Any, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"litert: expected inputs of fixed sizes, got batch .* --batch 1"):
        lite.write(source_of(*two(2)), tmp_path / "net.tflite")


def test_the_pool_of_executorch_is_replaced_only_while_no_program_is_open(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class Method:
        def execute(self, tensors: list[Tensor]) -> list[Tensor]:
            return [tensors[0] * 2]

    pool = [4]
    library = SimpleNamespace(
        _threadpool_get_thread_count=lambda: pool[-1], _unsafe_reset_threadpool=lambda count: pool.append(count)
    )
    for name in ("executorch", "executorch.extension", "executorch.extension.pybindings"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules["executorch.extension.pybindings"].portable_lib = library  # type: ignore[attr-defined]
    monkeypatch.setattr(executorch, "method_of", lambda path, name: Method())
    example = (torch.ones(2, 3),)
    interface = interface_of(nn.ReLU(), example)
    backend = RUNTIMES.get("executorch")
    monkeypatch.setattr(type(backend), "interface", lambda self, path: interface)

    def opened(threads: int) -> Any:
        setting = Setting("executorch", "cpu", 2, threads)
        return backend.file_session(tmp_path, interface, example, setting, trusted=True)  # type: ignore[attr-defined]

    session = opened(1)
    assert torch.equal(session.tensors(session.run())[0], example[0] * 2)
    opened(1)
    with pytest.raises(RunError, match="expected 2 threads, and its pool has 1"):
        opened(2)
    assert pool == [4, 1]
    del session
    opened(2)
    assert pool == [4, 1, 2]


@pytest.mark.parametrize("name", DEVICES)
def test_what_runtimes_of_devices_cannot_compute_is_refused(name: str) -> None:
    backend = RUNTIMES.get(name)
    assert backend.refuse(Setting(name, "cpu", 1, 1)) == ""
    assert "float32" in backend.refuse(Setting(name, "cpu", 1, 1, "bfloat16"))
    assert "layouts" in backend.refuse(Setting(name, "cpu", 1, 1, "float32", "channels_last"))


@pytest.mark.slow
@pytest.mark.parametrize("name", DEVICES)
def test_installed_runtimes_of_devices_compute_what_the_model_does(name: str, tmp_path: Path) -> None:
    backend = FORMATS.get(name)
    if problem := backend.unusable():
        pytest.skip(problem)
    (model, example), file = two(2), tmp_path / f"net{backend.suffix}"
    backend.write(fixed(model, example, classes=("one", "two")), file)
    interface = backend.interface(file)
    assert [spec.name for spec in (*interface.inputs, *interface.outputs)] == ["image", "token", "features", "scores"]
    assert interface.classes == ("one", "two")
    require_same(model, backend.open_trusted(file), example)
    session = backend.file_session(file, interface, example, Setting(name, "cpu", 2, 1), trusted=True)
    require_same(model, lambda _: session.tensors(session.run()), example)
    file.write_bytes(b"something else" * 100)
    with pytest.raises(ArtifactError, match=str(file)):
        backend.open_trusted(file)
