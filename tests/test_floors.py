"""Imports go down only: the AST of every module is read, imports inside functions included."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import prunekit

ROOT = Path(prunekit.__file__).parent
FLOORS = {
    "errors": 0, "nested": 0, "hooks": 0, "context": 0, "artifacts": 0, "states": 0, "globs": 0, "user_code": 0,
    "settings": 0, "inputs": 0, "vocabulary": 0, "progress": 0, "distributed": 0, "layout": 0,
    "wrappers": 0, "registry": 0, "registries": 0, "numbers": 0, "display": 0,
    "channels": 1,
    "data": 2, "models": 2, "calibration": 2, "tasks": 2,
    "criteria": 3, "capturing": 3,
    "planning": 4,
    "masking": 5, "compaction": 5, "repair": 5,
    "measure": 6, "export": 6,
    "training": 7, "deploy": 7, "visualize": 7, "diagnosis": 7, "report": 7,
    "workflow": 8,
    "recipe": 9,
    "jobs": 10, "cli": 10, "__main__": 11,
}  # fmt: skip
WITHIN = {
    ("hooks", "errors"),
    ("hooks", "nested"),
    ("context", "errors"),
    ("artifacts", "errors"),
    ("states", "artifacts"),
    ("states", "errors"),
    ("globs", "errors"),
    ("user_code", "errors"),
    ("distributed", "errors"),
    ("context", "distributed"),
    ("inputs", "errors"),
    ("settings", "vocabulary"),
    ("settings", "errors"),
    ("settings", "numbers"),
    ("settings", "user_code"),
    ("wrappers", "errors"),
    ("wrappers", "hooks"),
    ("inputs", "nested"),
    ("settings", "registries"),
    ("settings", "registry"),
    ("registries", "registry"),
    ("vocabulary", "registries"),
    ("vocabulary", "registry"),
    ("registry", "errors"),
    ("registry", "user_code"),
    ("display", "numbers"),
    ("tasks", "models"),
    ("data", "tasks"),
    ("calibration", "tasks"),
    ("measure", "export"),
}
"""Imports between rooms of one floor that are allowed."""
FORBIDDEN = {
    "planning": {"yaml", "ruamel", "click"},
    "training": {"yaml", "ruamel", "click"},
    "visualize": {"yaml", "ruamel", "click"},
    "measure": {"yaml", "ruamel", "click"},
    "channels": {"yaml", "ruamel", "click", "torchvision"},
}


def room(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imported(path: Path) -> set[str]:
    """Full names of all modules that a file imports."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide the floor"
            assert node.module is not None
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


MODULES = sorted(path for path in ROOT.rglob("*.py") if path != ROOT / "__init__.py")


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_go_down_only(path: Path) -> None:
    here = room(path)
    for name in imported(path):
        parts = name.split(".")
        if parts[0] != "prunekit":
            assert parts[0] not in FORBIDDEN.get(here, set()), f"{here} must not import {name}"
            continue
        there = parts[1] if len(parts) > 1 else ""
        if there == here or there in {"", "__version__"}:
            continue
        below = FLOORS[there] < FLOORS[here] or (here, there) in WITHIN
        assert below, f"{here} (floor {FLOORS[here]}) imports {name} (floor {FLOORS[there]})"


def test_every_room_has_a_floor() -> None:
    rooms = {room(path) for path in MODULES}
    assert rooms == set(FLOORS)


def test_nothing_below_the_workflow_prints() -> None:
    for path in MODULES:
        if FLOORS[room(path)] < 8:
            calls = [
                node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.Call)
            ]
            assert not any(isinstance(call.func, ast.Name) and call.func.id == "print" for call in calls), path


def test_files_stay_readable() -> None:
    """A file is a concept, however many lines that takes; beyond 600 it is more than one."""
    long = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in MODULES}
    assert {name: count for name, count in long.items() if count > 600} == {}
