"""Zeros in exported files: TensorRT is told of 2:4 weights, OpenVINO where its option does something."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from prunekit.backends.files.onnx_program import export_onnx
from prunekit.backends.int8.openvino_quantizer import SPARSE_RATE, openvino_core, sparse_options
from prunekit.backends.tensorrt import built_engine, sparse_notes, two_of_four_weights

STAND_IN = Path(__file__).parent.parent / "stand_ins" / "tensorrt.py"


def along_inputs(weight: Tensor) -> Tensor:
    """Return a weight with every second input set to 0."""
    result = weight.detach().clone()
    result[:, ::2] = 0
    return result


def file_of(path: Path, *nodes: tuple[str, Tensor, dict[str, int]]) -> Path:
    """Write an ONNX file of operators, each with a weight of its own."""
    onnx = pytest.importorskip("onnx")
    names = [f"w{index}" for index in range(len(nodes))]
    made = [
        onnx.helper.make_node(kind, ["x", name], [f"{name} y"], name=name, **given)
        for name, (kind, _, given) in zip(names, nodes, strict=True)
    ]
    weights = [
        onnx.numpy_helper.from_array(weight.contiguous().numpy(), name)
        for name, (_, weight, _) in zip(names, nodes, strict=True)
    ]
    onnx.save(onnx.helper.make_model(onnx.helper.make_graph(made, "graph", [], [], weights)), path)
    return path


def kernel(*, sparse: bool) -> Tensor:
    weight = torch.randn(8, 4, 3, 3)
    return along_inputs(weight) if sparse else weight


@pytest.fixture
def files(tmp_path: Path) -> dict[bool, Path]:
    return {
        sparse: file_of(tmp_path / f"{sparse}.onnx", ("Conv", kernel(sparse=sparse), {"group": 2}))
        for sparse in (True, False)
    }


@pytest.mark.parametrize(
    ("kind", "given", "transposed"), [("Gemm", {"transB": 1}, False), ("Gemm", {}, True), ("MatMul", {}, True)]
)
def test_weights_of_a_file_are_read_along_their_inputs(
    kind: str, given: dict[str, int], transposed: bool, tmp_path: Path
) -> None:
    right, wrong = along_inputs(torch.randn(8, 16)), along_inputs(torch.randn(16, 8)).t()  # (outputs, inputs)
    weights = [weight.t() if transposed else weight for weight in (right, wrong)]
    file = file_of(
        tmp_path / "file.onnx",
        *((kind, weight, given) for weight in weights),
        ("Conv", kernel(sparse=True), {"group": 2}),
        ("Conv", kernel(sparse=False), {}),
        ("Mul", right, {}),
        ("MatMul", torch.zeros(2, 8, 16), {}),
    )
    assert two_of_four_weights(file) == ("w0", "w2")


@pytest.mark.slow
def test_weights_of_an_exported_model_are_found(tmp_path: Path) -> None:
    pytest.importorskip("onnxscript")

    class Turned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(along_inputs(torch.randn(8, 32)))

        def forward(self, x: Tensor) -> Tensor:
            return x[None] @ self.weight.t()

    model = nn.Sequential(nn.Conv2d(4, 8, 3), nn.Flatten(), nn.Linear(32, 32), Turned(), nn.Linear(8, 8))
    for index in (0, 2):
        model[index].weight.data = along_inputs(model[index].weight)
    file = export_onnx(model, torch.randn(2, 4, 4, 4), tmp_path / "model.onnx")
    assert len(two_of_four_weights(file)) == 3


def test_an_engine_is_built_for_sparse_weights_where_there_are_any(
    files: dict[bool, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tensorrt", SimpleNamespace(**runpy.run_path(str(STAND_IN))))
    assert built_engine(files[True], None) == b"SPARSE_WEIGHTS TF32"
    assert built_engine(files[True], None, exact=True) == b"SPARSE_WEIGHTS"
    assert built_engine(files[False], None) == b"TF32"


def test_the_note_names_weights() -> None:
    assert sparse_notes(()) == []
    [note] = sparse_notes(("a", "b"))
    assert note.startswith("2 weights are 2:4 (a, b): the engine may use sparse tensor cores")


@pytest.mark.parametrize(("flags", "options"), [("avx2 amx_int8", True), ("avx2 avx512_vnni", False)])
def test_openvino_packs_weights_on_cpus_with_amx_alone(flags: str, options: bool, tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(f"flags : {flags}\n", encoding="utf-8")
    found = sparse_options(cpuinfo)
    assert found == ({"CPU_SPARSE_WEIGHTS_DECOMPRESSION_RATE": SPARSE_RATE} if options else {})


def test_openvino_knows_the_option() -> None:
    pytest.importorskip("openvino")
    import openvino
    import openvino.opset13 as operators

    x = operators.parameter([1, 4], openvino.Type.f32)
    model = openvino.Model([operators.relu(x)], [x])
    compiled = openvino_core().compile_model(model, "CPU", {"CPU_SPARSE_WEIGHTS_DECOMPRESSION_RATE": SPARSE_RATE})
    assert compiled.get_property("CPU_SPARSE_WEIGHTS_DECOMPRESSION_RATE") == SPARSE_RATE
