"""What can be known of a command's words is told before torch is imported."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from prunekit.cli import cli
from prunekit.errors import UsageError
from prunekit.models import names
from prunekit.models.zoo import zoo_names

NO_MODEL = "expected a recipe, a model folder, or the name of a torchvision or CIFAR model"
NO_FOLDER = "run: expected a recipe (.yaml) or a model folder, which holds a prunekit.json; did you mean run/model?"
MISTAKES = {
    "export resnet18 --to tflite": "got 'tflite'; did you mean 'litert'",
    "export resnet81": "did you mean 'resnet8' or 'resnet18'",
    "export resnet18 --to tensorrt": "export to tensorrt needs tensorrt, not installed here",
    "evaluate run": NO_FOLDER,
    "evaluate nowhere/model": f"'nowhere/model': {NO_MODEL}; there is no such file, folder or model",
    "predict resnet18 photo.jpg": "resnet18: expected trained weights, but they are random; give --weights",
    "predict run photo.jpg": NO_FOLDER,
    "predict damaged photo.jpg": "damaged/prunekit.json:1:2: expected JSON, but: Expecting property name",
    "predict run/model nowhere.jpg": "nowhere.jpg: expected an image file, and there is none",
    "predict run/model nowhere.npz": "nowhere.npz: expected a file of inputs, and there is none",
    "predict nowhere.onnx photo.jpg": "nowhere.onnx: expected an exported file, and there is none",
    "inspect --model nett.py:Net --input-shape 1x4": "nett.py: there is no such file",
    "inspect --model net.py:Nut --input-shape 1x4": "there is no function or class 'Nut' here; did you mean 'Net'?",
    "inspect net.py:Net": "give your own model as --model file.py:factory",
    "inspect --zoo cifar resnet34": "there is no model 'resnet34' in cifar; it is in model.zoo=torchvision",
    "bench resnet18 run": NO_FOLDER,
    "bench resnet18 --device cpu,gpu": "--device: expected auto, cpu, cuda, cuda:n or mps, got 'gpu'",
    "bench resnet18 --runtime onxruntime": "did you mean 'onnxruntime'?",
    "explain run": NO_FOLDER,
    "explain run/model --dense resnet81": "did you mean 'resnet8' or 'resnet18'",
    "inspect run": NO_FOLDER,
    "inspect nowhere": f"'nowhere': {NO_MODEL}",
    "sensitivity past": "it cannot be read: Is a directory; did you mean past/recipe.yaml?",
    "calibrate resnt34": "did you mean 'resnet34'",
    "sensitivity resnet34 --model net.py:Nut": "did you mean 'Net'?",
    "profile resnet34 model.name=resnet43": "there is no model 'resnet43' in torchvision",
    "finetune resnet34 prune.budget.macs=50": "expected a number above 0 and of at most 1, or null, got 50",
    "finetune resnet34 data.source=imagefolder data.root=nowhere": "nowhere does not exist; expected a folder with",
    "finetune resnet34 model.weights=nowhere.pth": "nowhere.pth: there is no such file of weights",
    "finetune resnet34 --data net.py:dat": "there is no function or class 'dat' here; did you mean 'data'?",
    "finetune resnet34 --task clasification": "did you mean 'text_classification'",
    "finetune resnet34 latency.runtimes=[tensorrt]": "runtime 'tensorrt' needs tensorrt, not installed here",
    "finetune resnet34 export=[onnx,tensorrt]": "export 'tensorrt' needs tensorrt, not installed here",
    "finetune resnet34 --resume nowhere": "nowhere: expected the folder of a run",
    "prune resnet34 model.zoo=own model.name=x": "model.zoo is 'own' and --model was not given",
    "report nowhere": "nowhere: expected the folder of a run",
    "init --model resnt18 --data digits mine.yaml": "expected a model of torchvision or cifar, or file.py:factory",
    "init --model resnet18 --data nowhere mine.yaml": "there is no such file or folder; expected digits",
    "init --model net.py:Nut --data digits mine.yaml": "did you mean 'Net'?",
    "recipe show resnt34": "did you mean 'resnet34'",
}
"""Command lines with a mistake, each with a part of what is said of it."""
SCRIPT = """
import json, shlex, sys
from click.testing import CliRunner
from prunekit.cli import cli
rows = {}
for line in json.load(sys.stdin):
    result = CliRunner().invoke(cli, shlex.split(line))
    rows[line] = (result.exit_code, result.output, [name for name in ("torch", "numpy") if name in sys.modules])
print(json.dumps(rows))
"""


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, str, list[str]]]:
    """Exit code, output and heavy packages that were imported, of each command line, all in one new process."""
    folder = tmp_path_factory.mktemp("mistakes")
    (folder / "run" / "model").mkdir(parents=True)
    (folder / "damaged").mkdir()
    (folder / "past").mkdir()
    (folder / "damaged" / "prunekit.json").write_text("{", encoding="utf-8")
    for file in ("run/status.json", "run/model/prunekit.json", "photo.jpg", "past/recipe.yaml"):
        (folder / file).write_text("{}", encoding="utf-8")
    (folder / "net.py").write_text("class Net: ...\ndef data(): ...\n", encoding="utf-8")
    command = [sys.executable, "-c", SCRIPT]
    done = subprocess.run(
        command, cwd=folder, input=json.dumps([*MISTAKES]), capture_output=True, text=True, check=True
    )
    found: dict[str, tuple[int, str, list[str]]] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("line", MISTAKES)
def test_a_mistake_is_told_before_torch_is_imported(line: str, answers: dict[str, tuple[int, str, list[str]]]) -> None:
    code, output, imported = answers[line]
    damaged = "damaged" in line or "an exported file" in MISTAKES[line]
    assert (code, imported) == (1 if damaged else 2, []), output
    assert MISTAKES[line] in output
    assert "Traceback" not in output


def test_names_in_the_source_of_torchvision_are_those_that_it_registers() -> None:
    import torchvision

    listed = torchvision.models.list_models
    assert names.torchvision_names() == (*listed(module=torchvision.models),)
    assert names.torchvision_names("detection") == (*listed(module=torchvision.models.detection),)
    assert zoo_names() == names.bare_names("torchvision")


def test_without_its_source_torchvision_itself_says_what_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    known = names.torchvision_names("detection")
    monkeypatch.setattr(names, "package_folders", lambda package: [])
    assert names.torchvision_names.__wrapped__("detection") == known


@pytest.mark.parametrize(
    ("line", "function"),
    [
        ("calibrate resnet34 export=[tensorrt] latency.runtimes=[tensorrt]", "stages.calibration_stage.calibrate"),
        ("sensitivity resnet34 export=[tensorrt] latency.runtimes=[tensorrt]", "analyses.sensitivity.analyze"),
        ("profile resnet34 export=[tensorrt] latency.runtimes=[tensorrt]", "analyses.profile.profile_job"),
        ("finetune resnet34 export=[tensorrt] --dry-run", "dry_run.dry_run"),
    ],
)
def test_what_writes_no_file_needs_no_package_of_its_format(
    line: str, function: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A recipe for a machine with TensorRT is looked into on any other one."""

    def reached(*_: Any, **__: Any) -> None:
        raise UsageError("reached")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(f"prunekit.jobs.{function}", reached)
    result = CliRunner().invoke(cli, line.split())
    assert result.output == "prunekit: error: reached\n"


def test_a_path_is_no_name_of_a_zoo(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "small").mkdir()
    result = CliRunner().invoke(cli, ["inspect", "small", "--zoo", "cifar"])
    assert "--zoo cifar goes with the name of a model, got small" in result.output
