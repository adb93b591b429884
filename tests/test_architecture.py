"""The house: imports go down only, names are said once or twice, and the guide's page on it is whole."""

from __future__ import annotations

import ast
import re
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

import prunekit

ROOT = Path(prunekit.__file__).parent
PAGE = ROOT / "guide" / "architecture.md"
FLOORS = {
    "errors": 0, "utils": 0, "known_names": 0, "hooks": 0, "settings": 0, "distributed": 0, "reading": 0,
    "modes": 0,
    "channels": 1,
    "data": 2, "models": 2, "statistics": 2, "tasks": 2,
    "criteria": 3,
    "planning": 4,
    "masks": 5, "compaction": 5, "repair": 5,
    "backends": 6, "measure": 6, "deploy": 6,
    "pruning": 7,
    "training": 8, "report": 8,
    "jobs": 9,
    "recipe": 10,
    "recipe_jobs": 11, "cli": 11, "integrations": 11,
    "__main__": 12,
}  # fmt: skip
WITHIN = {
    ("utils", "errors"),
    ("utils", "distributed"),
    ("distributed", "errors"),
    ("reading", "errors"),
    ("utils", "reading"),
    ("settings", "reading"),
    ("known_names", "utils"),
    ("modes", "errors"),
    ("modes", "utils"),
    ("utils", "modes"),
    ("hooks", "modes"),
    ("hooks", "errors"),
    ("hooks", "utils"),
    ("settings", "errors"),
    ("settings", "utils"),
    ("settings", "known_names"),
    ("tasks", "models"),
    ("data", "tasks"),
    ("data", "models"),
    ("statistics", "tasks"),
    ("measure", "backends"),
    ("deploy", "measure"),
}
"""Imports between rooms of one floor that are allowed."""
FOLDERS: dict[str, tuple[str, ...]] = {
    "backends": ("files", "int8", "folders", "."),
    "channels": ("labels", "rules", "tracing", "rewrite", "cut", "depth", ".", "trial"),
    "cli": (".", "commands"),
    "integrations": ("yolo", "."),
    "jobs": ("run", "analyses", "stages", "."),
    "measure": (".", "latency", "causes", "latency_profile", "device"),
    "planning": ("budgets", ".", "patterns"),
    "pruning": ("latency", ".", "blocks"),
    "repair": (".", "patterns"),
    "report": (".", "figures", "sections", "pages"),
    "training": ("callbacks", "."),
}
"""The folders of each room, in which imports go from the later to the earlier; "." are the room's own files."""
FORBIDDEN = {
    "planning": {"yaml", "ruamel", "click"},
    "training": {"yaml", "ruamel", "click"},
    "measure": {"yaml", "ruamel", "click"},
    "channels": {"yaml", "ruamel", "click", "torchvision"},
}
SIBLINGS = 15
"""Files and folders that a folder may hold; the package itself has a room for each concept."""
LINES = 600

MODULES = sorted(path for path in ROOT.rglob("*.py") if path != ROOT / "__init__.py" and "recipes" not in path.parts)


def room(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def imported(path: Path) -> frozenset[str]:
    """Return the full names of all modules that a file imports: in functions, for types alone, and by a string.

    A string that is a module's name is an import like any other (`import_module`, a table of places). Only
    `known_names` names packages above it, which is its purpose: names are known before anything is imported.
    """
    names: set[str] = set()
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide the floor"
            assert node.module is not None
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and room(path) != "known_names":
            names |= {node.value.partition(":")[0]} & set(FILES)
    return frozenset(names)


def dotted(path: Path) -> str:
    return ".".join(("prunekit", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__")


FILES = {dotted(path): path for path in MODULES}


@cache
def imported_files(path: Path) -> frozenset[Path]:
    """Return the files of the package that a file imports."""
    names = {name if name in FILES else name.rpartition(".")[0] for name in imported(path)}
    return frozenset(FILES[name] for name in names if name in FILES) - {path}


def folder(path: Path) -> str:
    """Return the folder of a file inside its room, "." for the room's own files."""
    return "/".join(path.relative_to(ROOT).parts[1:-1]) or "."


@pytest.mark.slow
def test_imports_go_down_only() -> None:
    wrong = []
    for path in MODULES:
        here = room(path)
        for name in imported(path):
            parts = name.split(".")
            if parts[0] != "prunekit":
                if parts[0] in FORBIDDEN.get(here, set()):
                    wrong.append(f"{path}: {here} must not import {name}")
                continue
            there = parts[1] if len(parts) > 1 else ""
            if there in {here, "", "__version__"} or there not in FLOORS:  # names of the package itself
                continue
            if FLOORS[there] >= FLOORS[here] and (here, there) not in WITHIN:
                wrong.append(f"{path}: {here} (floor {FLOORS[here]}) imports {name} (floor {FLOORS[there]})")
    assert wrong == []


def test_every_room_has_a_floor() -> None:
    assert {room(path) for path in MODULES} == set(FLOORS)


def test_imports_go_down_only_inside_rooms() -> None:
    wrong = []
    for path in MODULES:
        for other in imported_files(path):
            here, there, order = folder(path), folder(other), FOLDERS.get(room(path), (".",))
            if room(path) == room(other) and order.index(there) > order.index(here):
                wrong.append(f"{path.relative_to(ROOT)} imports {other.relative_to(ROOT)}")
    assert wrong == []


def test_every_folder_of_a_room_has_its_place() -> None:
    inside = {(room(path), folder(path)) for path in MODULES if path.name != "__init__.py"}
    rooms = {name for name, where in inside if where != "."}
    assert {name: set(order) for name, order in FOLDERS.items()} == {
        name: {where for each, where in inside if each == name} for name in rooms
    }
    assert all(len(set(order)) == len(order) for order in FOLDERS.values())


def test_files_do_not_import_each_other_in_circles() -> None:
    assert {str(path.relative_to(ROOT)) for path in MODULES if path in _reached(path)} == set()


def _reached(start: Path) -> set[Path]:
    """Return the files that a file imports, and all that those import; the file itself only if it is on a circle."""
    reached: set[Path] = set()
    ahead = [start]
    while ahead:
        new = imported_files(ahead.pop()) - reached
        reached |= new
        ahead += new
    return reached


def test_nothing_below_the_jobs_prints() -> None:
    for path in MODULES:
        if FLOORS[room(path)] < FLOORS["jobs"]:
            calls = [node for node in ast.walk(tree(path)) if isinstance(node, ast.Call)]
            assert not any(isinstance(call.func, ast.Name) and call.func.id == "print" for call in calls), path


def test_files_stay_readable() -> None:
    """A file is a concept, however many lines that takes; beyond 600 it is more than one."""
    long = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in MODULES}
    assert {name: count for name, count in long.items() if count > LINES} == {}


def test_folders_hold_about_a_dozen_files() -> None:
    siblings: Counter[Path] = Counter(path.parent for path in MODULES if path.name != "__init__.py")
    siblings.update(path.parent.parent for path in MODULES if path.name == "__init__.py")
    assert {str(folder): count for folder, count in siblings.items() if count > SIBLINGS and folder != ROOT} == {}


def test_a_name_of_a_module_is_used_twice_at_most() -> None:
    names = Counter(path.parent.name if path.name == "__init__.py" else path.stem for path in MODULES)
    assert {name: count for name, count in names.items() if count > 2} == {}


def test_no_name_hides_a_module() -> None:
    """Packages re-export nothing: each name is imported from the file that defines it, or from `prunekit` itself."""
    for path in MODULES:
        if path.name == "__init__.py":
            bound = {
                alias.asname or alias.name
                for node in ast.walk(tree(path))
                if isinstance(node, ast.ImportFrom)
                for alias in node.names
            }
            assert not bound & {beside.stem for beside in path.parent.iterdir()}, path


def test_the_page_names_every_room_with_its_sentence() -> None:
    packages = {
        str(path.parent.relative_to(ROOT)): (ast.get_docstring(tree(path)) or "").splitlines()[0]
        for path in MODULES
        if path.name == "__init__.py"
    }
    rows = re.findall(r"^\| `([\w/]+)` \| (\d*) ?\| ([^|]+?) \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    said = {name: sentence for name, _, sentence in rows if (ROOT / name).is_dir()}
    assert said == packages
    floors = {name: int(floor) for name, floor, _ in rows if floor}
    assert floors == {name: floor for name, floor in FLOORS.items() if name != "__main__"}


def test_the_picture_has_every_room_on_its_floor() -> None:
    words = re.findall(
        r"<text [^>]*>([\w ]+)</text>", (PAGE.parent / "gallery" / "house.svg").read_text(encoding="utf-8")
    )
    drawn, floor = {}, -1
    for word in words:
        floor = int(word) if word.isdigit() else floor
        if word in FLOORS and word not in drawn:
            drawn[word] = floor
    assert drawn == {name: floor for name, floor in FLOORS.items() if name != "__main__"}


def test_the_page_names_only_what_is_there() -> None:
    for name in re.findall(r"`(prunekit/[\w/.]+)`", PAGE.read_text(encoding="utf-8")):
        assert (ROOT.parent / name).exists(), name


NOT_NAMES = ("What", "Whether", "Where", "Which", "How", "Why", "When", "Whatever", "Of", "From", "As")
NOT_VERBS = (*NOT_NAMES, "The", "A", "An", "All", "Each", "Every", "One", "Both", "Those", "Some", "Any", "Who", "For")


@pytest.mark.slow
def test_docstrings_say_what_functions_do_and_what_classes_are() -> None:
    """Functions begin with a verb, which ruff's D401 has in the imperative; classes and modules name the thing."""
    riddles = []
    for path in MODULES:
        for node in ast.walk(tree(path)):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Module):
                continue
            first = (ast.get_docstring(node) or "x").split()[0]
            if isinstance(node, ast.ClassDef | ast.Module):
                wrong = first in NOT_NAMES
            else:
                wrong = first in NOT_VERBS and not any("property" in ast.unparse(each) for each in node.decorator_list)
            if wrong:
                riddles.append(f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 1)}: {first} ...")
    assert riddles == []
