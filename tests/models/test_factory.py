"""The user's own model file."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from torch import nn

from prunekit.errors import ModelError
from prunekit.models import load_factory

GOOD = """
from dataclasses import dataclass
from torch import nn
from neighbour import WIDTH

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


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "neighbour.py").write_text("WIDTH = 5\n", encoding="utf-8")
    path = tmp_path / "net.py"
    path.write_text(GOOD, encoding="utf-8")
    return path


@pytest.mark.parametrize("name", ["build", "Net"])
def test_a_function_or_a_class(file: Path, name: str) -> None:
    before = list(sys.path)
    model = load_factory(f"{file}:{name}")
    assert isinstance(model, nn.Sequential)
    assert model[0].in_features == 5
    assert sys.path == before


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("biuld", r"there is no function or class 'biuld' here; did you mean 'build'\?"),
        ("size", "there is no function or class 'size' here"),
        ("three", "expected the factory to return an nn.Module, got int"),
        ("broken", "the factory raised ValueError: no weights here"),
    ],
)
def test_what_is_wrong_with_a_name(file: Path, name: str, message: str) -> None:
    before = list(sys.path)
    with pytest.raises(ModelError, match=message):
        load_factory(f"{file}:{name}")
    assert sys.path == before


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
    assert "prunekit_user_bad" not in sys.modules


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
