"""Real runtimes on a small convolutional net: they compute the same, and what computes something else is refused."""

from __future__ import annotations

import copy
import ctypes
import gc
import threading
from collections.abc import Iterable, Iterator, Sequence
from itertools import product
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from prunekit.backends.backend import RUNTIMES, Backend
from prunekit.backends.files.onnx_program import export_onnx
from prunekit.backends.onnx_runtime import open_session
from prunekit.backends.session import Inputs, Setting, Source, inputs_like, inputs_of
from prunekit.known_names import DtypeName
from prunekit.measure.latency import comparison
from prunekit.measure.latency.comparison import measure_latency
from prunekit.measure.latency.timing_job import (
    SettingFailure,
    SettingTimes,
    TimingJob,
    file_source,
    output_tensors,
    run_job,
)
from prunekit.measure.measurement_effort import Effort, effort_of
from prunekit.settings.deployment import LatencySettings

SHAPE = (3, 12, 12)
CPU = torch.device("cpu")


def net(width: int = 8) -> nn.Module:
    torch.manual_seed(width)
    layers: Sequence[nn.Module] = [nn.Conv2d(3, width, 3), nn.BatchNorm2d(width), nn.ReLU(), nn.Conv2d(width, 4, 3)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(256, 5)).eval()


def flat(width: int = 8) -> nn.Module:
    """What exporters are done with sooner."""
    return nn.Sequential(nn.Flatten(), nn.Linear(432, width), nn.Linear(width, 5)).eval()


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("onnx")
    return {
        name: export_onnx(net(width), inputs_of(SHAPE).sample(2)[0], folder / f"{name}.onnx")
        for name, width in (("dense", 8), ("pruned", 4))
    }


def job(setting: Setting, sources: dict[str, Source], expected: nn.Module | None = None) -> TimingJob:
    with torch.inference_mode():
        widths = {"dense": 8, "pruned": 4}
        outputs = {
            (name, 2): output_tensors((expected or net(widths[name]))(inputs_of(SHAPE).sample(2)[0]))
            for name in sources
        }
    return TimingJob(RUNTIMES.get(setting.runtime), (setting,), sources, outputs, inputs_of(SHAPE), 6)


def only(found: Iterator[SettingTimes | SettingFailure]) -> SettingTimes | SettingFailure:
    (outcome,) = found
    return outcome


@pytest.mark.slow
@pytest.mark.parametrize("runtime", ["onnxruntime", "openvino"])
def test_runtimes_of_onnx_files_compute_the_same(runtime: str, files: dict[str, Path]) -> None:
    sources = {name: Source(files={(2, "float32"): file}) for name, file in files.items()}
    found = only(run_job(job(Setting(runtime, "cpu", 2, 1), sources), own_process=False))
    assert isinstance(found, SettingTimes)
    assert found.times.shape == (2, 6)
    assert (found.times > 0).all()
    swapped = {"dense": sources["pruned"]}
    refused = only(run_job(job(Setting(runtime, "cpu", 2, 1), swapped), own_process=False))
    assert isinstance(refused, SettingFailure)
    assert "dense computes something else than in eager float32: in the output, values differ by " in refused.reason
    assert "of the largest value, expected at most 0.001" in refused.reason


@pytest.mark.slow
def test_a_file_has_the_dtype_that_a_runtime_computes_in(tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx")
    setting = Setting("tensorrt", "cuda", 2, 1, "float16")
    keys = [RUNTIMES.get(name).file_key(setting) for name in ("tensorrt", "openvino")]
    assert keys == [(2, "float16"), (2, "float32")]
    model = net()
    files = file_source(RUNTIMES.get("tensorrt"), model, inputs_of(SHAPE), keys, tmp_path / "files").files
    assert list(files) == sorted(keys)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    halves = onnx.load(files[2, "float16"])
    types = {value.type.tensor_type.elem_type for value in (*halves.graph.input, *halves.graph.output)}
    weights = {weight.data_type for weight in halves.graph.initializer} - {onnx.TensorProto.INT64}  # shapes
    assert types | weights == {onnx.TensorProto.FLOAT16}
    feed = {halves.graph.input[0].name: inputs_of(SHAPE).sample(2)[0].half().numpy()}
    found = open_session(files[2, "float16"], 1).run(None, feed)
    with torch.inference_mode():
        wanted = model(inputs_of(SHAPE).sample(2)[0])
    assert (torch.from_numpy(found[0]).float() - wanted).abs().max() < 0.02 * wanted.abs().max()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
def test_tensorrt_computes_the_same(dtype: DtypeName) -> None:
    pytest.importorskip("tensorrt")
    settings = LatencySettings((1, 2), (1,), 5, ("tensorrt",), (dtype,))
    report = measure_latency({"dense": net(), "pruned": net(4)}, SHAPE, settings, [torch.device("cuda", 0)])
    assert report.failures == ()
    assert [(row["batch"], row["model"]) for row in report.rows] == list(product((1, 2), ("dense", "pruned")))


class _Stack(ctypes.Structure):
    _fields_ = (("start", ctypes.c_void_p), ("flags", ctypes.c_int), ("size", ctypes.c_size_t))


@pytest.mark.skipif(not Path("/proc/self/maps").is_file(), reason="needs Linux's list of a process's memory")
def test_openvino_frees_no_stack_that_signals_are_handled_on(files: dict[str, Path]) -> None:
    pytest.importorskip("openvino")
    source, setting = Source(files={(2, "float32"): files["dense"]}), Setting("openvino", "cpu", 2, 1)
    kept = [RUNTIMES.get("openvino").session(source, inputs_of(SHAPE).sample(2), setting)]
    last = threading.Thread(target=lambda: (kept.clear(), gc.collect()))  # as a garbage collection may
    last.start()
    last.join()
    stack = _Stack()
    assert ctypes.CDLL(None).sigaltstack(None, ctypes.byref(stack)) == 0
    if stack.start is not None:
        ranges = (line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines())
        assert any(int(low, 16) <= stack.start < int(high, 16) for low, high in ranges)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("memory_format", ["contiguous", "channels_last"])
def test_eager_is_checked_in_every_dtype_and_layout(dtype: str, memory_format: str) -> None:
    setting = Setting("eager", "cpu", 2, 1, dtype, memory_format)
    model = net()
    assert isinstance(only(run_job(job(setting, {"dense": Source(model)}), own_process=False)), SettingTimes)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    other = copy.deepcopy(model)
    with torch.no_grad():
        other[0].weight *= 1.5  # type: ignore[index, operator]
    refused = only(run_job(job(setting, {"dense": Source(other)}, model), own_process=False))
    assert isinstance(refused, SettingFailure)
    assert "expected at most" in refused.reason


def test_what_a_runtime_raises_is_the_reason(tmp_path: Path) -> None:
    (tmp_path / "broken.onnx").write_bytes(b"no model")
    sources = {"dense": Source(files={(2, "float32"): tmp_path / "broken.onnx"})}
    for runtime in ("onnxruntime", "openvino"):
        found = only(run_job(job(Setting(runtime, "cpu", 2, 1), sources), own_process=False))
        assert isinstance(found, SettingFailure)
        assert found.reason


@pytest.mark.slow
def test_runtimes_beside_each_other_in_processes_of_their_own() -> None:
    names = ("eager", "onnxruntime", "openvino")
    wide = nn.Sequential(nn.Flatten(), nn.Linear(432, 16_000), nn.ReLU(), nn.Linear(16_000, 5)).eval()
    report = measure_latency({"only": wide}, SHAPE, LatencySettings((1,), (1,), 5, names), [CPU])
    assert report.failures == ()
    assert tuple(row["runtime"] for row in report.rows) == names
    if Path("/proc/self/clear_refs").exists():
        weights = 4 * sum(parameter.numel() for parameter in wide.parameters())
        assert all(0.9 * weights < row["peak_memory_bytes"] < 4 * weights for row in report.rows)
    assert not [note for note in report.notes if "in this process" in note]
    assert report.machine["cores"] >= 1


@pytest.mark.usefixtures("here")
@pytest.mark.slow
def test_what_is_measured_again_is_exported_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made = list[tuple[int, str]]()

    def counted(
        backend: Backend, model: nn.Module, inputs: Inputs, keys: Iterable[tuple[int, str]], folder: Path
    ) -> Source:
        wanted = list(keys)
        made.extend(wanted)
        return file_source(backend, model, inputs, wanted, folder)

    monkeypatch.setattr(comparison, "file_source", counted)
    settings = LatencySettings((2,), (1,), 5, ("onnxruntime", "openvino"))
    with comparison.prepared_latency({"dense": flat(), "pruned": flat(4)}, SHAPE, settings, [CPU]) as measured:
        reports = [measured(repeats) for repeats in (5, 6)]
    assert made == [(2, "float32"), (2, "float32")]
    assert [[row["repeats"] for row in report.rows] for report in reports] == [[5] * 4, [6] * 4]
    assert not any(report.failures for report in reports)


class Undecided(nn.Module):
    """What no exporter can follow, but for one image at a time: Python that asks what a tensor holds."""

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(1)[:, :5]
        return flat + 1 if len(x) == 1 or flat.sum() > 0 else flat - 1


@pytest.mark.usefixtures("here")
@pytest.mark.slow
def test_a_batch_that_cannot_be_exported_costs_no_other_its_figures() -> None:
    settings = LatencySettings((1, 2), (1,), 5, ("onnxruntime", "openvino"))
    lines: list[str] = []
    report = measure_latency({"dense": flat(), "pruned": Undecided()}, SHAPE, settings, [CPU], log=lines.append)
    assert lines == [
        *(f"latency: exporting {name}, batch {batch}, float32" for batch in (1, 2) for name in ("dense", "pruned")),
        *(f"latency: {runtime}: timing 2 models in 1 setting" for runtime in ("onnxruntime", "openvino")),
    ]
    had = [(row["runtime"], row["batch"], row["model"]) for row in report.rows]
    assert had == list(product(("onnxruntime", "openvino"), (1,), ("dense", "pruned")))
    assert [(row["runtime"], row["batch"]) for row in report.failures] == [("onnxruntime", 2), ("openvino", 2)]
    assert report.failures[0]["reason"] == report.failures[1]["reason"] != ""


@pytest.mark.slow
def test_models_of_one_class_stay_compiled_beside_each_other() -> None:
    runtime, setting = RUNTIMES.get("compile"), Setting("compile", "cpu", 2, 1)
    with torch.inference_mode():
        sessions = [
            runtime.session(Source(nn.Linear(4, width).eval()), (torch.ones(2, 4),), setting) for width in (2, 3)
        ]  # fmt: skip
        before = counters["stats"]["unique_graphs"]
        shapes = [tuple(session.run().shape) for session in sessions for _ in range(2)]
    assert before >= 2
    assert counters["stats"]["unique_graphs"] == before
    assert shapes == [(2, 2), (2, 2), (2, 3), (2, 3)]
    runtime.forget()


@pytest.mark.slow
def test_torch_compile_is_compiled_before_it_is_timed() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()).eval()
    report = measure_latency({"only": model}, SHAPE, LatencySettings((1,), (1,), 5, ("compile",)), [CPU])
    assert report.failures == ()
    assert [(row["runtime"], row["peak_memory_bytes"]) for row in report.rows] == [("compile", None)]
    assert report.rows[0]["warm_up"] >= 10


class Gated(nn.Module):
    """Numbers, an index and a mask: what is drawn at random, and what cannot be."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.linear = nn.Embedding(3, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor, index: Tensor, mask: Tensor) -> Tensor:
        return self.linear((x + self.table(index)) * mask)  # type: ignore[no-any-return]


@pytest.mark.slow
@pytest.mark.parametrize("runtime", ["eager", "onnxruntime", "openvino"])
def test_models_of_several_inputs(runtime: str) -> None:
    example = (torch.zeros(1, 4), torch.tensor([2]), torch.tensor([[True, False, True, True]]))
    inputs = inputs_like(example)
    settings = LatencySettings((3,), (1,), 5, (runtime,))  # type: ignore[arg-type]
    with effort_of(Effort(own_process=runtime == "eager")):  # how they come into another process, one runtime shows
        found = measure_latency({"dense": Gated(), "again": Gated()}, inputs, settings, [CPU])
    assert not found.failures
    assert [row["batch"] for row in found.rows] == [3, 3]


def test_several_inputs_are_repeated_and_one_is_drawn() -> None:
    inputs = inputs_like((torch.randn(2, 4), torch.tensor([2, 1]), torch.ones(2, 3)))
    x, index, more = inputs.sample(3)
    assert (x.shape, more.shape, index.tolist()) == ((3, 4), (3, 3), [2, 2, 2])
    assert torch.equal(x, x[:1].expand(3, 4))
    random = inputs_like((torch.zeros(2, 4),))
    assert torch.equal(inputs_of((4,)).sample(3)[0], random.sample(3)[0])
    assert random.sample(3)[0].count_nonzero() == 12
    assert inputs_of((4,)).described() == random.described() == [4] != inputs.described()
    assert Inputs((*inputs.one[:2], torch.zeros(1, 3))).described() != inputs.described()
    assert inputs_like((torch.ones(2, 4),), drawn=False).sample(2)[0].unique().tolist() == [1.0]


def test_levels_with_the_batch_first_are_no_list_of_samples() -> None:
    levels = [torch.rand(2, 4, 8, 8), torch.rand(2, 8, 4, 4)]
    first, second = inputs_like((torch.rand(2, 3, 8, 8), levels)).sample(3)[1]
    assert torch.equal(first, levels[0][:1].expand(3, -1, -1, -1))
    assert torch.equal(second, levels[1][:1].expand(3, -1, -1, -1))


def test_targets_that_forward_takes_stay_those_of_their_images() -> None:
    images = [torch.rand(3, 8, 6), torch.rand(3, 5, 9)]
    targets = [{"boxes": torch.tensor([[1.0, 1, 4, 5]])}, {"boxes": torch.zeros(0, 4)}]
    first, second, flag = inputs_like((images, targets, True)).sample(3)
    assert [torch.equal(one, images[0]) for one in first] == [True] * 3
    assert [one["boxes"].tolist() for one in second] == [[[1.0, 1, 4, 5]]] * 3
    assert flag is True
