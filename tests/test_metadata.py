"""What the package says of itself: its requirements, its long description, its versions."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

import prunekit

ROOT = Path(__file__).parent.parent
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
DISTRIBUTIONS = {"PIL": "pillow", "ruamel": "ruamel.yaml", "pytorch_lightning": "lightning"}
"""Distributions of modules that have another name; a dash stands for an underscore in the others."""


def imported() -> dict[str, str]:
    """Names of the modules of others that the package imports, each with a file that does."""
    found: dict[str, str] = {}
    for path in sorted((ROOT / "prunekit").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            found |= {name.partition(".")[0]: str(path.relative_to(ROOT)) for name in names}
    return {
        name: path for name, path in found.items() if name not in (*sys.stdlib_module_names, "prunekit", "__future__")
    }


def declared(requirements: list[str]) -> set[str]:
    return {re.split(r"[\[<>=]", requirement)[0].strip() for requirement in requirements} - {"prunekit"}


def test_every_import_is_declared_and_everything_declared_is_imported() -> None:
    extras = PROJECT["project"]["optional-dependencies"]
    known = declared(PROJECT["project"]["dependencies"]) | declared(
        [each for name, requirements in extras.items() if name != "test" for each in requirements]
    )
    wanted = {DISTRIBUTIONS.get(name, name.replace("_", "-")): path for name, path in imported().items()}
    missing = {name: path for name, path in wanted.items() if name not in known}
    assert missing == {}
    assert declared(PROJECT["project"]["dependencies"]) - wanted.keys() == set()


def test_the_long_description_leads_nowhere_but_to_addresses() -> None:
    """README.md as the build writes it: links that only a clone can follow are text."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    for change in PROJECT["tool"]["hatch"]["metadata"]["hooks"]["fancy-pypi-readme"]["substitutions"]:
        text = re.sub(change["pattern"], change["replacement"], text)
    assert all(link.startswith("https://") for link in re.findall(r"\]\(([^)]*)\)", text))
    assert "report.png" not in text
    assert "coming from other tools ·" in text


def test_licenses_and_versions_are_whole() -> None:
    project = PROJECT["project"]
    assert all((ROOT / path).is_file() for path in project["license-files"])
    assert "creativecommons.org/licenses/by/4.0" in (ROOT / project["license-files"][1]).read_text(encoding="utf-8")
    versions = re.findall(
        r"^## \[(\d+\.\d+\.\d+)\] - \d{4}-\d\d-\d\d$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE
    )
    assert versions == sorted(versions, key=lambda text: [int(part) for part in text.split(".")], reverse=True)
    assert versions[0] == project["version"]


def test_a_user_reads_what_is_new_in_two_minutes() -> None:
    newest = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8").split("\n## [")[2]
    assert len(newest.split()) < 700
    assert newest.startswith(PROJECT["project"]["version"])


def test_the_guide_tells_how_to_cite_this_version() -> None:
    page = (Path(prunekit.__file__).parent / "guide" / "versions.md").read_text(encoding="utf-8")
    assert f"version = {{{PROJECT['project']['version']}}}" in page
