"""User code: an object in a Python file that the user names, or allows a recipe to name. The line of trust is here.

**Trusted** is what the user types: arguments of Python calls, options and overrides of commands, and recipes with
`--allow-code`. **Every file is a stranger's**: model folders, exported files with their metadata, plans, checkpoints,
profiles, data sets, run folders, and recipes without `--allow-code`. Text of a file may name what is registered
already, and nothing else: where it could reach a registry, its reader passes it through `from_file`. `load_object` is
the only way from text to code, and refuses what `from_file` or a recipe's reader has marked.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import sys
import traceback
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import spec_from_file_location
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any
from urllib.parse import quote, unquote

from prunekit.errors import UsageError, nearest, reraise_shortage

_PREFIX = "prunekit_user_"
_INSTALLED = "python:"


def run_factory(reference: str, error: type[UsageError]) -> Any:
    """Run `file.py:factory` and return its result. The file's code is run: name only files you trust.

    A file is run once in a process unless it changes. Its folder stays on `sys.path`, because factories and data sets
    may import their neighbors later, and spawned worker processes inherit the path. The reference may also be
    `python:`, an importable module, a colon, and the name of a function or class without arguments.
    """
    factory = load_object(reference, error)
    if not callable(factory):
        raise error(f"{reference}: expected a function or class, got {type(factory).__name__}")
    return call_factory(factory, reference, error)


def call_factory(factory: Callable[[], Any], reference: str, error: type[UsageError]) -> Any:
    """Call the factory of a reference, and return its result."""
    path = Path(reference.rpartition(":")[0])
    try:
        return factory()
    except (Exception, SystemExit) as raised:
        reraise_shortage(raised)
        raise error(f"{reference}: the factory raised {_raised(raised, path)}") from raised


ALLOW = "add --allow-code (from Python: allow_code=True)"
"""How code that a recipe names is allowed."""


class ForbiddenReference(str):
    """A reference in a file that is not allowed to run: `load_object` raises for it."""

    where: str  # its place in the file, for messages
    instead: str  # how a user who trusts the code has it run, for messages

    def __new__(cls, reference: str, where: str = "", instead: str = ALLOW) -> ForbiddenReference:
        """Return a reference with its place in a file."""
        made = super().__new__(cls, reference)
        made.where, made.instead = where, instead
        return made

    def __reduce__(self) -> tuple[type[ForbiddenReference], tuple[str, str, str]]:
        return ForbiddenReference, (str(self), self.where, self.instead)

    @property
    def refusal(self) -> str:
        """Why it is not run, and how to allow it, without its place."""
        return f"{str(self)!r} is code, and no file runs code that it names: if you trust it, {self.instead}"


def from_file(text: str, where: str, instead: str = ALLOW) -> str:
    """Return the name of a registered object as a file gives it; if it refers to code, it is marked and never runs."""
    if isinstance(text, ForbiddenReference) or not is_reference(text):
        return text
    return ForbiddenReference(text, where, instead)


def is_reference(text: object) -> bool:
    """Return whether a value is text that refers to user code, `file.py:object` or `python:module:object`."""
    if not isinstance(text, str):
        return False
    file, colon, name = text.rpartition(":")
    return bool(colon and name) and (file.endswith(".py") or file.startswith(_INSTALLED))


def load_object(reference: str, error: type[UsageError]) -> Any:
    """Run the user's file and return the object of a reference; `run_factory` also calls it."""
    refuse_forbidden(reference, error)
    file, path, name = _parts(reference, error)
    if file.startswith(_INSTALLED):
        place, own = path, file.removeprefix(_INSTALLED)
    else:
        place = path.resolve()
        own = _module_name(place)
        if str(place.parent) not in sys.path:
            sys.path.insert(0, str(place.parent))
    try:
        module = importlib.import_module(own)
    except (Exception, SystemExit) as raised:
        reraise_shortage(raised)
        raise error(f"{place}: running this file raised {_raised(raised, place)}") from raised
    if name not in vars(module):
        names = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise error(f"{path}: there is no function or class {name!r} here; {_hint(name, names)}")
    return getattr(module, name)


def require_object(reference: str, error: type[UsageError]) -> None:
    """Raise if the code of a file defines no object of the name; the code is not run."""
    refuse_forbidden(reference, error)
    file, path, name = _parts(reference, error)
    if file.startswith(_INSTALLED):
        return
    try:
        body = ast.parse(path.read_bytes()).body
    except SyntaxError as raised:
        raise error(f"{path}: {raised.msg} (line {raised.lineno})") from raised
    if any(isinstance(node, ast.ImportFrom) and node.names[0].name == "*" for node in body):
        return
    names = [found for node in body for found in _defined(node)]
    if name not in names:
        raise error(f"{path}: there is no function or class {name!r} here; {_hint(name, names)}")


def refuse_forbidden(reference: str, error: type[UsageError]) -> None:
    """Raise for a reference that a file gave; not even its file is read."""
    if isinstance(reference, ForbiddenReference):
        raise error(f"{reference.where}: {reference.refusal}")


def _parts(reference: str, error: type[UsageError]) -> tuple[str, Path, str]:
    file, _, name = reference.rpartition(":")
    if not is_reference(reference):
        raise error(
            f"expected file.py:factory, got {reference!r}; for example own.py:build or python:package.module:build"
        )
    path = Path(file)
    if not file.startswith(_INSTALLED) and not path.is_file():
        raise error(f"{path}: there is no such file; expected file.py:factory, got {reference!r}")
    return file, path, name


def _defined(node: ast.stmt) -> list[str]:
    """Return the names that a statement of a module binds."""
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return [node.name]
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        return [(alias.asname or alias.name).partition(".")[0] for alias in node.names]
    return [name.id for name in ast.walk(node) if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Store)] + [
        inner for child in ast.iter_child_nodes(node) if isinstance(child, ast.stmt) for inner in _defined(child)
    ]


def absolute_reference(reference: str) -> str:
    """Return a reference with the absolute path of its file; unchanged if it refers to no file."""
    file, _, name = reference.rpartition(":")
    installed = file.startswith(_INSTALLED)
    return f"{Path(file).absolute()}:{name}" if file.endswith(".py") and not installed else reference


def source_bytes(reference: str) -> bytes:
    """Return the content of the file of a reference that has been run; empty for a module without a file."""
    file = reference.rpartition(":")[0]
    if file.startswith(_INSTALLED):
        file = getattr(sys.modules[file.removeprefix(_INSTALLED)], "__file__", None) or ""
    return Path(file).read_bytes() if file else b""


def _hint(name: str, names: list[str]) -> str:
    return nearest(name, names) if names else "it defines none"


def _module_name(path: Path) -> str:
    """Return a module name that is unique for each file and content, so that classes of different ones differ."""
    known = hashlib.sha256(str(path.resolve()).encode() + b"\0" + path.read_bytes()).hexdigest()[:16]
    stem = quote(path.stem).replace(".", "%2E")  # a dot would mean a package
    return f"{_PREFIX}{stem}_{known}"


def name_of_module(module: ModuleType) -> str:
    """Return the name of a module; for a file that was run by its path, the one that its neighbors import it by."""
    name = module.__name__
    return unquote(name.removeprefix(_PREFIX).rpartition("_")[0]) if name.startswith(_PREFIX) else name


class _SourceLoader(SourceFileLoader):
    """Loads files without cached bytecode, which is keyed by second and size: an edit may change neither."""

    def get_code(self, fullname: str) -> CodeType:
        """Return the compiled code of the file."""
        path = self.get_filename(fullname)
        return self.source_to_code(self.get_data(path), path)


class _UserCodeFinder:
    """Finds a user's file by its module's name, which is all that a spawned process has when it unpickles."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Return the spec of the file with this module name on `sys.path`; None if there is none."""
        if not name.startswith(_PREFIX):
            return None
        stem = unquote(name.removeprefix(_PREFIX).rpartition("_")[0])
        files = [Path(folder, f"{stem}.py") for folder in sys.path]
        found = next((file for file in files if file.is_file() and _module_name(file) == name), None)
        return None if found is None else spec_from_file_location(name, found, loader=_SourceLoader(name, str(found)))


def _raised(error: BaseException, path: Path) -> str:
    """Return an error of user code, with the last line of the file that it passed through."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if Path(frame.filename).resolve() == path.resolve()]
    return f"{type(error).__name__}: {error}" + (f" (line {lines[-1]})" if lines else "")


def place_in_user_code(error: BaseException) -> str | None:
    """Return the file and line of user code that an error passed through last; None if it passed through none."""
    calls = list(traceback.walk_tb(error.__traceback__))
    own = [call for call in calls if str(call[0].f_globals.get("__name__")).startswith(_PREFIX)]
    return f"{Path(own[-1][0].f_code.co_filename).name}, line {own[-1][1]}" if own else None


sys.meta_path.append(_UserCodeFinder)
