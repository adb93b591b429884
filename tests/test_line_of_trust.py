"""The line of trust: no text in any file leads to code, wherever it stands, and only what the user types does."""

from __future__ import annotations

import ast
import copy
import json
import shutil
import sys
import zipfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from exported_files import photos
from PIL import Image
from synthetic_run import write_run

import prunekit as pk
from prunekit.backends.backend import FORMATS
from prunekit.backends.files.export_source import ExportSource
from prunekit.backends.standalone import build_of
from prunekit.cli import cli
from prunekit.compaction.model_folder import folder_interface
from prunekit.errors import UsageError
from prunekit.known_names import CRITERIA, TASKS
from prunekit.models.zoo import build_model
from prunekit.settings.inputs import ModelSettings
from prunekit.tasks.task import get_task
from prunekit.utils.files import with_checksum
from prunekit.utils.user_code import from_file

NAMES = ("evil.py:found", "python:evil:found")
"""Text that runs code where the user types it."""


@pytest.fixture
def ran(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], bool]]:
    """Whether the code was run that lies where the names of the tests would find it."""
    (tmp_path / "evil.py").write_text("import pathlib\npathlib.Path(__file__).with_name('ran').touch()\nfound = None\n")
    (tmp_path / "p.png").write_bytes(b"")
    Image.new("RGB", (8, 8)).save(tmp_path / "p.png")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield lambda: (tmp_path / "ran").exists() or "evil" in sys.modules
    sys.modules.pop("evil", None)


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of every text, flag and null in nested JSON, of lists those in their first two entries."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from leaves(inner, (*path, key))
    elif isinstance(value, list):
        for index, inner in enumerate(value[:2]):
            yield from leaves(inner, (*path, index))
    elif isinstance(value, str | bool | None):
        yield path


def changed(value: Any, path: tuple[Any, ...], name: str) -> Iterator[Any]:
    """Yield the JSON with the name in the place of what is at a path, and in the place of its key."""
    *outer, last = path
    made = copy.deepcopy(value)
    inner = made
    for key in outer:
        inner = inner[key]
    inner[last] = name
    yield made
    if isinstance(last, str):
        made = copy.deepcopy(made)
        inner = made
        for key in outer:
            inner = inner[key]
        del inner[last]
        inner[name] = 0.5
        yield made


def command(*arguments: Any) -> None:
    CliRunner().invoke(cli, [str(argument) for argument in arguments], prog_name="prunekit")


def model_folder() -> Path:
    settings = ModelSettings("resnet8", "cifar", arguments={"num_classes": 3})
    torch.manual_seed(0)
    result = pk.prune(build_model(settings, num_classes=3).eval(), torch.randn(1, 3, 8, 8), macs=0.5)
    feed = pk.Preprocessing(height=8, width=8)
    classes = ["a", "b", "c"]
    return pk.save(result, "net", build=settings, preprocessing=feed, classes=classes, task="image_classification")


def used_folder(folder: Path) -> None:
    loaded = pk.load(folder)
    pk.predict(loaded, "p.png")
    str(pk.load_plan(folder))


def used_run(folder: Path) -> None:
    command("report", folder)


@pytest.mark.slow
@pytest.mark.parametrize("file", ["prunekit.json", "plan.json"])
def test_no_text_of_a_model_folder_runs_code(ran: Callable[[], bool], file: str) -> None:
    folder = model_folder()
    given = json.loads((folder / file).read_text())
    used_folder(folder)
    skipped = ("kept", "dense_shapes", "shapes", "stored", "sha256", "locks", "activations", "macs", "versions")
    for path in leaves({key: value for key, value in given.items() if key not in skipped}):
        for made in (made for name in NAMES for made in changed(given, path, name)):
            (folder / file).write_text(json.dumps(with_checksum(made)))  # whoever changes it can also write the sum
            with suppress(Exception):  # refused in whatever words: those are for other tests
                used_folder(folder)
            assert not ran(), f"{file}: {path}"


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_no_text_of_a_run_runs_code(ran: Callable[[], bool], tmp_path: Path, name: str) -> None:
    folder = write_run(tmp_path / "run", only=())
    for file in ("metrics.json", "status.json", "environment.json"):
        given = json.loads((folder / file).read_text())
        everywhere = copy.deepcopy(given)
        for path in list(leaves(given)):
            if isinstance(path[-1], str):
                (everywhere,) = list(changed(everywhere, path, name))[:1]
        (folder / file).write_text(json.dumps(everywhere))
        used_run(folder)
        (folder / file).write_text(json.dumps(given))
        assert not ran(), file
    keys = (
        "task",
        "prune.criterion",
        "prune.budget",
        "report.sections",
        "model.name",
        "finetune.optimizer",
        "data.name",
    )
    for key in keys:
        section, _, inner = key.partition(".")
        told = json.dumps(name) if not inner else json.dumps({inner: {name: 0.5} if inner == "budget" else name})
        (folder / "recipe.yaml").write_text(f"name: a\n{section}: {told}\n")
        used_run(folder)
        for job in ("finetune", "prune", "calibrate", "evaluate", "bench"):
            command(job, folder / "recipe.yaml")
        command("finetune", folder / "recipe.yaml", "--resume", folder)
        assert not ran(), key


@pytest.mark.slow
@pytest.mark.parametrize("form", ["onnx", "openvino", "pt2"])
def test_no_metadata_of_an_exported_file_runs_code(ran: Callable[[], bool], tmp_path: Path, form: str) -> None:
    path = photos(form, tmp_path / "given")
    for name in NAMES:
        shutil.copytree(tmp_path / "given", tmp_path / "changed", dirs_exist_ok=True)
        with_name(tmp_path / "changed" / path.name, b"image_classification", name.encode())
        with pytest.raises(UsageError, match=r"task: '.*evil.*' is code, and no file runs code that it names"):
            pk.predict(tmp_path / "changed" / path.name, "p.png")
        assert not ran()


def with_name(path: Path, old: bytes, new: bytes) -> None:
    """Put a name in the place of text in the metadata of an exported file."""
    if path.suffix == ".onnx":
        import onnx

        model = onnx.load(path)
        for entry in model.metadata_props:
            entry.value = entry.value.replace(old.decode(), new.decode())
        onnx.save(model, path)
    elif path.suffix == ".xml":
        path.write_bytes(path.read_bytes().replace(old, new))
    else:
        with zipfile.ZipFile(path) as archive:
            parts = {entry: archive.read(entry) for entry in archive.namelist()}
        with zipfile.ZipFile(path, "w") as archive:
            for entry, content in parts.items():
                archive.writestr(entry, content.replace(old, new) if "/extra/" in entry else content)


def test_a_name_from_a_file_reaches_no_code_even_where_the_user_may_name_it(ran: Callable[[], bool]) -> None:
    for name in NAMES:
        marked = from_file(name, "a.json: task")
        for registry in (TASKS, CRITERIA):
            with pytest.raises(UsageError, match=r"a\.json: task: '.*evil.*' is code, and no file runs code"):
                registry.get(marked)
        assert not ran()
    assert from_file("image_classification", "a.json: task") == "image_classification"
    assert get_task(from_file("image_classification", "a.json: task")).name == "image_classification"


def test_a_folder_says_how_its_task_is_named_by_the_user(ran: Callable[[], bool], tmp_path: Path) -> None:
    folder = model_folder()
    manifest = json.loads((folder / "prunekit.json").read_text())
    manifest["interface"]["task"] = NAMES[0]
    (folder / "prunekit.json").write_text(json.dumps(with_checksum(manifest)))
    loaded = pk.load(folder)
    with pytest.raises(UsageError, match=r"prunekit\.json: interface: task: .* name it yourself: --task NAME"):
        pk.predict(loaded, "p.png")
    assert not ran()
    (tmp_path / "mine.py").write_text("from prunekit.tasks.classification import IMAGE_CLASSIFICATION as found\n")
    assert pk.predict(loaded, "p.png", task="mine.py:found").probabilities is not None


def test_a_folder_names_no_code_for_its_exports(ran: Callable[[], bool], tmp_path: Path) -> None:
    folder = model_folder()
    model = pk.load(folder)
    manifest = json.loads((folder / "prunekit.json").read_text())
    for name in NAMES:
        own = {"name": name, "zoo": "own", "arguments": {}}
        (folder / "prunekit.json").write_text(json.dumps(with_checksum(manifest | {"build": own})))
        source = ExportSource(model, (torch.randn(1, 3, 8, 8),), folder_interface(folder), folder=folder)
        assert build_of(source) is None
        for form in ("standalone", "hub"):
            with suppress(Exception):
                FORMATS.get(form).write(source, tmp_path / form)
        assert not ran()


DOORS = {
    "__init__.py: __getattr__": "a table of its own",
    "channels/rules/__init__.py: ": "the modules of a folder of the package",
    "channels/rewrite/source_rewriter.py: _compiled": "the source of a model's own class",
    "data/user_data.py: load_own": "--data, typed",
    "backends/folders/builders.py: _own": "--model, typed; a manifest's build is of a zoo, see `build_of`",
    "backends/folders/bundled_source.py: importable_module": "the module of a class that is loaded",
    "backends/folders/bundled_source.py: _source": "the module of a class that is loaded",
    "backends/hub.py: _loaded": "--model, typed; a manifest's build is of a zoo, see `build_of`",
    "backends/standalone.py: imported": "the file that was just written",
    "jobs/run/job_subject.py: job_model": "--model, typed",
    "jobs/run/job_subject.py: job_optimizer": "--optimizer, typed",
    "jobs/run/dense_model.py: build_dense": "--model, typed",
    "jobs/run/dense_model.py: load_dense": "--model, typed",
    "jobs/run/subject_sources.py: _from_folder": "--model, typed",
    "jobs/run/subject_sources.py: _from_factory": "--model, typed",
    "jobs/finetune.py: RunResult.model": "the factory that the run was called with",
    "known_names.py: _registry.accepted": "a table of its own",
    "measure/latency/worker_process.py: WorkerProcess.ask": "the answer of a process of its own, in a private folder",
    "measure/latency/worker_process.py: _read": "the question of the process that started it, in a private folder",
    "measure/latency/worker_process.py: serve": "the question of the process that started it, in a private folder",
    "measure/device/measure.py: open_litert": "the runtime's own package, by constants",
    "measure/device/measure.py: require_runtime": "the runtimes that the script knows, by constants",
    "models/zoo.py: load_factory": "--model, typed",
    "models/zoo.py: load_with_example": "--model, typed",
    "utils/availability.py: import_of_extra": "constants of its callers: packages that an extra installs",
    "utils/registry.py: Registry.get": "the modules that register built-in objects",
    "utils/registry.py: Registry.reload": "`load_object`, which refuses what a file gave",
    "utils/user_code.py: run_factory": "`load_object`, which refuses what a file gave",
    "utils/user_code.py: load_object": "`load_object`, which refuses what a file gave",
}
"""Functions that import, unpickle or run what is no constant, and why no file's text gets there."""
RUNNING = {
    "import_module", "__import__", "load_object", "run_factory", "load_factory", "load_with_example", "exec_module",
    "run_path", "run_module", "resolve_name", "Unpickler", "exec", "eval", "compile",
}  # fmt: skip
BUILT_IN = {"exec", "eval", "compile", "__import__"}


def running(node: ast.AST, name: str = "") -> Iterator[str]:
    """Yield the name of the function around each call that runs code which is no constant."""
    for child in ast.iter_child_nodes(node):
        inner = f"{name}.{child.name}".strip(".") if isinstance(child, (ast.FunctionDef, ast.ClassDef)) else name
        if isinstance(child, ast.Call) and not (child.args and isinstance(child.args[0], ast.Constant)):
            of_module = isinstance(child.func, ast.Attribute)
            called = child.func.attr if isinstance(child.func, ast.Attribute) else getattr(child.func, "id", "")
            if called == "partial" and child.args:  # what it binds is called later
                called = ast.unparse(child.args[0]).rpartition(".")[2]
            pickled = called in ("loads", "load") and ast.unparse(child.func).startswith("pickle.")
            if pickled or (called in RUNNING and not (of_module and called in BUILT_IN)):
                yield name
        yield from running(child, inner)


@pytest.mark.slow
def test_every_way_from_text_to_code_is_known() -> None:
    root = Path(pk.__file__).parent
    found = {
        f"{path.relative_to(root).as_posix()}: {name}"
        for path in root.rglob("*.py")
        for name in running(ast.parse(path.read_text(encoding="utf-8")))
    }
    assert found == DOORS.keys()
