"""Programs of unknown origin are looked through for code before torch loads them."""

from __future__ import annotations

import io
import json
import os
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torchvision  # registers operators that read and write files
from click.testing import CliRunner
from exporting import Convolutions, source_of, write
from torch import Tensor, nn
from torch.nn import functional

import prunekit as pk
from prunekit.backends.backend import FORMATS
from prunekit.backends.files.export_source import ExportOptions
from prunekit.backends.files.exported_model import open_exported
from prunekit.backends.files.program import tracing
from prunekit.cli import cli
from prunekit.errors import ArtifactError, RunError

FORMAT = FORMATS.get("pt2")


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    options = ExportOptions(dynamic={"image": {2: "height", 3: "width"}})
    return write(
        "pt2", source_of(Convolutions(), (torch.randn(2, 3, 20, 20),), options=options), tmp_path_factory.mktemp("made")
    )


def changed(file: Path, target: Path, change: Callable[[str, bytes], bytes | None], **more: bytes) -> Path:
    """A copy with other files in it."""
    with zipfile.ZipFile(file) as old, zipfile.ZipFile(target, "w") as new:
        for name in old.namelist():
            data = change(name.partition("/")[2], old.read(name))
            if data is not None:
                new.writestr(name, data)
        for name, data in more.items():
            new.writestr(f"{old.namelist()[0].partition('/')[0]}/{name}", data)
    return target


class Running:
    """Runs when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.marker),)


def in_program(edit: Callable[[dict[str, Any]], None]) -> Callable[[str, bytes], bytes]:
    def change(name: str, data: bytes) -> bytes:
        if name != "models/model.json":
            return data
        plain = json.loads(data)
        edit(plain)
        return json.dumps(plain).encode()

    return change


@pytest.mark.slow
def test_a_file_that_was_written_here_has_no_code_and_none_of_the_users_data(program: Path) -> None:
    with zipfile.ZipFile(program) as file:
        (samples,) = (name for name in file.namelist() if "sample_inputs" in name)
        (positional, _) = torch.load(io.BytesIO(file.read(samples)), weights_only=True)
        assert positional[0].shape == (2, 3, 20, 20)
        assert not positional[0].any()
        text = file.read(next(name for name in file.namelist() if name.endswith("models/model.json"))).decode()
    assert str(Path.cwd()) not in text
    assert "stack_trace" not in text
    assert FORMAT.open(program)((torch.zeros(3, 3, 16, 16),))[0].shape == (3, 4)


WAYS = [
    "samples", "expression", "guard", "target", "operator", "containers", "enumeration", "name", "input", "parameter",
    "constant", "keyword", "subgraph", "argument",
]  # fmt: skip


@pytest.mark.parametrize("how", WAYS)
def test_code_in_a_program_is_refused_and_does_not_run(how: str, program: Path, tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    code = f"__import__('os').mkdir({str(marker)!r})"

    def edit(plain: dict[str, Any]) -> None:
        graph = plain["graph_module"]["graph"]
        if how == "expression":
            (image,) = (value for name, value in graph["tensor_values"].items() if name == "image")
            image["sizes"][0]["as_expr"]["expr_str"] = code
        elif how == "guard":
            plain["guards_code"] = [code]
        elif how == "target":
            graph["nodes"][0]["target"] = "torch.os.system"
        elif how == "operator":
            graph["nodes"][0]["inputs"][0]["arg"] = {"as_operator": "torch.hub.load"}
        elif how == "containers":
            call = plain["graph_module"]["module_call_graph"][0]["signature"]
            call["in_spec"] = call["in_spec"].replace("builtins.dict", "collections.defaultdict")
        elif how == "enumeration":  # in JSON that is text in JSON, where a letter may be written by its number
            enumeration = '{"__en\\u0075m__": true, "fqn": "this:x", "name": "y"}'
            leaf = {"type": "builtins.dict", "context": enumeration, "children_spec": []}
            plain["graph_module"]["module_call_graph"][0]["signature"]["in_spec"] = json.dumps([1, leaf])
        elif how == "argument":
            graph["inputs"].append({"as_string": f"' or {code} or '"})
        elif how == "subgraph":
            nested = {"as_graph": {"name": f"{code}; a", "graph": {**graph, "nodes": []}}}
            graph["nodes"][0]["inputs"][0]["arg"] = nested
        elif how == "keyword":
            graph["nodes"][0]["inputs"][0]["name"] = f"a={code}, b"
        elif how == "parameter":
            spec = plain["graph_module"]["signature"]["input_specs"][0]["parameter"]
            spec["parameter_name"] = f'first.0.a", {code}) or ("'
        elif how == "constant":
            spec = plain["graph_module"]["signature"]["input_specs"][0]
            spec["constant_input"] = {"name": "a", "value": {"as_string": f"' or {code} or '"}}

    def change(name: str, data: bytes) -> bytes:
        if how == "samples" and name.startswith("data/sample_inputs/"):
            buffer = io.BytesIO()
            torch.save(Running(marker), buffer)
            return buffer.getvalue()
        if how in ("name", "input") and name == "models/model.json":
            known, new = ('"relu"', f"relu = {code}; relu") if how == "name" else ('"image"', f"image={code}, more")
            assert known.encode() in data
            return data.replace(known.encode(), json.dumps(new).encode())
        return in_program(edit)(name, data)

    file = changed(program, tmp_path / "changed.pt2", change)
    with pytest.raises(ArtifactError, match=r"could run code that is in the file: .* by torch.export.load"):
        FORMAT.open(file)
    assert not marker.exists()
    with pytest.raises(ArtifactError, match="--allow-code"):
        open_exported(file).run()


def test_keys_of_examples_are_no_code(program: Path, tmp_path: Path) -> None:
    """Torch writes them into messages of assertions, which are code."""

    def change(name: str, data: bytes) -> bytes:
        if not name.startswith("data/sample_inputs/"):
            return data
        buffer = io.BytesIO()
        torch.save(((), {'image" + print(1) + "': torch.zeros(2, 3, 20, 20)}), buffer)
        return buffer.getvalue()

    with pytest.raises(ArtifactError, match="is a pickle of more than tensors"):
        FORMAT.open(changed(program, tmp_path / "changed.pt2", change))


def test_pickled_weights_and_files_of_other_kinds_are_refused(program: Path, tmp_path: Path) -> None:
    def pickled(name: str, data: bytes) -> bytes:
        return (
            data.replace(b'"use_pickle": false', b'"use_pickle": true')
            if name.endswith("weights_config.json")
            else data
        )

    with pytest.raises(ArtifactError, match="names pickled tensors"):
        FORMAT.open(changed(program, tmp_path / "pickled.pt2", pickled))
    marker = tmp_path / "marker"
    others = {
        "data/constants/opaque_obj_0": pickle.dumps(Running(marker)),
        "data/weights/model.pt": b"",
        "data/aotinductor/model/a.so": b"",
    }
    for index, (name, data) in enumerate(others.items()):
        with pytest.raises(ArtifactError, match=name):
            FORMAT.open(changed(program, tmp_path / f"other{index}.pt2", lambda _, data: data, **{name: data}))
    with zipfile.ZipFile(tmp_path / "old.pt2", "w") as old:
        old.writestr("version", "8.1")
        old.writestr("serialized_exported_program.json", "{}")
    with pytest.raises(ArtifactError, match=r"expected a \.pt2 file"):
        FORMAT.open(tmp_path / "old.pt2")
    assert not marker.exists()


@pytest.mark.parametrize("version", [b"9" * 40, b"x", b""], ids=["long", "letter", "empty"])
def test_a_version_that_is_no_number_is_damage(program: Path, tmp_path: Path, version: bytes) -> None:
    file = changed(program, tmp_path / "version.pt2", lambda name, data: version if name.endswith("version") else data)
    with pytest.raises(ArtifactError, match=r"expected a \.pt2 file"):
        FORMAT.open(file)


def test_the_interface_of_a_file_of_others_is_that_of_its_program(program: Path, tmp_path: Path) -> None:
    file = changed(program, tmp_path / "others.pt2", lambda name, data: None if name.startswith("extra/") else data)
    interface = FORMAT.interface(file)
    assert [(spec.name, spec.dtype, len(spec.shape)) for spec in interface.inputs] == [("image", "float32", 4)]
    assert [(spec.name, spec.shape[1:]) for spec in interface.outputs] == [("output", (4,))]
    assert interface.task is None
    assert FORMAT.open(file)((torch.zeros(3, 3, 16, 16),))[0].shape == (3, 4)


class Writing(nn.Module):
    """Writes what is in a buffer to a file."""

    def __init__(self, place: Path) -> None:
        super().__init__()
        self.place, self.linear = str(place), nn.Linear(4, 2)
        self.register_buffer("content", torch.tensor(list(b"any bytes"), dtype=torch.uint8))

    def forward(self, x: Tensor) -> Tensor:
        torch.ops.image.write_file(self.place, self.content)
        out: Tensor = self.linear(x)
        return out


def test_operators_that_touch_files_run_only_where_it_is_allowed(tmp_path: Path) -> None:
    place = tmp_path / "written"
    with torch.library._scoped_library("image", "FRAGMENT") as library:  # the operator is not made for tracing
        torch.library.register_fake("image::write_file", lambda name, data: torch.empty(0), lib=library)
        program = torch.export.export(Writing(place).eval(), (torch.zeros(1, 4),), strict=False)
    file = tmp_path / "writing.pt2"
    torch.export.save(program, file)
    place.unlink(missing_ok=True)
    said = r"writing\.pt2: .*'torch\.ops\.image\.write_file\.default': image is no namespace.* add --allow-code"
    with pytest.raises(ArtifactError, match=said):
        pk.predict(file, torch.zeros(1, 4))
    with pytest.raises(ArtifactError, match="allow_code=True"):
        open_exported(file)(torch.zeros(1, 4))
    assert pk.interface(file).inputs[0].shape == (1, 4), "no code is run for it"
    np.save(tmp_path / "x.npy", np.zeros((1, 4), np.float32))
    refused = CliRunner().invoke(cli, ["predict", str(file), str(tmp_path / "x.npy")])
    assert (refused.exit_code, "image.write_file" in refused.stderr) == (1, True)
    assert not place.exists()
    assert CliRunner().invoke(cli, ["predict", str(file), str(tmp_path / "x.npy"), "--allow-code"]).exit_code == 0
    place.unlink()
    assert pk.predict(file, torch.zeros(1, 4), allow_code=True).outputs["output"].shape == (1, 2)
    assert place.read_bytes() == b"any bytes"


class Usual(nn.Module):
    """Operators with modes, branches, other contexts, and a computed size."""

    mask: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.norm = nn.LSTM(3, 3, batch_first=True), nn.LayerNorm(3)
        self.register_buffer("mask", torch.ones(3, 3).tril().bool())

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        size = x.shape[0] * x.shape[1]
        with torch.no_grad():
            doubled = functional.gelu(x * 2, approximate="tanh")
        with torch.autocast("cpu", dtype=torch.bfloat16):
            half = doubled @ doubled.transpose(1, 2)
        branch = torch.cond(x.sum() > 0, lambda one: one.relu(), lambda one: one.sin(), (x,))
        modes = torch.div(x, 2, rounding_mode="floor") + torch.einsum("bij,bkj->bik", x, x)[..., :3]
        attention = functional.scaled_dot_product_attention(x, x, x, attn_mask=self.mask)
        return half.float(), branch, modes, attention, self.norm(self.lstm(x)[0]), x.reshape(size, -1) / size**2


@pytest.mark.slow
@pytest.mark.parametrize("decomposed", [False, True])
def test_usual_programs_hold_nothing_to_refuse(decomposed: bool, tmp_path: Path) -> None:
    model, example = Usual().eval(), torch.randn(2, 3, 3)
    axes = ({0: torch.export.Dim("batch", min=1, max=64)},)
    with tracing():
        program = torch.export.export(model, (example,), dynamic_shapes=axes, strict=False)
        torch.export.save(program.run_decompositions() if decomposed else program, tmp_path / "usual.pt2")
    run = FORMAT.open(tmp_path / "usual.pt2")
    for samples in (2, 5):
        x = torch.randn(samples, 3, 3)
        for found, wanted in zip(run((x,)), model(x), strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-2, atol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["resnet18", "mobilenet_v3_small", "squeezenet1_1"])
def test_networks_of_the_zoo_hold_nothing_to_refuse(name: str, tmp_path: Path) -> None:
    model = torchvision.models.get_model(name, weights=None).eval()
    with tracing():
        program = torch.export.export(model, (torch.randn(2, 3, 64, 64),), strict=False)
        torch.export.save(program, tmp_path / "net.pt2")
    assert FORMAT.code_in(tmp_path / "net.pt2") == ""


def test_numbers_of_a_program_do_not_grow_without_end(program: Path, tmp_path: Path) -> None:
    """Sizes that are squared 40 times have a million million digits."""

    def edit(plain: dict[str, Any]) -> None:
        graph = plain["graph_module"]["graph"]
        (image,) = (value for name, value in graph["tensor_values"].items() if name == "image")
        first = {"arg": {"as_tensor": {"name": "image"}}, "name": "self", "kind": 1}
        axis = {"arg": {"as_int": 2}, "name": "dim", "kind": 1}
        graph["nodes"].append(node("squared_0", "torch.ops.aten.sym_size.int", [first, axis]))
        for index in range(40):
            argument = {"arg": {"as_sym_int": {"as_name": f"squared_{index}"}}, "kind": 1}
            both = [{**argument, "name": "a"}, {**argument, "name": "b"}]
            graph["nodes"].append(node(f"squared_{index + 1}", "_operator.mul", both))
        named = [f"squared_{index}" for index in range(41)]
        graph["sym_int_values"] |= dict.fromkeys(named, image["sizes"][2])

    def node(name: str, target: str, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        outputs = [{"as_sym_int": {"as_name": name}}]
        return {"target": target, "inputs": inputs, "outputs": outputs, "metadata": {}, "name": name}

    run = FORMAT.open(changed(program, tmp_path / "squares.pt2", in_program(edit)))
    with pytest.raises(RunError, match=r"cannot run: OverflowError: it computes a number of about \d+ bits"):
        run((torch.zeros(2, 3, 20, 20),))


FULL = Path("/dev/full")


@pytest.mark.skipif(not FULL.exists(), reason="there is no device that is full here")
def test_a_full_disk_is_an_error() -> None:
    """And does not end the process, as torch's writer does where a path is given."""
    source = source_of(nn.Sequential(nn.Linear(100, 100)), (torch.zeros(2, 100),))
    with pytest.raises(OSError, match="No space left"):
        FORMAT.write(source, FULL)
