"""Quantization of ONNX files in ONNX Runtime itself: what is in int8, what stays, and the limit of what it costs."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from quantized_nets import Array, Encoder, Residual, agreement, drawn, made
from torch import nn

from prunekit.backends.backend import FORMATS
from prunekit.backends.files.onnx_program import export_onnx
from prunekit.backends.int8.quantizer import relative_error
from prunekit.backends.onnx_runtime import KERNEL, open_session
from prunekit.errors import ArtifactError, DataError, NonFiniteError, RunError
from prunekit.settings.deployment import QuantizeSettings

onnx = pytest.importorskip("onnx")
SHAPE = (3, 10, 10)
quantize_onnx = FORMATS.get("onnx").quantize
CALIBRATION = [{"x": drawn(16, SHAPE, seed)} for seed in (1, 2)]


def run(file: Path, samples: Array) -> Array:
    session = open_session(file, 1)
    name = session.get_inputs()[0].name
    found = [session.run(None, {name: samples[at : at + 16]})[0] for at in range(0, len(samples), 16)]
    return np.concatenate(found)


def operators(file: Path, samples: Array) -> Counter[str]:
    """Operators that ONNX Runtime executed, by its profiler."""
    session = open_session(file, 1, profile=file.with_suffix(""))
    session.run(None, {"x": samples})
    written = Path(session.end_profiling())
    events = json.loads(written.read_text())
    written.unlink()
    return Counter(event["args"]["op_name"] for event in events if event["name"].endswith(KERNEL))


def score_of(model: nn.Module) -> Callable[[Path], float]:
    return agreement(model, drawn(320, SHAPE, 3), run)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export_onnx(made(Residual), torch.zeros(16, *SHAPE), tmp_path_factory.mktemp("plain") / "plain.onnx")


@pytest.fixture(scope="module")
def outlier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = made(partial(Residual, True))
    return export_onnx(model, torch.zeros(16, *SHAPE), tmp_path_factory.mktemp("outlier") / "outlier.onnx")


@pytest.mark.slow
def test_layers_run_in_int8_with_names_and_metadata_of_the_file(plain: Path, tmp_path: Path) -> None:
    model = onnx.load(plain)
    onnx.helper.set_model_props(model, {"prunekit": "{}", "classes": "[1]"})
    onnx.save(model, tmp_path / "float.onnx")
    found = quantize_onnx(tmp_path / "float.onnx", tmp_path / "int8.onnx", CALIBRATION, score=score_of(made(Residual)))
    assert found.path == tmp_path / "int8.onnx"
    assert set(found.layers) == {"stem", "first", "second", "", "head"}
    assert not found.float_layers
    assert not found.sensitivity
    assert found.drop is not None
    assert found.drop <= 1.0
    assert 0 < found.error < 0.1
    made_file = onnx.load(found.path)
    assert {one.key: one.value for one in made_file.metadata_props} == {"prunekit": "{}", "classes": "[1]"}
    assert [one.name for one in made_file.graph.input] == ["x"]
    assert sorted(one.name for one in tmp_path.iterdir()) == ["float.onnx", "int8.onnx"], "nothing is left beside it"
    kinds = Counter(node.op_type for node in made_file.graph.node)
    assert kinds["Conv"] == 3
    weights = {one.name: one for one in made_file.graph.initializer}
    per_channel = [one for name, one in weights.items() if name.endswith("weight_scale") and list(one.dims) == [8]]
    assert len(per_channel) == 3
    assert {row["computes"] for row in found.rows()} == {"int8"}
    ran = operators(found.path, CALIBRATION[0]["x"])
    assert ran["QLinearConv"] == 3
    assert ran["QLinearAdd"] == 1
    assert ran["QGemm"] == 1
    assert not {"Conv", "FusedConv", "Gemm"} & set(ran)


@pytest.mark.slow
def test_a_batch_of_any_size_stays_so(plain: Path, tmp_path: Path) -> None:
    model = onnx.load(plain)
    for value in (*model.graph.input, *model.graph.output, *model.graph.value_info):
        value.type.tensor_type.shape.dim[0].dim_param = "batch"
    onnx.save(model, tmp_path / "float.onnx")
    calibration = [{"x": drawn(count, SHAPE, count)} for count in (20, 43, 1)]
    found = quantize_onnx(tmp_path / "float.onnx", tmp_path / "int8.onnx", calibration)
    session = open_session(found.path, 1)
    for count in (1, 7):
        samples = drawn(count, SHAPE, 9)
        with torch.no_grad():
            wanted = made(Residual)(torch.from_numpy(samples)).numpy()
        assert relative_error([wanted], session.run(None, {"x": samples})) < 0.1


@pytest.mark.slow
def test_layers_that_cost_more_than_allowed_are_returned_to_float(outlier: Path, tmp_path: Path) -> None:
    score = score_of(made(partial(Residual, True)))
    free = quantize_onnx(
        outlier, tmp_path / "free.onnx", CALIBRATION, settings=QuantizeSettings(max_drop=None), score=score
    )
    assert free.drop is not None
    assert free.drop > 20
    lines: list[str] = []
    settings = QuantizeSettings(max_drop=2.0)
    found = quantize_onnx(
        outlier, tmp_path / "int8.onnx", CALIBRATION, settings=settings, score=score, log=lines.append
    )
    assert found.drop is not None
    assert found.drop <= 2.0
    assert score(found.path) == found.score
    assert {one.layer for one in found.sensitivity[:2]} == {"first", "second"}
    assert set(found.float_layers) == {"first", "second"}
    assert set(found.layers) == {"stem", "", "head"}
    assert all(
        "returned to float: alone in int8 it changes the output by" in why for why in found.float_layers.values()
    )
    floats = {node.input[1] for node in onnx.load(found.path).graph.node if node.op_type == "Conv"}
    assert {"first.weight", "second.weight"} <= floats
    assert "stem.weight" not in floats
    assert any("layers returned to float" in line for line in lines)


@pytest.mark.slow
def test_a_limit_that_no_choice_of_layers_meets_names_them(outlier: Path, tmp_path: Path) -> None:
    def score(file: Path) -> float:
        return 90.0 - sum(node.op_type == "QuantizeLinear" for node in onnx.load(file).graph.node)

    with pytest.raises(
        RunError,
        match=r"lose at most 0.5 points .*quantize.max_drop.* are lost with all layers in int8, and [2-9].*first",
    ) as raised:
        quantize_onnx(
            outlier, tmp_path / "int8.onnx", CALIBRATION, settings=QuantizeSettings(max_drop=0.5), score=score
        )
    assert raised.value.exit_code == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_norms_and_attention_of_a_transformer_stay_in_float(tmp_path: Path) -> None:
    model = made(Encoder)
    file = export_onnx(model, torch.zeros(16, 7, 6), tmp_path / "float.onnx")
    found = quantize_onnx(file, tmp_path / "int8.onnx", [{"tokens": drawn(16, (7, 6))}])
    assert {"embed", "up", "down", "head"} <= set(found.layers)
    assert found.float_layers["norm"] == "LayerNormalization is computed in float"
    assert "attention" in found.float_layers
    assert found.error < 0.1
    kinds = Counter(node.op_type for node in onnx.load(found.path).graph.node)
    assert kinds["QuantizeLinear"] >= 4


@pytest.mark.slow
def test_a_file_of_another_exporter_is_named_by_its_nodes(plain: Path, tmp_path: Path) -> None:
    model = onnx.load(plain)
    for node in model.graph.node:
        del node.metadata_props[:]
        node.name = ""
    onnx.save(model, tmp_path / "float.onnx")
    found = quantize_onnx(tmp_path / "float.onnx", tmp_path / "int8.onnx", CALIBRATION)
    assert sum(name.startswith("Conv") for name in found.layers) == 3


def test_bad_calibration_data_are_refused(plain: Path, tmp_path: Path) -> None:
    good = CALIBRATION[0]["x"]
    for batches, said in (
        ([], "expected at least one batch, got none"),
        ([{"images": good}], "calibration batch 0 for plain.onnx: expected arrays named x, got images"),
        ([{"x": good}, {"x": good[:3]}], r"batch 1 for plain.onnx: x: expected shape \(16, 3, 10, 10\), got \(3, 3,"),
        ([{"x": np.full_like(good, np.nan)}], "x: expected finite numbers, got NaN or Inf"),
    ):
        with pytest.raises(DataError, match=said):
            quantize_onnx(plain, tmp_path / "int8.onnx", batches)
    (tmp_path / "text.onnx").write_text("no model")
    with pytest.raises(ArtifactError, match=r"text.onnx: expected an ONNX file"):
        quantize_onnx(tmp_path / "text.onnx", tmp_path / "int8.onnx", CALIBRATION)
    assert [one.name for one in tmp_path.iterdir()] == ["text.onnx"]


@pytest.mark.slow
def test_what_has_no_layers_or_no_finite_outputs_is_refused(tmp_path: Path) -> None:
    class Half(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x / 2

    file = export_onnx(Half(), torch.zeros(2, 4), tmp_path / "half.onnx")
    with pytest.raises(RunError, match=r"half.onnx: expected layers that can be quantized"):
        quantize_onnx(file, tmp_path / "int8.onnx", [{"x": drawn(2, (4,))}])
    broken = nn.Linear(4, 2)
    with torch.no_grad():
        broken.weight[0, 0] = float("nan")
    file = export_onnx(broken, torch.zeros(2, 4), tmp_path / "broken.onnx")
    with pytest.raises(NonFiniteError, match=r"broken.onnx: expected finite outputs"):
        quantize_onnx(file, tmp_path / "int8.onnx", [{"input": drawn(2, (4,))}])
