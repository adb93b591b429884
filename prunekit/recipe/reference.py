"""The reference of every key of a recipe, with type, default, meaning and example, also as a JSON schema.

Both are made from the settings: annotations say what a key may hold, and the text below a field what it means. After a
change of the settings run `python .ci/write_reference.py`, which writes the guide's page and the schema again.
"""

import ast
import inspect
import json
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from functools import cache
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt, MaxLen, MinLen

from prunekit.errors import UsageError, nearest
from prunekit.reading.yaml_files import read_yaml
from prunekit.recipe.keys import beside_of, describe, own_keys, settings_in, split_key
from prunekit.recipe.yaml_positions import KeyPath
from prunekit.settings.job import JobSettings, changed_values, yaml_value
from prunekit.utils.registry import Registered


@dataclass(frozen=True)
class RecipeKey:
    """One key of a recipe."""

    path: KeyPath  # its key path
    hint: Any  # annotation of its value
    required: bool  # whether it must be given; then there is no default
    default: Any  # as plain values
    meaning: str  # in words
    example: Any  # a value, as plain values

    @property
    def name(self) -> str:
        """Its path with dots."""
        return ".".join(map(str, self.path))

    @property
    def allowed(self) -> str:
        """The allowed values, in words."""
        words = describe(self.hint, brief=True)
        names = [f"`{name}`" for registry in registries_of(self.hint) for name in registry.declared]
        return f"{words} (built in: {', '.join(names)})" if names else words

    @property
    def text(self) -> str:
        """Type, default, meaning and example in a paragraph."""
        default = "required" if self.required else f"default `{flow(self.default)}`"
        return f"{self.allowed}; {default}. {self.meaning} Example: `{self.name}={flow(self.example)}`."


@cache
def all_keys() -> tuple[RecipeKey, ...]:
    """Return every key, in the order of the settings, those of a section after it."""
    return tuple(_keys_of(JobSettings, ()))


def _keys_of(kind: Any, path: KeyPath) -> Iterator[RecipeKey]:
    said, known = meanings(kind), {field.name: field for field in fields(kind)}
    for name, hint in own_keys(kind).items():
        required, default = _is_required(known[name]), _default(known[name])
        example = _example(kind, name, hint, default)
        yield RecipeKey((*path, name), hint, required, default, said.get(name, ""), example)
        for part in settings_in(hint):
            yield from _keys_of(part, (*path, name))


def _is_required(field: Field[Any]) -> bool:
    return field.default is MISSING and field.default_factory is MISSING


def registries_of(hint: Any) -> list[Any]:
    """Return the registries whose names an annotation allows."""
    if get_origin(hint) is Annotated:
        own = [one.registry for one in hint.__metadata__ if isinstance(one, Registered)]
        return own or registries_of(get_args(hint)[0])
    return [found for part in get_args(hint) if get_origin(hint) is not Literal for found in registries_of(part)]


@cache
def meanings(kind: Any) -> dict[str, str]:
    """Return what each field of a dataclass means: the text below it in the source."""
    (body,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    assert isinstance(body, ast.ClassDef)
    found = {}
    for field, text in zip(body.body, body.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(text, ast.Expr):
            found[field.target.id] = " ".join(str(ast.literal_eval(text.value)).split())
    return found


def _default(field: Field[Any]) -> Any:
    if field.default_factory is not MISSING:
        made = field.default_factory()
        return yaml_value(changed_values(made), field.name)
    return None if field.default is MISSING else yaml_value(field.default, field.name)


@cache
def examples() -> dict[str, Any]:
    """Return examples of keys whose default is a bad one, by settings and field."""
    return dict(read_yaml(Path(__file__).parent / "examples.yaml"))


def _example(kind: Any, name: str, hint: Any, default: Any) -> Any:
    given = f"{kind.__name__}.{name}"
    if given in examples():
        return examples()[given]
    if isinstance(default, bool):
        return not default
    for part in settings_in(hint):
        shown = [one for one in fields(part) if _is_required(one)] or fields(part)[:1]
        return {one.name: _example(part, one.name, own_keys(part)[one.name], _default(one)) for one in shown}
    named = () if isinstance(default, list) else (name for one in registries_of(hint) for name in one.declared)
    choices = [*(get_args(hint) if get_origin(hint) is Literal else ()), *named]
    return next((choice for choice in choices if choice != default), default)


def flow(value: Any) -> str:
    """Return a value as YAML on one line."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {flow(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(flow, value)) + "]"
    if isinstance(value, str) and not any(mark in value for mark in ":#{}[],&*!|>'\"%@`"):
        return value
    return json.dumps(value)


def find(name: str) -> list[RecipeKey]:
    """Return the key of a dotted name and those below it; all keys for an empty name."""
    path = split_key(name) if name else ()
    found = [key for key in all_keys() if key.path[: len(path)] == path]
    if not found:
        raise UsageError(f"recipe key {name!r}: there is none; {nearest(name, [key.name for key in all_keys()])}")
    return found


def json_schema() -> dict[str, Any]:
    """Return the reference as a JSON schema (draft 7), by which editors complete and check recipes."""
    kinds: dict[str, Any] = {}
    top = _object_schema(JobSettings, kinds)
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "A recipe of prunekit",
        **top,
        "definitions": dict(sorted(kinds.items())),
    }


def _object_schema(kind: Any, kinds: dict[str, Any]) -> dict[str, Any]:
    said, known = meanings(kind), {field.name: field for field in fields(kind)}
    properties: dict[str, Any] = {}
    for name, hint in own_keys(kind).items():
        properties[name] = _schema(hint, kinds) | {"description": said.get(name, "")}
        if not _is_required(known[name]):
            properties[name]["default"] = _default(known[name])
    required = [name for name in properties if _is_required(known[name])]
    further = False if beside_of(kind) is None else {"type": "number"}
    paragraph = " ".join((inspect.getdoc(kind) or "").split("\n\n")[0].split())
    schema = {"type": "object", "description": paragraph, "additionalProperties": further}
    return schema | {"properties": properties} | ({"required": required} if required else {})


def _schema(hint: Any, kinds: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of an annotation."""
    if get_origin(hint) in (UnionType, Union):
        return {"anyOf": [_schema(part, kinds) for part in get_args(hint)]}
    if get_origin(hint) is Annotated:
        kind, *constraints = get_args(hint)
        if (registry := next((one.registry for one in constraints if isinstance(one, Registered)), None)) is not None:
            # Not the built-in names alone: others may be installed, or are the user's own files.
            return {"anyOf": [{"enum": list(registry.declared)}, {"type": "string"}]}
        bounds = {BOUNDS[type(one)]: getattr(one, fields(one)[0].name) for one in constraints if type(one) in BOUNDS}
        return _schema(kind, kinds) | bounds
    if get_origin(hint) is Literal:
        return {"enum": list(get_args(hint))}
    if get_origin(hint) is tuple:
        return {"type": "array", "items": _schema(get_args(hint)[0], kinds)}
    if get_origin(hint) is dict:
        return {"type": "object", "additionalProperties": _schema(get_args(hint)[1], kinds)}
    if is_dataclass(hint):
        name = str(hint.__name__)  # type: ignore[union-attr]
        if name not in kinds:
            kinds[name] = {}  # it is being described: settings may hold their own kind
            kinds[name] = _object_schema(hint, kinds)
        return {"anyOf": [{"$ref": f"#/definitions/{name}"}]}  # beside a reference, draft 7 sees nothing
    return {"type": TYPES[hint]} if hint in TYPES else {}


BOUNDS = {
    Gt: "exclusiveMinimum", Ge: "minimum", Lt: "exclusiveMaximum", Le: "maximum", MinLen: "minItems", MaxLen: "maxItems"
}  # fmt: skip
TYPES = {int: "integer", float: "number", str: "string", bool: "boolean", Path: "string", type(None): "null"}


def schema_text() -> str:
    """Return the text of the JSON schema's file."""
    return json.dumps(json_schema(), indent=1) + "\n"
