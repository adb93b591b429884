"""`prunekit explain` on model folders, with good and bad input."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result

import prunekit
from prunekit.cli import cli
from prunekit.models.zoo import build_model
from prunekit.utils.files import with_checksum

CODE = """
from torch import nn


def net():
    print("chatter")
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.Flatten(), nn.Linear(128, 2))


def other():
    return nn.Linear(5, 5)
"""


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["explain", *arguments])


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that says how its model is built, `zoo`, and one that does not, `own`."""
    root = tmp_path_factory.mktemp("explain")
    (root / "own.py").write_text(CODE)
    namespace: dict[str, object] = {}
    exec(CODE, namespace)
    settings = prunekit.ModelSettings("resnet20", "cifar")
    torch.manual_seed(0)
    for name, model, build in (
        ("zoo", build_model(settings, num_classes=None), settings),
        ("own", namespace["net"](), None),  # type: ignore[operator]
    ):
        size = 32 if build else 8
        found = prunekit.prune(model, (torch.randn(1, 3, size, size),), channels=0.5)
        prunekit.save(found.model, root / name, found.plan, build=build)
    return root


@pytest.fixture
def here(folders: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(folders)
    return folders


QUICK = ("--repeats", "5", "--device", "cpu")


@pytest.mark.slow
def test_a_folder_is_explained_as_text_and_as_files(here: Path) -> None:
    done = run("zoo", *QUICK, "--output", "out/deep")
    assert done.exit_code == 0, done.output
    assert done.stdout.startswith("zoo on cpu, batch 1, 1 thread: ")
    payload = json.loads((here / "out" / "deep" / "explain.json").read_text())
    page = (here / "out" / "deep" / "explain.html").read_text()
    assert "Why is it not faster?" in page
    stable = not payload["doubts"]  # the machine that tests run on may be busy
    assert ("the ideal 2.88×, the ratio of MACs" in done.stdout) is stable
    assert ("The 15 slowest of" in done.stdout) is stable
    assert ("Causes, each measured" in done.stdout or "No cause was found" in done.stdout) is stable
    assert "measuring: fewer threads" in done.stderr
    assert payload["macs_ratio"] > 2.8
    assert len(payload["rows"]) > 15


@pytest.mark.slow
def test_own_code_builds_the_dense_model(here: Path) -> None:
    done = run("own", "--model", "own.py:net", *QUICK, "--batch", "2", "--json")
    assert done.exit_code == 0, done.output
    payload = json.loads(done.stdout)
    assert "chatter" in done.stderr
    assert (payload["batch"], payload["pruned"], payload["dense"]) == (2, "own", "its dense model")
    assert {row["module"] for row in payload["rows"] if row["operator"] == "convolution"} == {"0", "2"}
    assert isinstance(payload["causes"], list)


@pytest.mark.slow
def test_any_model_against_any_other(here: Path) -> None:
    done = run("resnet20", "--dense", "zoo", *QUICK, "--json")
    assert done.exit_code == 0, done.output
    payload = json.loads(done.stdout)
    assert (payload["pruned"], payload["dense"]) == ("resnet20", "zoo")
    assert payload["macs_ratio"] < 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "expected a pruned model: prunekit explain FOLDER"),
        (("resnet20",), "resnet20: expected a model folder, which says what it was pruned from, or --dense MODEL"),
        (("own",), "was built by its owner's code; give that as --model file.py:factory"),
        (("nowhere",), "expected a recipe, a model folder"),
        ((".",), "expected a recipe (.yaml) or a model folder"),
        (("zoo", "own"), "expected one model, got 2"),
        (("zoo", "--dense", "restnet20"), "did you mean 'resnet20'"),
        (("zoo", "--repeats", "4"), "--repeats"),
        (("zoo", "--batch", "0"), "--batch"),
        (("zoo", "prune.round_to=8"), "changes a recipe, and no recipe was given"),
        (("zoo", "--device", "cuda:99"), "device 'cuda:99' was asked for, but this machine"),
        (("zoo", "--output", "own.py"), "own.py"),
        (("own", "--model", "own.py:other"), "does not belong to this dense model"),
        (("zoo", "--input-shape", "1x1x32x32"), "does not run on float32 (1, 1, 32, 32)"),
    ],
)
def test_bad_input_is_one_message(here: Path, arguments: tuple[str, ...], message: str) -> None:
    done = run(*arguments)
    assert done.exit_code == (1 if "does not belong" in message else 2), done.output
    assert done.stdout == ""
    assert message in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_a_damaged_folder(here: Path, tmp_path: Path) -> None:
    manifest = json.loads((here / "zoo" / "prunekit.json").read_text())
    (tmp_path / "prunekit.json").write_text(json.dumps(with_checksum(manifest)))
    done = run(str(tmp_path))
    assert done.exit_code == 1
    assert "the model folder is incomplete" in done.stderr
    manifest["example"] = {}
    (here / "unknown").mkdir()
    (here / "unknown" / "prunekit.json").write_text(json.dumps(with_checksum(manifest)))
    (here / "unknown" / "model.safetensors").write_bytes((here / "zoo" / "model.safetensors").read_bytes())
    done = run("unknown")
    assert done.exit_code == 1
    assert "expected a list of shapes such as [1, 3, 224, 224]" in done.stderr
    assert run("unknown", "--input-shape", "1x3x32x32", *QUICK).exit_code == 0
