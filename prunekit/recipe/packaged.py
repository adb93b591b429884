"""The recipes that come with the package, by name."""

from __future__ import annotations

from pathlib import Path

from prunekit.artifacts import StrPath
from prunekit.errors import UsageError, nearest

INSTALLED = Path(__file__).parent.parent / "recipes"
"""Of the installed package; in a clone a link to the folder at its top, or, where git makes no links, a text file."""


def folder(installed: Path = INSTALLED) -> Path:
    """The folder of the recipes: that of the package, or where a clone has them."""
    return installed if installed.is_dir() else installed.parent.parent / "recipes"


def recipe_names() -> tuple[str, ...]:
    """The names of all of them."""
    return tuple(sorted(path.stem for path in folder().glob("*.yaml")))


def recipe_text(name: str) -> str:
    """The text of one, comments and all.

    Args:
        name: with or without `.yaml`.

    Raises:
        UsageError: there is none of this name; names the nearest.
    """
    path = _packaged(name)
    if path is None:
        raise UsageError(f"recipe {name!r}: prunekit comes with none of this name; {nearest(name, recipe_names())}")
    return path.read_text(encoding="utf-8")


def recipe_summary(name: str) -> str:
    """What one is for: the first line of its comment."""
    return recipe_text(name).partition("\n")[0].removeprefix("# ")


def located(recipe: StrPath) -> Path:
    """The file that a recipe is in: a file goes before a name of the package's; a path of nothing stays as it is."""
    path = Path(recipe)
    return path if path.is_file() else _packaged(str(recipe)) or path


def _packaged(name: str) -> Path | None:
    plain = name.removesuffix(".yaml")
    return folder() / f"{plain}.yaml" if plain in recipe_names() else None
