"""ONNX files carry their interface, and load in ONNX Runtime as they are."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from exporting import Convolutions, of_size, require_same, source_of, write
from torch import nn

import prunekit as pk
from prunekit.backends.backend import FORMATS
from prunekit.backends.files.export_source import ExportOptions
from prunekit.backends.files.onnx_program import module_ends, scopes_of
from prunekit.errors import ArtifactError, RunError, UsageError
from prunekit.models.cifar import CifarResNet

FORMAT = FORMATS.get("onnx")
PREPARED = pk.Preprocessing(height=32, width=32, shorter_side=36)


@pytest.fixture(scope="module")
def pruned() -> nn.Module:
    torch.manual_seed(0)
    model = CifarResNet(8, 4).eval()
    return pk.prune(model, torch.randn(4, 3, 32, 32), macs=0.5).model.eval()


@pytest.fixture(scope="module")
def file(pruned: nn.Module, tmp_path_factory: pytest.TempPathFactory) -> Path:
    source = source_of(
        pruned,
        (torch.randn(2, 3, 32, 32),),
        task="classification",
        classes=("a", "b", "c", "d"),
        preprocessing=PREPARED,
    )
    return write("onnx", source, tmp_path_factory.mktemp("onnx"))


@pytest.mark.slow
def test_a_file_runs_with_the_default_providers_and_names_what_it_takes(pruned: nn.Module, file: Path) -> None:
    import onnxruntime

    session = onnxruntime.InferenceSession(file)
    (taken,), (given,) = session.get_inputs(), session.get_outputs()
    assert (taken.name, taken.shape, given.name, given.shape) == ("x", ["batch", 3, 32, 32], "output", ["batch", 4])
    image = torch.randn(3, 3, 32, 32)
    (found,) = session.run(["output"], {"x": image.numpy()})
    with torch.no_grad():
        torch.testing.assert_close(torch.from_numpy(found), pruned(image), rtol=1e-4, atol=1e-5)
    metadata = session.get_modelmeta().custom_metadata_map
    assert json.loads(metadata["classes"]) == ["a", "b", "c", "d"]
    assert metadata["task"] == "classification"
    assert json.loads(metadata["preprocessing"])["shorter_side"] == 36
    assert FORMAT.interface(file).as_dict() == json.loads(metadata["prunekit"])
    assert FORMAT.interface(file).preprocessing == PREPARED


@pytest.mark.slow
def test_a_graph_is_simplified_and_has_no_paths_of_this_machine(file: Path) -> None:
    onnx.checker.check_model(file, full_check=True)
    graph = onnx.load(file).graph
    kinds = {node.op_type for node in graph.node}
    assert "BatchNormalization" not in kinds
    assert not kinds & {"Identity", "Dropout", "Constant"}
    assert str(Path.cwd()).encode() not in file.read_bytes()
    assert any("layer2.0" in (scopes_of(node) or ()) for node in graph.node)


@pytest.mark.slow
@pytest.mark.parametrize("broken", ["layer2.0.conv2", "linear"])
def test_the_first_module_that_differs_is_named(broken: str, pruned: nn.Module, file: Path, tmp_path: Path) -> None:
    example = (torch.randn(2, 3, 32, 32),)
    expected: dict[str, torch.Tensor] = {}
    for path, module in pruned.named_modules():
        module.register_forward_hook(lambda _module, _inputs, out, path=path: expected.update({path: out.clone()}))
    with torch.no_grad():
        pruned(*example)
    for module in pruned.modules():
        module._forward_hooks.clear()
    assert FORMAT.parts(file, example, expected) == ""
    model = onnx.load(file)
    (weight,) = (one for one in model.graph.initializer if one.name == f"{broken}.weight")
    array = onnx.numpy_helper.to_array(weight).copy()
    array[0] += 1
    weight.CopyFrom(onnx.numpy_helper.from_array(array, weight.name))
    onnx.save(model, tmp_path / "broken.onnx")
    named = FORMAT.parts(tmp_path / "broken.onnx", example, expected)
    assert named.split(" (by ")[0] in (broken, broken.replace("conv2", "bn2"))  # a norm that is folded into it
    assert module_ends(model.graph)["layer2.0"]


@pytest.mark.slow
def test_an_opset_is_chosen(tmp_path: Path) -> None:
    model, example = Convolutions().eval(), (torch.randn(2, 3, 20, 20),)
    file = write("onnx", source_of(model, example, options=ExportOptions(opset=18)), tmp_path)
    assert [(one.domain, one.version) for one in onnx.load(file).opset_import] == [("", 18)]
    require_same(model, FORMAT.open(file), of_size(example, 5))
    for opset in (11, 99):
        with pytest.raises(UsageError, match=rf"opset: expected 18 to \d+, .* got {opset}"):
            FORMAT.write(source_of(model, example, options=ExportOptions(opset=opset)), tmp_path / "other.onnx")


@pytest.mark.slow
def test_half_stores_weights_in_float16_and_computes_in_float32(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, example = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4)).eval(), (torch.randn(2, 64),)
    with torch.no_grad():
        model[2].weight[0, 0] = 1e6  # beyond float16
    file = write("onnx", source_of(model, example, options=ExportOptions(half=True)), tmp_path)
    kinds = {one.name: one.data_type for one in onnx.load(file).graph.initializer}
    assert kinds["0.weight.half"] == onnx.TensorProto.FLOAT16
    assert kinds["2.weight"] == onnx.TensorProto.FLOAT
    run = FORMAT.open(file)
    require_same(model, run, example, 1e-3)
    with torch.no_grad():
        for one in (model[0].weight, model[0].bias, model[2].bias):
            one.copy_(one.half())
    require_same(model, run, example)


@pytest.mark.slow
def test_weights_beyond_the_formats_limit_are_in_a_file_that_moves_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.onnx._internal.exporter._onnx_program._LARGE_MODEL_THRESHOLD", 1000)
    model, example = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4)).eval(), (torch.randn(2, 64),)
    file = write("onnx", source_of(model, example), tmp_path)
    assert sorted(one.name for one in file.parent.iterdir()) == ["model.onnx", "model.onnx.data"]
    assert file.stat().st_size < 10_000
    require_same(model, FORMAT.open(file), of_size(example, 5))
    assert FORMAT.interface(file).inputs[0].name == "input"
    (file.parent / "model.onnx.data").unlink()
    with pytest.raises(ArtifactError, match=r"model\.onnx: external data of .* expected a file, and there is none"):
        FORMAT.open(file)


def test_a_file_of_others_has_the_interface_of_its_graph(tmp_path: Path) -> None:
    helper, kinds = onnx.helper, onnx.TensorProto
    graph = helper.make_graph(
        [
            helper.make_node("MatMul", ["images", "w"], ["scores"]),
            helper.make_node("Cast", ["ids"], ["same"], to=kinds.INT64),
        ],
        "made_elsewhere",
        [
            helper.make_tensor_value_info("images", kinds.FLOAT, ["N", 3]),
            helper.make_tensor_value_info("ids", kinds.INT32, [None, 2]),
        ],
        [
            helper.make_tensor_value_info("scores", kinds.FLOAT, ["N", 2]),
            helper.make_tensor_value_info("same", kinds.INT64, [None, 2]),
        ],
        [onnx.numpy_helper.from_array(np.ones((3, 2), np.float32), "w")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    onnx.save(model, tmp_path / "other.onnx")
    interface = FORMAT.interface(tmp_path / "other.onnx")
    assert [str(spec) for spec in interface.inputs] == ["images: float32 (N, 3)", "ids: int32 (ids_0, 2)"]
    assert [str(spec) for spec in interface.outputs] == ["scores: float32 (N, 2)", "same: int64 (same_0, 2)"]
    assert (interface.task, interface.classes, interface.preprocessing) == (None, (), None)
    run = FORMAT.open(tmp_path / "other.onnx")
    scores, same = run((torch.ones(4, 3), torch.ones(5, 2, dtype=torch.int64)))  # int64 becomes what it takes
    assert scores.tolist() == [[3, 3]] * 4
    assert same.dtype == torch.int64
    with pytest.raises(UsageError, match=r"inputs: expected images: float32 \(N, 3\), ids: .*; got 1 tensors"):
        run((torch.ones(4, 3),))
    with pytest.raises(RunError, match="ONNX Runtime cannot run it"):
        run((torch.ones(4, 7), torch.ones(5, 2)))
    onnx.helper.set_model_props(model, {"prunekit": "{"})
    onnx.save(model, tmp_path / "damaged.onnx")
    with pytest.raises(ArtifactError, match=r"damaged\.onnx:1:2: expected the interface as JSON"):
        FORMAT.interface(tmp_path / "damaged.onnx")
