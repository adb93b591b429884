"""The user's own code: a function in a Python file that the user names on the command line."""

from __future__ import annotations

import importlib.util
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from prunekit.errors import UsageError, nearest


def run_factory(reference: str, error: type[UsageError]) -> Any:
    """Runs `file.py:factory` and returns what it makes. The file's code is run: name only files you trust.

    Args:
        reference: path of a Python file, a colon, and the name of a function or class that takes no arguments.
        error: what to raise.

    Raises:
        UsageError: of the type `error`: no such file or name, or the code raises.
    """
    file, colon, name = reference.rpartition(":")
    if not colon or not file.endswith(".py") or not name:
        raise error(f"expected file.py:factory, got {reference!r}; for example own.py:build")
    path = Path(file)
    if not path.is_file():
        raise error(f"{path}: there is no such file; expected file.py:factory, got {reference!r}")
    with _importable(path.resolve().parent):
        module = _run(path, error)
        factory = getattr(module, name, None)
        if not callable(factory):
            names = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
            raise error(f"{path}: there is no function or class {name!r} here; {_hint(name, names)}")
        try:
            return factory()
        except (Exception, SystemExit) as raised:
            raise error(f"{reference}: the factory raised {_raised(raised, path)}") from raised


def _hint(name: str, names: list[str]) -> str:
    return nearest(name, names) if names else "it defines none"


def _run(path: Path, error: type[UsageError]) -> ModuleType:
    name = f"prunekit_user_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise error(f"{path}: Python cannot import this file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # stays: classes are looked up there by dataclasses and by copy
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as raised:
        del sys.modules[name]
        raise error(f"{path}: running this file raised {_raised(raised, path)}") from raised
    return module


def _raised(error: BaseException, path: Path) -> str:
    """The user's own error with the last line of their file that it passed through."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if Path(frame.filename).resolve() == path.resolve()]
    return f"{type(error).__name__}: {error}" + (f" (line {lines[-1]})" if lines else "")


@contextmanager
def _importable(folder: Path) -> Iterator[None]:
    """Lets the file import its neighbours, as it could if it were run."""
    entry = str(folder)
    sys.path.insert(0, entry)
    try:
        yield
    finally:
        sys.path.remove(entry)
