"""The user's own model file."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch import nn

from prunekit.errors import ModelError
from prunekit.models.zoo import load_factory
from prunekit.utils.user_code import run_factory

GOOD = """
from dataclasses import dataclass
from torch import nn
from neighbor import WIDTH

@dataclass
class Config:
    width: int = WIDTH

class Net(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(Config().width, 2))

def build():
    return Net()

def three():
    return 3

def broken():
    raise ValueError("no weights here")

size = 3
"""


@pytest.fixture(autouse=True)
def _path_and_modules(tmp_path: Path) -> Iterator[None]:
    """Takes back what files leave behind for their process."""
    path = list(sys.path)
    yield
    sys.path[:] = path
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", None)).startswith(str(tmp_path)):
            del sys.modules[name]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "neighbor.py").write_text("WIDTH = 5\n", encoding="utf-8")
    path = tmp_path / "net.py"
    path.write_text(GOOD, encoding="utf-8")
    return path


@pytest.mark.parametrize("name", ["build", "Net"])
def test_a_function_or_a_class(file: Path, name: str) -> None:
    model = load_factory(f"{file}:{name}")
    assert isinstance(model, nn.Sequential)
    assert model[0].in_features == 5


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("biuld", r"there is no function or class 'biuld' here; did you mean 'build'\?"),
        ("size", "size: expected a function or class, got int"),
        ("three", r"expected the factory to return an nn.Module, or \(module, example\), got int"),
        ("broken", "the factory raised ValueError: no weights here"),
    ],
)
def test_what_is_wrong_with_a_name(file: Path, name: str, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        load_factory(f"{file}:{name}")


@pytest.mark.parametrize("reference", ["net.py", "net:build", "net.py:", ":build", ""])
def test_another_form(reference: str) -> None:
    with pytest.raises(ModelError, match=r"expected file\.py:factory, got"):
        load_factory(reference)


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"none\.py: there is no such file"):
        load_factory(f"{tmp_path / 'none.py'}:build")


@pytest.mark.parametrize(
    ("code", "error"), [("import nothing_like_it", "ModuleNotFoundError"), ("def (", "SyntaxError")]
)
def test_a_file_that_does_not_run(tmp_path: Path, code: str, error: str) -> None:
    (tmp_path / "bad.py").write_text(code, encoding="utf-8")
    with pytest.raises(ModelError, match=rf"bad\.py: running this file raised {error}"):
        load_factory(f"{tmp_path / 'bad.py'}:build")
    assert not [module for module in sys.modules if module.startswith("prunekit_user_bad")]


def test_a_file_that_defines_nothing(tmp_path: Path) -> None:
    (tmp_path / "empty.py").write_text("", encoding="utf-8")
    with pytest.raises(ModelError, match="'build' here; it defines none"):
        load_factory(f"{tmp_path / 'empty.py'}:build")


def test_the_line_of_the_users_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("import sys\ndef build():\n    sys.exit(3)\n")
    with pytest.raises(ModelError, match=r"own.py:build: the factory raised SystemExit: 3 \(line 3\)"):
        load_factory(f"{tmp_path / 'own.py'}:build")
    (tmp_path / "leaves.py").write_text("raise SystemExit('bye')\n")
    with pytest.raises(ModelError, match=r"running this file raised SystemExit: bye \(line 1\)"):
        load_factory(f"{tmp_path / 'leaves.py'}:build")


def factory(path: Path, code: str) -> str:
    path.parent.mkdir(exist_ok=True)
    path.write_text(code, encoding="utf-8")
    return f"{path}:build"


def made(reference: str) -> object:
    return run_factory(reference, ModelError)


def test_files_of_one_name_do_not_take_each_others_place(tmp_path: Path) -> None:
    code = "class Net:\n    pass\nbuild = Net\n"
    one, other = made(factory(tmp_path / "a" / "own.py", code)), made(factory(tmp_path / "b" / "own.py", code))
    assert type(one) is not type(other)
    for net in (one, other):
        assert type(pickle.loads(pickle.dumps(net))) is type(net)


def test_a_file_is_run_once_until_it_changes(tmp_path: Path) -> None:
    code = "class Net:\n    size = 1\nbuild = Net\n"
    first, again = made(factory(tmp_path / "own.py", code)), made(f"{tmp_path / 'own.py'}:Net")
    assert type(first) is type(again)
    # As many bytes, within the same second: cached bytecode would be taken for that of the new file.
    changed = made(factory(tmp_path / "own.py", code.replace("1", "2")))
    assert getattr(changed, "size") == 2  # noqa: B009
    assert not (tmp_path / "__pycache__").exists()
    assert type(pickle.loads(pickle.dumps(first))) is type(first)


def test_neighbors_may_be_imported_late(tmp_path: Path) -> None:
    (tmp_path / "late_neighbor.py").write_text("WIDTH = 7\n", encoding="utf-8")
    code = "class Net:\n    def width(self):\n        import late_neighbor\n        return late_neighbor.WIDTH\n"
    net = made(factory(tmp_path / "own.py", code + "build = Net\n"))
    assert getattr(net, "width")() == 7  # noqa: B009


def test_a_file_may_change_the_path_and_have_any_name(tmp_path: Path) -> None:
    code = "import sys\nsys.path.pop(0)\nbuild = int\n"
    assert made(factory(tmp_path / "my own_net.v2 100%.py", code)) == 0


def test_a_factory_of_an_installed_module() -> None:
    assert isinstance(load_factory("python:torch.nn:Identity"), nn.Identity)


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("python:torch.nn:Identityy", "there is no function or class 'Identityy' here; did you mean 'Identity'"),
        ("python:no_such_module:build", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("torch.nn:Identity", "expected file.py:factory, got 'torch.nn:Identity'"),
    ],
)
def test_what_is_wrong_with_an_installed_module(reference: str, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        load_factory(reference)
