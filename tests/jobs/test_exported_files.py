"""Exported files where models are evaluated, timed, inspected and asked, and where they make no sense."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner, Result
from exported_files import CLASSES, FORMS, Two, classifier, exported, photos
from PIL import Image

import prunekit as pk
from prunekit.backends.files.exported_model import open_exported
from prunekit.cli import cli
from prunekit.errors import UsageError
from prunekit.utils.inputs import Keywords

SUFFIX = {"onnx": ".onnx", "openvino": ".xml", "pt2": ".pt2"}


def run(*arguments: object) -> Result:
    return CliRunner().invoke(cli, [str(one) for one in arguments])


def json_of(*arguments: object, allowed: tuple[int, ...] = (0,)) -> dict[str, Any]:
    result = run(*arguments, "--json")
    assert result.exit_code in allowed, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder, the files of its model in every format, a wider net's ONNX file, and images in class folders."""
    place = tmp_path_factory.mktemp("files")
    for form in FORMS:
        for file in photos(form, place / form).parent.iterdir():
            shutil.copy(file, place)
    photos("onnx", place / "wide", 16).rename(place / "wide.onnx")
    pk.save(pk.prune(classifier(), torch.randn(1, 3, 8, 8), channels=0.5), place / "model")
    code = "import torch\nfrom exported_files import Photos\ndef net():\n    return Photos(), torch.zeros(1, 3, 8, 8)\n"
    (place / "own.py").write_text(code)
    generator = np.random.default_rng(0)
    for name in CLASSES:
        (place / "images" / name).mkdir(parents=True)
        for index in range(5):
            pixels = generator.integers(0, 256, (12, 10 + index, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(place / "images" / name / f"{index}.png")
    return place


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_a_file_is_evaluated_and_asked_like_its_model(form: str, place: Path) -> None:
    path, model = place / f"net{SUFFIX[form]}", classifier()
    known = pk.interface(path)
    assert known.preprocessing is not None
    images = sorted((place / "images").rglob("*.png"))
    with torch.no_grad():
        scores = model(known.preprocessing(images))
    labels = torch.tensor([CLASSES.index(path.parent.name) for path in images])
    found = json_of("evaluate", path, "--data", place / "images")
    assert found["correct"] == int((scores.argmax(1) == labels).sum())
    assert (found["n_test"], found["params"], found["macs"]) == (15, None, None)
    assert found["file_bytes"] > 1000
    top = json_of("predict", path, place / "images", "--top", "1", "--batch", "4")["top"]
    assert [row["label"] for row in top] == scores.argmax(1).tolist()
    torch.testing.assert_close(
        torch.tensor([row["probability"] for row in top]), scores.softmax(1).amax(1), rtol=1e-4, atol=1e-5
    )
    python = pk.predict(path, images, top=1)
    assert [row["class"] for row in python.rows()] == [row["class"] for row in top]
    assert "a file of" in run("evaluate", path, "--data", place / "images").stdout


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_a_file_shows_its_inputs_outputs_and_size(form: str, place: Path) -> None:
    path = place / f"net{SUFFIX[form]}"
    found = json_of("inspect", path)
    assert found["inputs"] == [{"name": "input", "dtype": "float32", "shape": ["batch", 3, 8, 8]}]
    assert found["outputs"] == [{"name": "output", "dtype": "float32", "shape": ["batch", 3]}]
    assert (found["task"], found["classes"], found["format"]) == ("image_classification", list(CLASSES), form)
    assert found["bytes"] == sum(found["files"].values()) == open_exported(path).file_bytes
    text = run("inspect", path).stdout
    assert "input: float32 (batch, 3, 8, 8)" in text
    assert "3: cat, dog, ox" in text


@pytest.mark.slow
def test_files_are_timed_in_their_own_runtimes_beside_a_model(place: Path) -> None:
    names = ["net.onnx", "net.xml", "net.pt2", "wide.onnx"]
    arguments = ["--model", f"{place / 'own.py'}:net", place / "model", *(place / name for name in names)]
    found = json_of("bench", *arguments, "--batch", "1,3", "--repeats", "5")
    expected = ["eager", "eager", "onnxruntime", "openvino", "pt2", "onnxruntime"]
    assert [(row["runtime"], row["batch"]) for row in found["latency"]] == [
        (runtime, batch) for batch in (1, 3) for runtime in expected
    ]
    assert [row["runtime"] for row in found["speedup"]] == 2 * expected[1:]
    assert found["failures"] == []
    assert all(row["device"] == "cpu" for row in found["latency"])
    assert found["models"][str(place / "net.onnx")]["file_bytes"] == (place / "net.onnx").stat().st_size
    assert any("speedups over net are of the runtimes too" in note for note in found["notes"])


@pytest.mark.slow
def test_a_runtime_that_is_asked_for_takes_files_as_they_are(place: Path) -> None:
    found = json_of("bench", place / "net.onnx", place / "wide.onnx", "--runtime", "onnxruntime,openvino",
                    "--batch", "2", "--repeats", "5")  # fmt: skip
    assert [row["runtime"] for row in found["latency"]] == ["onnxruntime"] * 2 + ["openvino"] * 2
    assert not any("of the runtimes too" in note for note in found["notes"])
    both = json_of("bench", place / "net.xml", place / "net.onnx", "--runtime", "openvino", "--repeats", "5")
    assert {row["runtime"] for row in both["latency"]} == {"openvino"}


@pytest.mark.slow
def test_files_are_timed_from_python_too(place: Path) -> None:
    found = pk.bench({"eager": classifier(), "file": place / "net.onnx"}, torch.randn(1, 3, 8, 8), repeats=5)
    assert [row["runtime"] for row in found.rows()] == ["eager", "onnxruntime"]
    assert found.rows()[1]["speedup"] == found.speedup[0]["median"]
    with pytest.raises(UsageError, match=r"runtime 'compile' does not take a file of onnx"):
        pk.bench({"file": place / "net.onnx"}, torch.randn(1, 3, 8, 8), runtimes="compile", repeats=5)


@pytest.mark.slow
def test_inputs_by_name_are_read_timed_and_saved(tmp_path: Path) -> None:
    left, right = torch.randn(2, 4), torch.randn(2, 4)
    model = Two().eval()
    path = exported(model, (Keywords(left=left, right=right),), "onnx", tmp_path / "two")
    np.savez(tmp_path / "inputs.npz", left=left.numpy(), right=right.double().numpy())
    found = json_of("predict", path, tmp_path / "inputs.npz", "--output", tmp_path / "out")
    assert [row["output"] for row in found["outputs"]] == ["logits", "logits", "hidden", "hidden"]
    assert found["outputs"][0]["values"] == pytest.approx(model(left, right)["logits"][0].tolist(), abs=1e-5)
    assert (tmp_path / "out" / "outputs.safetensors").is_file()
    timed = json_of("bench", path, "--batch", "1", "--repeats", "5")
    assert [row["runtime"] for row in timed["latency"]] == ["onnxruntime"]


@pytest.mark.slow
def test_what_makes_no_sense_says_what_does(place: Path) -> None:
    (place / "bad.onnx").write_bytes(b"\0no file")
    file, data = place / "net.onnx", place / "images"
    for arguments, told in (
        (("explain", file, "--dense", "resnet18"), "a file of onnx has no modules to time one by one: give the model"),
        (("inspect", file, "--layers"), "has no modules to show layers of"),
        (("report", file), "expected the folder of a run"),
        (("finetune", file), "expected a recipe (a YAML file), but it is no text"),
        (("bench", file, "--dtype", "bf16"), "the dtype that it was exported in: leave out --dtype"),
        (("bench", file, "--memory-format", "channels_last"), "leave out --memory-format"),
        (("bench", file, "--runtime", "compile"), "leave out --runtime, which times it in its own, or onnxruntime or"),
        (("bench", place / "net.pt2", "--runtime", "onnxruntime"), "does not take a file of pt2"),
        (("bench", file, "--weights", "w.pt"), "--weights goes with a zoo's name or --model"),
        (("evaluate", file), "expected images to test on"),
        (("evaluate", place / "gone.onnx", "--data", data), "gone.onnx: expected an exported file, and there is none"),
        (("bench", place / "bad.onnx"), "bad.onnx: expected an ONNX file"),
    ):
        result = run(*arguments)
        assert result.exit_code in (1, 2), result.output
        assert told in result.stderr, result.output
        assert result.stdout == ""
