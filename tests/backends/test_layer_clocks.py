"""Layer clocks of real runtimes: each operator's time goes to the module that it belongs to. No time is asserted."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from torch import Tensor, nn
from torchvision.models import MobileNetV2, ResNet, VisionTransformer
from torchvision.models.resnet import BasicBlock

from prunekit.backends.backend import RUNTIMES, Backend
from prunekit.backends.files.onnx_program import NodeModules
from prunekit.backends.onnx_runtime import times_by_module
from prunekit.backends.openvino import undisturbed_means
from prunekit.backends.session import Inputs, LayerClock, Setting, Source, inputs_of
from prunekit.measure.latency import timing_job
from prunekit.measure.latency.timing_job import file_source
from prunekit.measure.latency_profile.network_timing import LayerTimes, Network, time_networks
from prunekit.measure.measurement_effort import Effort, effort_of

CLOCKS = [name for name, runtime in RUNTIMES.items() if runtime.times_layers]
QUANTIZED = [("onnxruntime", "int8"), ("openvino", "int8")]
IMAGES = (3, 64, 64)
Export = Callable[[nn.Module, Inputs, Iterable[tuple[int, str]], Path], Source]


class Odd(nn.Module):
    """Widths, fusions and operators that runtimes treat each in its own way."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.bn = nn.Conv2d(3, 13, 3, bias=False), nn.BatchNorm2d(13)
        self.depth, self.six = nn.Conv2d(13, 13, 3, padding=1, groups=13), nn.ReLU6()
        self.point, self.act = nn.Conv2d(13, 16, 1), nn.SiLU()
        self.residual = nn.Conv2d(16, 16, 3, padding=1)
        self.up, self.up_bn = nn.ConvTranspose2d(16, 9, 2, stride=2, bias=False), nn.BatchNorm2d(9)
        self.line = nn.Conv1d(9, 8, 1)
        self.hidden, self.head = nn.Linear(8, 12), nn.Linear(12, 5, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.six(self.depth(self.bn(self.stem(x)).relu()))
        x = self.act(self.point(x))
        x = torch.relu(self.residual(x) + x)
        x = torch.relu(self.line(self.up_bn(self.up(x)).flatten(2)))
        return self.head(self.hidden(x.transpose(1, 2)).softmax(-1))  # type: ignore[no-any-return]


def vit() -> nn.Module:
    return VisionTransformer(64, 16, 2, 2, 32, 64)


def settled(build: Callable[[], nn.Module]) -> nn.Module:
    """In eval mode; no two parameters are alike, or the exporter would keep one of them."""
    torch.manual_seed(0)
    model = build().eval()
    for name, tensor in model.state_dict().items():
        if tensor.is_floating_point() and tensor.dim() == 1:
            tensor.uniform_(0.5, 1.5) if "var" in name else tensor.add_(0.1 * torch.randn_like(tensor))
    return model


def resnet() -> nn.Module:
    return ResNet(BasicBlock, [1, 1, 1, 1])


def mobilenet() -> nn.Module:
    """A block of each kind: without expansion, with a stride, with a shortcut."""
    return MobileNetV2(inverted_residual_setting=[[1, 16, 1, 1], [6, 24, 2, 2]])


MODELS = {"resnet": resnet, "mobilenet": mobilenet, "vit": vit, "odd": Odd}


def layers_of(model: nn.Module) -> set[str]:
    """Paths of the layers that multiply and are called; attention's own are not, in torch."""
    kinds = (nn.Conv1d, nn.Conv2d, nn.ConvTranspose2d, nn.Linear)
    return {path for path, module in model.named_modules() if type(module) in kinds}


@pytest.fixture(scope="module")
def export(tmp_path_factory: pytest.TempPathFactory) -> Export:
    """Exports each structure once: `settled` gives it the same weights every time."""
    folder, made = tmp_path_factory.mktemp("onnx"), dict[tuple[object, ...], Source]()
    folders = dict[tuple[str, str], Path]()

    def once(backend: Backend, model: nn.Module, inputs: Inputs, keys: Iterable[tuple[int, str]], _: Path) -> Source:
        wanted = sorted(keys)
        key = (str(model), str(inputs.described()))
        place = folders.setdefault(key, folder / str(len(folders)))
        if (*key, *wanted) not in made:
            made[*key, *wanted] = file_source(backend, model, inputs, wanted, place)
        return made[*key, *wanted]

    return once


@pytest.fixture
def file_of(export: Export, tmp_path: Path) -> Callable[[str], Path]:
    """The ONNX file of one of the models."""
    key = (1, "float32")
    return lambda name: export(
        RUNTIMES.get("onnxruntime"), settled(MODELS[name]), inputs_of(IMAGES), [key], tmp_path
    ).files[key]


@pytest.mark.slow
@pytest.mark.parametrize(("runtime", "dtype"), [*((name, "float32") for name in CLOCKS), *QUANTIZED])
def test_every_layer_of_a_network_has_its_time(
    runtime: str, dtype: str, export: Export, monkeypatch: pytest.MonkeyPatch
) -> None:
    if dtype == "int8" and runtime == "openvino":
        pytest.importorskip("nncf")
    monkeypatch.setattr(timing_job, "file_source", export)
    models = {name: settled(build) for name, build in MODELS.items()}
    lines: list[str] = []
    with effort_of(Effort(network_ms=0.0, warm_up_calls=5)):
        found = time_networks(
            settled(partial(nn.Conv2d, 3, 2, 3)),
            [Network(name, model, partial(settled, MODELS[name])) for name, model in models.items()],
            IMAGES, Setting(runtime, "cpu", 1, 1, dtype), repeats=5, cache=None, log=lines.append,
        )  # fmt: skip
        for name, times in zip(models, found, strict=True):
            require_times_of_layers(models[name], times, runtime)
    assert len(lines) == len(models), "in one process of their own"


def require_times_of_layers(model: nn.Module, times: LayerTimes, runtime: str) -> None:
    assert set(times.modules_ms) <= {path for path, _ in model.named_modules()}
    missing = layers_of(model) - set(times.modules_ms)
    # OpenVINO may make one operator of two tiny linear layers in a row, which counts for the first of them.
    assert not missing or (runtime == "openvino" and all("mlp.3" in path for path in missing))
    attention = {path for path, module in model.named_modules() if isinstance(module, nn.MultiheadAttention)}
    assert attention <= set(times.modules_ms)
    assert all(ms >= 0 for ms in times.modules_ms.values())
    assert times.rest_ms == 0 or runtime != "eager"


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_a_node_belongs_to_the_module_whose_weight_it_reads(name: str, file_of: Callable[[str], Path]) -> None:
    model, file = settled(MODELS[name]), file_of(name)
    places, owners = NodeModules(file), dict(model.named_parameters())
    checked = set()
    for node in onnx.load(file).graph.node:
        for parameter in set(node.input) & set(owners):
            owner = parameter.rpartition(".")[0]
            if not owner.endswith("out_proj"):  # which attention does not call
                assert places.of_nodes[node.name] == owner, node
                checked.add(owner)
    transposed = {path for path in layers_of(model) if ".mlp." in path or path in ("hidden", "head")}
    assert layers_of(model) - transposed <= checked
    assert set(places.of_nodes.values()) <= {path for path, _ in model.named_modules()}


@pytest.mark.slow
def test_names_of_runtimes_lead_back_to_the_file(file_of: Callable[[str], Path]) -> None:
    places = NodeModules(file_of("odd"))
    nodes = {node.output[0]: node for node in onnx.load(file_of("odd")).graph.node}
    stem, relu = (next(node for node in nodes.values() if node.op_type == kind) for kind in ("Conv", "Relu"))
    assert relu.input[0] == stem.output[0]
    assert places.of(f"{relu.output[0]}_nchwc", convolution=True) == "stem"
    assert places.of(f"{stem.output[0]}_nchwc", convolution=True) == "stem"
    assert places.of(f"{stem.name}/WithoutBiases") == places.of(f"fused {stem.name}") == places.of(stem.name) == "stem"
    assert places.of(relu.name) == ""
    for added in ("ReorderOutput", "ReorderOutput_token_3", f"x_abcd_acdb_{stem.name}", "Transpose_token_31", ""):
        assert not added or places.of(added) is None


def clock_of(runtime: str, model: nn.Module, folder: Path) -> LayerClock:
    setting, shape = Setting(runtime, "cpu", 1, 1), (3, 12, 12)
    backend = RUNTIMES.get(runtime)
    module = backend.carrier == "module"
    source = (
        Source(model) if module else file_source(backend, model, inputs_of(shape), [(1, "float32")], folder / "files")
    )
    session = backend.session(source, inputs_of(shape).sample(1), setting)
    assert session.layers is not None
    return session.layers()


@pytest.mark.slow
@pytest.mark.parametrize("runtime", CLOCKS)
def test_passes_are_the_last_ones(runtime: str, tmp_path: Path) -> None:
    with torch.inference_mode():
        clock = clock_of(runtime, settled(lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))), tmp_path)
        for _ in range(7):
            clock.run()
        passes = clock.passes(3)
    assert len(passes) in (1, 3), "or what they took together"
    assert all("0" in found for found in passes)
    assert not list(tmp_path.rglob("*profile*"))


@pytest.mark.slow
def test_onnx_runtime_counts_each_forward_by_itself(file_of: Callable[[str], Path]) -> None:
    places = NodeModules(file_of("odd"))
    (stem, *_) = [name for name, place in places.of_nodes.items() if place == "stem"]

    def event(name: str, us: int, kind: str = "Conv") -> Mapping[str, object]:
        return {"name": name, "dur": us, "args": {"op_name": kind}}

    whole = event("model_run", 9)
    first = [event("session_initialization", 70), event(f"{stem}_kernel_time", 2), whole]
    second = [event(f"{stem}_kernel_time", 4), event("ReorderOutput_kernel_time", 6, "ReorderOutput"), whole]
    found = times_by_module([*first, *second], places)
    assert found == [{"stem": pytest.approx(0.0025)}, {"stem": pytest.approx(0.0045), None: pytest.approx(0.0065)}]


@pytest.mark.parametrize("spike", [0.0, 30_000.0])
def test_running_means_are_taken_apart(spike: float) -> None:
    generator = np.random.default_rng(0)
    true = np.array([3.2, 41.7, 512.3])
    each = np.tile(true, (30, 1)) * generator.uniform(0.99, 1.01, (30, 3))
    each[:10] *= 3  # the warm-up
    each[22, 1] += spike
    means = np.floor(np.cumsum(each, axis=0) / np.arange(1, 31)[:, None])
    assert undisturbed_means(means, 20) == pytest.approx(true, abs=3.5, rel=0.01)
