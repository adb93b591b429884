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

import pytest
import torch
from exporting import Convolutions, source_of, write

from prunekit.errors import ArtifactError
from prunekit.formats.format import FORMATS, ExportOptions
from prunekit.formats.pt2_archive import is_arithmetic

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


@pytest.mark.parametrize("how", ["samples", "expression", "guard", "target", "operator", "containers"])
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

    def change(name: str, data: bytes) -> bytes:
        if how == "samples" and name.startswith("data/sample_inputs/"):
            buffer = io.BytesIO()
            torch.save(Running(marker), buffer)
            return buffer.getvalue()
        return in_program(edit)(name, data)

    file = changed(program, tmp_path / "changed.pt2", change)
    with pytest.raises(ArtifactError, match=r"could run code that is in the file: .* by torch.export.load"):
        FORMAT.open(file)
    assert not marker.exists()


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


def test_the_interface_of_a_file_of_others_is_that_of_its_program(program: Path, tmp_path: Path) -> None:
    file = changed(program, tmp_path / "others.pt2", lambda name, data: None if name.startswith("extra/") else data)
    interface = FORMAT.interface(file)
    assert [(spec.name, spec.dtype, len(spec.shape)) for spec in interface.inputs] == [("image", "float32", 4)]
    assert [(spec.name, spec.shape[1:]) for spec in interface.outputs] == [("output", (4,))]
    assert interface.task is None
    assert FORMAT.open(file)((torch.zeros(3, 3, 16, 16),))[0].shape == (3, 4)


ARITHMETIC = [
    "Symbol('s0', positive=True, integer=True)", "2*Symbol('s0') + 1", "FloorDiv(Symbol('s1'), 2)", "Max(1, 3)",
    "L['x'].size()[0] % 2 == 0", "L['a'][0].size()[1] != L['b'].stride()[0]", "torch.sym_max(1, 2) <= 3",
]  # fmt: skip
CODE = [
    "Symbol(__import__('os'))", "().__class__", "Integer('1 and print(1)')", "eval('1')", "[1 for _ in 'a']", "1 +",
    "L['x'].data_ptr()", "L['x'].__class__", "torch.load('x')", "lambda: 1", "Symbol('s0').sys", "f'{1}'", "'a' * 9",
    "L[print(1)]", "(yield)", "torch.sym_max.__globals__", "(lambda: 1)()", "L['x'].size(print(1))", "Symbol('a b')",
]  # fmt: skip


@pytest.mark.parametrize(("texts", "plain"), [(ARITHMETIC, True), (CODE, False)])
def test_arithmetic_is_told_from_code(texts: list[str], plain: bool) -> None:
    assert {text: is_arithmetic(text) for text in texts} == dict.fromkeys(texts, plain)
