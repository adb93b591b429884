"""An exported file as a module: the same outputs in every way of calling it, fixed batches, and files not to trust."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from exported_files import CLASSES, FEED, FORMS, Two, classifier, exported, photos
from torch import nn

import prunekit as pk
from prunekit.backends.backend import FORMATS
from prunekit.backends.files.exported_model import formats_of, is_exported, open_exported
from prunekit.backends.session import Setting
from prunekit.errors import ArtifactError, RunError, UsageError
from prunekit.measure.latency.timing_job import open_file
from prunekit.models.interface import TensorSpec
from prunekit.utils.inputs import Keywords


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_a_file_computes_what_its_model_does(form: str, tmp_path: Path) -> None:
    model, path = classifier(), photos(form, tmp_path)
    file = open_exported(path)
    for batch in (1, 2, 5):
        x = torch.randn(batch, 3, 8, 8)
        torch.testing.assert_close(file(x), model(x), rtol=1e-4, atol=1e-5)
    known = pk.interface(path)
    assert (known.task, known.classes, known.preprocessing) == ("image_classification", CLASSES, FEED)
    assert pk.interface(file) == known
    assert file.file_bytes == sum(one.stat().st_size for one in path.parent.iterdir())
    assert not list(file.parameters())
    x = torch.randn(2, 3, 8, 8)
    for again in (copy.deepcopy(file), pickle.loads(pickle.dumps(file))):
        assert torch.equal(again(x), file(x))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("form", "by_name"),
    [("onnx", ()), ("openvino", ("right",)), ("pt2", ()), ("pt2", ("right",)), ("pt2", ("left", "right"))],
)
def test_inputs_by_position_and_name(form: str, by_name: tuple[str, ...], tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Two().eval()
    given = {"left": torch.randn(2, 4), "right": torch.randn(2, 4)}
    positional = [tensor for name, tensor in given.items() if name not in by_name]
    named = [Keywords((name, given[name]) for name in by_name)] if by_name else []
    file = open_exported(exported(model, (*positional, *named), form, tmp_path / "two"))
    left, right = torch.randn(3, 4), torch.randn(3, 4)
    expected = model(left, right)
    for arguments, keywords in (
        ((left, right), {}),
        ((left,), {"right": right}),
        ((), {"right": right, "left": left}),
    ):
        found = file(*arguments, **keywords)
        torch.testing.assert_close(found["logits"], expected["logits"], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(found.hidden, expected["hidden"], rtol=1e-4, atol=1e-5)
    with pytest.raises((UsageError, RunError)):
        file(left)


def onnx_file(path: Path, location: str | None = None, batch: int | str = "N") -> Path:
    """An ONNX file of another program: x @ w, with the weight in another file if a location is given."""
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    weight = numpy_helper.from_array(np.full((2, 2), 3, np.float32), "w")
    if location is not None:
        weight.ClearField("raw_data")
        weight.data_location = TensorProto.EXTERNAL
        weight.external_data.add(key="location", value=location)
        weight.external_data.add(key="length", value="16")
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [batch, 2]) for name in ("x", "y")]
    node = helper.make_node("MatMul", ["x", "w"], ["y"])
    graph = helper.make_graph([node], "graph", values[:1], values[1:], [weight])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    onnx.save(model, path) if location is None else path.write_bytes(model.SerializeToString())
    return path


def test_a_file_of_another_program_is_fed_by_its_graph(tmp_path: Path) -> None:
    file = open_exported(onnx_file(tmp_path / "other.onnx"))
    assert file.interface.inputs == (TensorSpec("x", "float32", ("N", 2)),)
    assert file.interface.task is None
    assert torch.equal(file(torch.ones(3, 2))["y"], torch.full((3, 2), 6.0))


def test_batches_of_a_fixed_size_are_filled_up(tmp_path: Path) -> None:
    file = open_exported(onnx_file(tmp_path / "fixed.onnx", batch=4))
    assert file.fixed_batch == 4
    for count in (1, 4, 7, 8):
        x = torch.randn(count, 2)
        torch.testing.assert_close(file(x)["y"], x @ torch.full((2, 2), 3.0))


@pytest.mark.parametrize("location", ["../secret.bin", "{root}/secret.bin", "sub/../../secret.bin", "link.bin"])
@pytest.mark.parametrize("runtime", ["onnxruntime", "openvino"])
def test_weights_of_a_file_stay_in_its_folder(location: str, runtime: str, tmp_path: Path) -> None:
    (tmp_path / "secret.bin").write_bytes(np.ones(4, np.float32).tobytes())
    path = onnx_file(tmp_path / "inside" / "net.onnx", location.format(root=tmp_path))
    (tmp_path / "inside" / "sub").mkdir()
    (tmp_path / "inside" / "link.bin").symlink_to(tmp_path / "secret.bin")
    with pytest.raises(ArtifactError, match=r"net\.onnx: external data of 'w' is at .*: expected the model's own"):
        open_exported(path)(torch.ones(1, 2))
    with pytest.raises(Exception, match=r"(?i)secret\.bin|external data"):
        open_file(path, FORMATS.get("onnx"), (torch.ones(1, 2),), Setting(runtime, "cpu", 1, 1))
    (tmp_path / "inside" / "mine.bin").write_bytes(np.ones(4, np.float32).tobytes())
    fine = onnx_file(tmp_path / "inside" / "fine.onnx", "mine.bin")
    session = open_file(fine, FORMATS.get("onnx"), (torch.ones(1, 2),), Setting(runtime, "cpu", 1, 1))
    assert torch.equal(session.tensors(session.run())[0], torch.full((1, 2), 2.0))


class Loud(nn.Module):
    """Touches a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path

    def __reduce__(self) -> Any:
        return (Path.touch, (self.path,))


@pytest.mark.parametrize("suffix", [".onnx", ".xml", ".pt2"])
def test_a_pickle_is_no_exported_file_and_does_not_run(suffix: str, tmp_path: Path) -> None:
    torch.save(Loud(tmp_path / "ran"), tmp_path / f"net{suffix}")
    with pytest.raises(ArtifactError, match=rf"net\{suffix}: expected"):
        open_exported(tmp_path / f"net{suffix}")(torch.ones(1, 2))
    assert not (tmp_path / "ran").exists()


def test_paths_are_told_apart_by_their_suffix(tmp_path: Path) -> None:
    assert formats_of(Path("a.onnx")) == ["onnx"]
    assert formats_of(Path("a.xml")) == ["openvino"]
    assert formats_of(Path("a.pt2")) == ["pt2"]
    assert formats_of(Path("a.aoti.pt2")) == ["aoti"]
    assert formats_of(Path("model")) == []
    (tmp_path / "folder.onnx").mkdir()
    assert not is_exported(tmp_path / "folder.onnx")
    with pytest.raises(ArtifactError, match=r"gone\.onnx: expected an exported file, and there is none"):
        open_exported(tmp_path / "gone.onnx")


@pytest.mark.slow
def test_an_interface_of_more_outputs_than_the_network_has_is_damage(tmp_path: Path) -> None:
    path = photos("openvino", tmp_path)
    outputs = "&quot;outputs&quot;: ["
    one = "{&quot;name&quot;: &quot;x&quot;, &quot;dtype&quot;: &quot;float32&quot;, &quot;shape&quot;: [1]}, "
    assert outputs in path.read_text()
    path.write_text(path.read_text().replace(outputs, outputs + one))
    with pytest.raises(ArtifactError, match="its interface has 2 outputs, its network 1; the file is damaged"):
        open_exported(path)(torch.randn(1, 3, 8, 8))
