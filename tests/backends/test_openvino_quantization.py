"""Quantization by NNCF, in OpenVINO itself."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from quantized_nets import Array, Encoder, Residual, agreement, drawn, made

from prunekit.backends.backend import FORMATS
from prunekit.backends.files.export_source import ExportSource
from prunekit.backends.files.onnx_program import NodeModules, export_onnx
from prunekit.backends.int8.openvino_quantizer import MODULES, OpenvinoQuantizer
from prunekit.backends.int8.quantizer import quantized_file, relative_error
from prunekit.backends.openvino import OpenVino
from prunekit.errors import ArtifactError, DataError, RunError, UsageError
from prunekit.models.interface import interface_of
from prunekit.settings.deployment import QuantizeSettings

openvino = pytest.importorskip("openvino")
SHAPE = (3, 10, 10)
quantize_openvino = FORMATS.get("openvino").quantize
CALIBRATION = [{"x": drawn(16, SHAPE, seed)} for seed in (1, 2)]


def run(file: Path, samples: Array) -> Array:
    compiled = openvino.Core().compile_model(file, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    return np.concatenate([compiled(samples[at : at + 16])[0] for at in range(0, len(samples), 16)])


@pytest.fixture(scope="module")
def outlier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("nncf")
    model = made(partial(Residual, True))
    return export_onnx(model, torch.zeros(16, *SHAPE), tmp_path_factory.mktemp("outlier") / "outlier.onnx")


@pytest.mark.slow
def test_layers_that_cost_more_than_allowed_are_returned_to_float(outlier: Path, tmp_path: Path) -> None:
    score = agreement(made(partial(Residual, True)), drawn(320, SHAPE, 3), run)
    free = quantize_openvino(
        outlier, tmp_path / "free.xml", CALIBRATION, settings=QuantizeSettings(max_drop=None), score=score
    )
    assert free.drop is not None
    assert free.drop > 20
    assert set(free.layers) == {"stem", "first", "second", "head"}
    settings = QuantizeSettings(max_drop=2.0)
    found = quantize_openvino(outlier, tmp_path / "int8.xml", CALIBRATION, settings=settings, score=score)
    assert found.drop is not None
    assert found.drop <= 2.0
    assert score(found.path) == found.score
    assert found.float_layers
    assert set(found.float_layers) <= {"first", "second"}
    assert found.sensitivity[0].layer in found.float_layers
    assert sorted(one.name for one in tmp_path.iterdir()) == ["free.bin", "free.xml", "int8.bin", "int8.xml"]


@pytest.mark.slow
def test_layers_of_an_exported_file_have_the_names_of_modules(tmp_path: Path) -> None:
    model, example = made(Residual), (torch.randn(2, *SHAPE),)
    file = tmp_path / "model.xml"
    FORMATS.get("openvino").write(ExportSource(model, example, interface_of(model, example)), file)
    quantizer = OpenvinoQuantizer(file, tmp_path, CALIBRATION, 16)
    assert set(quantizer.layers) == {"stem", "first", "second", "head"}


@pytest.mark.slow
def test_a_file_of_openvino_keeps_names_any_batch_and_its_information(outlier: Path, tmp_path: Path) -> None:
    model = openvino.Core().read_model(outlier)
    model.reshape({"x": [-1, *SHAPE]})
    model.set_rt_info('{"task": "none"}', "prunekit")
    model.set_rt_info(json.dumps(NodeModules(outlier).of_names), MODULES)
    openvino.save_model(model, tmp_path / "float.xml", compress_to_fp16=False)
    calibration = [{"x": drawn(count, SHAPE, count)} for count in (20, 43, 1)]
    settings = QuantizeSettings(max_drop=None)

    def quantizer(folder: Path) -> OpenvinoQuantizer:
        return OpenvinoQuantizer(tmp_path / "float.xml", folder, calibration, settings.images)

    found = quantized_file(quantizer, tmp_path / "int8.xml", settings, None, lambda text: None)
    assert set(found.layers) == {"stem", "first", "second", "head"}
    written = openvino.Core().read_model(found.path)
    assert written.get_rt_info()["prunekit"].value == '{"task": "none"}'
    assert written.inputs[0].get_any_name() == "x"
    assert written.inputs[0].get_partial_shape()[0].is_dynamic
    assert run(found.path, drawn(3, SHAPE)).shape == (3, 5)


@pytest.mark.slow
def test_layers_of_groups_are_in_int8_too(tmp_path: Path) -> None:
    pytest.importorskip("nncf")
    model = made(
        lambda: torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU(), torch.nn.Conv2d(8, 8, 3, groups=8))
    )
    file = export_onnx(model, torch.zeros(16, *SHAPE), tmp_path / "float.onnx")
    found = quantize_openvino(file, tmp_path / "int8.xml", [{"input": CALIBRATION[0]["x"]}])
    assert found.layers == ("0", "2")
    assert not found.float_layers


@pytest.mark.slow
def test_a_transformer_keeps_its_norms_in_float(tmp_path: Path) -> None:
    pytest.importorskip("nncf")
    model, samples = made(Encoder), drawn(16, (7, 6))
    file = export_onnx(model, torch.zeros(16, 7, 6), tmp_path / "float.onnx")
    found = quantize_openvino(file, tmp_path / "int8.xml", [{"tokens": samples}])
    assert {"embed", "up", "down"} <= set(found.layers)
    assert found.float_layers["norm"] == "MVN is computed in float"
    with torch.no_grad():
        assert relative_error([model(torch.from_numpy(samples)).numpy()], [run(found.path, samples)]) < 0.1


@pytest.mark.slow
def test_what_cannot_be_quantized_is_refused(outlier: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match=r"int8.onnx: expected a path that ends with .xml"):
        quantize_openvino(outlier, tmp_path / "int8.onnx", CALIBRATION)
    with pytest.raises(DataError, match="expected arrays named x, got y"):
        quantize_openvino(outlier, tmp_path / "int8.xml", [{"y": CALIBRATION[0]["x"]}])
    (tmp_path / "text.xml").write_text("no model")
    with pytest.raises(ArtifactError, match=r"text.xml: expected a model that OpenVINO reads"):
        quantize_openvino(tmp_path / "text.xml", tmp_path / "int8.xml", CALIBRATION)
    file = export_onnx(torch.nn.ReLU(), torch.zeros(2, 4), tmp_path / "relu.onnx")
    with pytest.raises(RunError, match=r"relu.onnx: expected layers that can be quantized"):
        quantize_openvino(file, tmp_path / "int8.xml", [{"input": drawn(2, (4,))}])
    monkeypatch.setattr(OpenVino, "quantizer", "not_here")
    with pytest.raises(UsageError, match=r"int8 for openvino needs not_here, .*pip install 'prunekit\[int8\]'"):
        quantize_openvino(outlier, tmp_path / "int8.xml", CALIBRATION)
