"""Weights are read from files of a model's own folder alone: not from elsewhere, links, devices, or memory."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from exporting import source_of, write
from torch import nn

from prunekit.backends.backend import FORMATS
from prunekit.backends.files.exported_model import open_exported
from prunekit.errors import ArtifactError

onnx = pytest.importorskip("onnx")
SECRET = np.ones(4, np.float32)


def external(location: str, offset: int = 0) -> Any:
    """A tensor whose numbers are in another file."""
    tensor = onnx.numpy_helper.from_array(SECRET.reshape(2, 2), "w")
    tensor.ClearField("raw_data")
    tensor.data_location = onnx.TensorProto.EXTERNAL
    for key, value in (("location", location), ("offset", str(offset)), ("length", "16")):
        tensor.external_data.add(key=key, value=value)
    return tensor


def saved(path: Path, nodes: list[Any], tensors: list[Any]) -> Path:
    helper = onnx.helper
    x, y = (helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ["N", 2]) for name in "xy")
    graph = helper.make_graph(nodes, "graph", [x], [y], tensors)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(model.SerializeToString())
    return path


def as_initializer(path: Path, tensor: Any) -> Path:
    return saved(path, [onnx.helper.make_node("MatMul", ["x", "w"], ["y"])], [tensor])


def as_constant(path: Path, tensor: Any) -> Path:
    constant = onnx.helper.make_node("Constant", [], ["w"], value=tensor)
    return saved(path, [constant, onnx.helper.make_node("MatMul", ["x", "w"], ["y"])], [])


def in_a_branch(path: Path, tensor: Any) -> Path:
    helper = onnx.helper
    result = helper.make_tensor_value_info("o", onnx.TensorProto.FLOAT, ["N", 2])
    branch = helper.make_graph([helper.make_node("MatMul", ["x", "w"], ["o"])], "branch", [], [result], [tensor])
    condition = onnx.numpy_helper.from_array(np.array(True), "condition")
    node = helper.make_node("If", ["condition"], ["y"], then_branch=branch, else_branch=branch)
    return saved(path, [node], [condition])


@pytest.mark.parametrize("place", [as_initializer, as_constant, in_a_branch])
def test_weights_elsewhere_are_refused_wherever_a_tensor_is(place: Callable[[Path, Any], Path], tmp_path: Path) -> None:
    (tmp_path / "secret.bin").write_bytes(SECRET.tobytes())
    folder = tmp_path / "inside"
    folder.mkdir()
    (folder / "link.bin").symlink_to(tmp_path / "secret.bin")
    (folder / "sub").symlink_to(tmp_path)
    for location in ("../secret.bin", str(tmp_path / "secret.bin"), "link.bin", "sub/secret.bin", "", "."):
        path = place(folder / "net.onnx", external(location))
        with pytest.raises(ArtifactError, match=r"net\.onnx: external data of 'w' is at .*: expected "):
            open_exported(path)
    (folder / "own.bin").write_bytes(SECRET.tobytes())
    assert open_exported(place(folder / "net.onnx", external("own.bin"))).interface.inputs[0].name == "x"


def test_memory_devices_and_pipes_are_no_files(tmp_path: Path) -> None:
    """ONNX Runtime and OpenVINO take an address for a file by this name: OpenVINO, one of a file on disk too."""
    address = external("*/_ORT_MEM_ADDR_/*", SECRET.ctypes.data)
    with pytest.raises(ArtifactError, match="expected a file, and there is none"):
        open_exported(as_initializer(tmp_path / "net.onnx", address))
    os.mkfifo(tmp_path / "pipe.bin")
    with pytest.raises(ArtifactError, match="expected a file, and there is none"):
        open_exported(as_initializer(tmp_path / "net.onnx", external("pipe.bin")))


def test_a_cache_of_links_into_one_folder_is_read(tmp_path: Path) -> None:
    """As the cache of the Hugging Face Hub is laid out."""
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshot"
    snapshot.mkdir()
    as_initializer(blobs / "a1", external("own.bin"))
    (blobs / "b2").write_bytes(SECRET.tobytes())
    (snapshot / "net.onnx").symlink_to(blobs / "a1")
    (snapshot / "own.bin").symlink_to(blobs / "b2")
    assert open_exported(snapshot / "net.onnx").interface.inputs[0].name == "x"


@pytest.mark.slow
def test_openvino_reads_networks_with_weights_of_their_own(tmp_path: Path) -> None:
    if problem := FORMATS.get("openvino").missing():
        pytest.skip(problem)
    file = write("openvino", source_of(nn.Linear(4, 2), (torch.zeros(2, 4),)), tmp_path)
    weights = file.with_suffix(".bin")
    elsewhere = tmp_path / "elsewhere.bin"
    weights.rename(elsewhere)
    weights.symlink_to(elsewhere)
    with pytest.raises(ArtifactError, match=r"model\.xml: the file of its weights is at 'model\.bin': expected"):
        open_exported(file)
    weights.unlink()
    elsewhere.rename(weights)
    assert open_exported(file)(torch.zeros(1, 4)).shape == (1, 2)
    other = as_initializer(file.with_name("onnx.xml"), external("own.bin"))
    with pytest.raises(ArtifactError, match="it is no XML of a network"):
        open_exported(other)
    unknown = file.with_name("unknown.xml")
    unknown.write_text(file.read_text().replace('type="MatMul" version="opset1"', 'type="Mine" version="extension"'))
    weights.with_name("unknown.bin").write_bytes(weights.read_bytes())
    with pytest.raises(ArtifactError, match="Mine"):
        open_exported(unknown)
