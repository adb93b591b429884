"""The guide's page of every key of a recipe, and the schema for editors, written from the settings."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from functools import cache
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt, MaxLen

from prunekit.recipe.keys import own_keys, settings_in
from prunekit.recipe.reference import RecipeKey, all_keys, flow, registries_of, schema_text
from prunekit.recipe.yaml_positions import KeyPath
from prunekit.settings.job import JobSettings
from prunekit.utils.files import write_text

PACKAGE = Path(__file__).resolve().parent.parent / "prunekit"
PAGE = PACKAGE / "guide" / "reference" / "recipe.md"
SCHEMA = PACKAGE / "recipe" / "schema.json"
GROUPS = {
    "The job": (),
    "Inputs": ("model", "data"),
    "Pruning": ("calibration", "prune", "repair"),
    "Training": ("finetune", "checkpoint", "watch", "activations"),
    "Results": ("deploy", "latency", "quantize"),
}
"""Headings of the page, and the keys of the job whose sections are below them."""
WORDS = {int: "integer", float: "number", str: "text", bool: "true/false", Path: "path"}
_IN_LISTS: Any = {"subsequent_indent": "  ", "break_long_words": False, "break_on_hyphens": False}
SIGNS = {Gt: ">", Ge: "≥", Lt: "<", Le: "≤"}
INTRODUCTION = """# The keys of a recipe

A recipe is a YAML file. `prunekit init` writes one, `prunekit list recipes` shows packaged ones. `prunekit recipe
reference prune.budget` shows a part of this page. Any key can be set on the command line: `prunekit finetune mine.yaml
prune.round_to=8`. A default of `null` means none, unless the text says otherwise.

Editors complete and check recipes: run `prunekit recipe schema > recipe.schema.json`, and begin a recipe beside that
file with the line `# yaml-language-server: $schema=recipe.schema.json`.

`python .ci/write_reference.py` makes this page from `prunekit.settings`.

| | sections |
|---|---|"""


@cache
def homes() -> dict[KeyPath, KeyPath]:
    """Return for each section the one below which its keys are described: several sections have the same keys."""
    first: dict[type, KeyPath] = {}
    for optional in (False, True):  # sections that are always there first, and those of fine-tuning
        for path, kind in sorted(_sections(JobSettings, (), optional), key=lambda one: one[0][:1] != ("finetune",)):
            first.setdefault(kind, path)
    return {path: first[kind] for path, kind in _sections(JobSettings, (), True)}


def _sections(kind: Any, path: KeyPath, optional: bool) -> Iterator[tuple[KeyPath, Any]]:
    yield path, kind
    for name, hint in own_keys(kind).items():
        for part in settings_in(hint):
            if optional or part is hint:
                yield from _sections(part, (*path, name), optional)


def entry(key: RecipeKey) -> str:
    """Return name, default, allowed values and meaning, as a line of the page."""
    inner = homes().get(key.path)
    name = f"**`{key.name}`**" if inner is None else f"[**`{key.name}`**]({_anchor(inner)})"
    values = "" if isinstance(key.default, bool) else brief(key.hint, key.meaning).removeprefix("section")
    if key.default is not None:  # it shows the kind
        values = re.sub("^(integer|number) ", "", values)
    default = "required" if key.required else f"default `{flow(key.default)}`"
    shown = inner is None and isinstance(key.example, dict)
    example = f" Example: `{flow(key.example)}`." if shown else ""
    return f"- {name} ({default}{f', {values}' if values else ''}): {key.meaning}{example}"


def page() -> str:
    """Return the reference as a page of the guide: contents, then a heading for each section."""
    sections: dict[KeyPath, list[RecipeKey]] = {}
    for key in all_keys():
        if homes()[key.path[:-1]] == key.path[:-1]:
            sections.setdefault(key.path[:-1], []).append(key)
    groups = {
        title: [path for path in sections if path and path[0] in tops] if tops else [()]
        for title, tops in GROUPS.items()
    }
    lines = [INTRODUCTION]
    for title, paths in groups.items():
        links = (f"[`{'.'.join(map(str, path))}`]({_anchor(path)})" for path in paths if path)
        told = ", ".join(links) or "every key at the top"
        lines.append(f"| [{title}](#{title.lower().replace(' ', '-')}) | {told} |")
    for title, paths in groups.items():
        lines += ["", f"## {title}"]
        for path in paths:
            lines += ["", f"### {'.'.join(map(str, path))}"] if path else []
            same = {other for other, home in homes().items() if home == path != other}
            named = ", ".join(f"`{'.'.join(map(str, other))}`" for other in sorted(same))
            lines += ["", textwrap.fill(f"The same keys are in {named}.", 120, **_IN_LISTS)] if same else []
            lines += ["", *(textwrap.fill(entry(key), 120, **_IN_LISTS) for key in sections[path])]
    return "\n".join(lines) + "\n"


def _anchor(section: KeyPath) -> str:
    return f"#{''.join(map(str, section))}"


def brief(hint: Any, said: str = "") -> str:
    """Return the values that an annotation allows, in few words; without choices that a text names."""
    if get_origin(hint) in (UnionType, Union):
        parts = (brief(part, said) for part in get_args(hint) if part is not type(None))
        return " or ".join(dict.fromkeys(part for part in parts if part))
    if get_origin(hint) is Annotated:
        kind, *marks = get_args(hint)
        if names := [name for registry in registries_of(hint) for name in registry.declared]:
            listed = "" if all(f"`{name}`" in said for name in names) else ", ".join(f"`{name}`" for name in names)
            return f"one of {listed} or `file.py:object`" if listed else "or `file.py:object`"
        bounds = [f"{SIGNS[type(one)]}{getattr(one, fields(one)[0].name)}" for one in marks if type(one) in SIGNS]
        counts = [f"{one.max_length} items" for one in marks if isinstance(one, MaxLen)]
        return ", ".join([f"{brief(kind, said)} {bounds[0]}" if bounds else brief(kind, said), *bounds[1:], *counts])
    if get_origin(hint) is Literal:
        choices = [f"`{choice}`" for choice in get_args(hint)]
        return "" if all(choice in said for choice in choices) else f"one of {', '.join(choices)}"
    if get_origin(hint) is tuple:
        item = brief(get_args(hint)[0], said)
        return f"list ({item})" if item else "list"
    if is_dataclass(hint):
        return "section"
    return "mapping" if get_origin(hint) is dict else WORDS.get(hint, "")


def main() -> None:
    """Write the page and the schema."""
    for path, text in ((PAGE, page()), (SCHEMA, schema_text())):
        write_text(path, text)


if __name__ == "__main__":
    main()
