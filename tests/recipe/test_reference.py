"""The recipe reference: whole, true, and as it would be written now."""

from __future__ import annotations

import json
import operator
from dataclasses import fields, is_dataclass
from importlib.util import find_spec
from pathlib import Path
from runpy import run_path
from typing import Any, get_args, get_type_hints

import pytest
from click.testing import CliRunner
from pydantic import TypeAdapter
from ruamel.yaml import YAML

from prunekit.cli import cli
from prunekit.recipe.loading import INSTALLED, apply_override, load
from prunekit.recipe.reference import RecipeKey, all_keys, examples, flow, json_schema, schema_text
from prunekit.recipe.yaml_positions import Document
from prunekit.settings.job import JobSettings

WRITER = Path(__file__).parents[2] / ".ci" / "write_reference.py"
AGAIN = "the settings have changed: write the reference anew with `python .ci/write_reference.py`"
KINDS = {"object": dict, "array": list, "string": str, "integer": int, "number": (int, float), "boolean": bool}


def problems(value: Any, schema: dict[str, Any], whole: dict[str, Any], path: str = "") -> list[str]:
    """What a JSON schema of the kinds that are used here finds wrong; as `jsonschema` would."""
    if "$ref" in schema:
        return problems(value, whole["definitions"][schema["$ref"].rpartition("/")[2]], whole, path)
    if "anyOf" in schema:
        found = [problems(value, one, whole, path) for one in schema["anyOf"]]
        return [] if [] in found else found[0]
    if "enum" in schema:
        return [] if value in schema["enum"] else [f"{path}: {value!r} is none of {schema['enum']}"]
    kind = schema.get("type")
    if kind == "null":
        return [] if value is None else [f"{path}: not null"]
    if kind is not None and (not isinstance(value, KINDS[kind]) or (isinstance(value, bool) and kind != "boolean")):
        return [f"{path}: {value!r} is no {kind}"]
    wrong = [f"{path}: {key} is missing" for key in schema.get("required", []) if key not in value]
    if kind == "object":
        known = schema.get("properties", {})
        for key, inner in value.items():
            if key in known or isinstance(schema["additionalProperties"], dict):
                wrong += problems(inner, known.get(key, schema["additionalProperties"]), whole, f"{path}.{key}")
            else:
                wrong.append(f"{path}: {key} is not known")
    if kind == "array":
        wrong += [one for item in value for one in problems(item, schema["items"], whole, path)]
        if not schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", 99):
            wrong.append(f"{path}: {len(value)} items")
    bounds = {
        "minimum": operator.ge,
        "exclusiveMinimum": operator.gt,
        "maximum": operator.le,
        "exclusiveMaximum": operator.lt,
    }
    if not all(holds(value, schema[name]) for name, holds in bounds.items() if name in schema):
        wrong.append(f"{path}: {value} is out of bounds")
    return wrong


def test_page_and_schema_are_as_they_would_be_written_now() -> None:
    writer = run_path(str(WRITER))
    assert writer["PAGE"].read_text(encoding="utf-8") == writer["page"](), AGAIN
    assert writer["SCHEMA"].read_text(encoding="utf-8") == schema_text(), AGAIN


@pytest.mark.parametrize("key", all_keys(), ids=lambda key: key.name)
def test_every_key_has_a_meaning_and_an_example_that_holds(key: RecipeKey) -> None:
    assert key.meaning.endswith((".", ")")), f"{key.name}: write what it means below the field in prunekit.settings"
    assert key.meaning[0].isupper() or key.meaning[0] == "`"
    assert key.example is not None, f"{key.name}: give an example in prunekit/recipe/examples.yaml"
    TypeAdapter(key.hint).validate_json(json.dumps(key.example), strict=True)
    example = apply_override(Document({}, places={(): None}), f"{key.name}={flow(key.example)}")  # type: ignore[dict-item]
    assert not example.problems
    value = example.values
    for part in key.path:
        value = value[part]
    assert value == key.example


def test_examples_are_of_keys_that_there_are() -> None:
    known = {name for kind in [JobSettings, *kinds_in(JobSettings)] for name in named(kind)}
    assert set(examples()) <= known


def kinds_in(kind: Any) -> list[Any]:
    """All settings below a dataclass of settings."""
    inner = [part for hint in get_type_hints(kind).values() for part in (hint, *get_args(hint)) if is_dataclass(part)]
    return [one for part in inner for one in (part, *kinds_in(part))]


def named(kind: Any) -> list[str]:
    return [f"{kind.__name__}.{field.name}" for field in fields(kind)]


@pytest.mark.parametrize("recipe", sorted(INSTALLED.glob("*.yaml")), ids=lambda path: path.stem)
def test_packaged_recipes_meet_the_schema(recipe: Path) -> None:
    values = YAML(typ="safe", pure=True).load(recipe.read_text(encoding="utf-8"))
    assert problems(values, json_schema(), json_schema()) == []
    if find_spec("jsonschema") is not None:
        from jsonschema import Draft7Validator

        Draft7Validator.check_schema(json_schema())
        Draft7Validator(json_schema()).validate(values)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"name": "a"}, ": model is missing"),
        ({"name": "a", "model": {"name": "b", "weight": "c"}}, ".model: weight is not known"),
        (
            {"name": "a", "model": {"name": "b"}, "prune": {"budget": {"macs": 2}}},
            ".prune.budget.macs: 2 is out of bounds",
        ),
        ({"name": "a", "model": {"name": "b"}, "finetune": {"epochs": 1.5}}, ".finetune.epochs: 1.5 is no integer"),
        ({"name": "a", "model": {"name": "b"}, "latency": {"batches": []}}, ".latency.batches: 0 items"),
    ],
)
def test_the_schema_finds_what_is_wrong(values: dict[str, Any], expected: str) -> None:
    assert problems(values, json_schema(), json_schema()) == [expected]
    if find_spec("jsonschema") is not None:
        from jsonschema import Draft7Validator

        assert list(Draft7Validator(json_schema()).iter_errors(values))


def test_every_section_tells_its_keys_to_the_command() -> None:
    shown = CliRunner().invoke(cli, ["recipe", "reference", "prune.budget"]).stdout
    assert "prune.budget.macs\n  a number above 0 and of at most 1, or null; default `null`." in shown
    assert "prune.budget.macs=0.4" in shown
    listed = json.loads(CliRunner().invoke(cli, ["recipe", "reference", "baseline.lr", "--json"]).stdout)["keys"]
    assert [(row["key"], row["default"]) for row in listed] == [("baseline.lr", 0.05)]
    assert len(CliRunner().invoke(cli, ["recipe", "reference"]).stdout) > 10_000
    result = CliRunner().invoke(cli, ["recipe", "reference", "prune.buget"])
    assert result.exit_code == 2
    assert "did you mean 'prune.budget'" in result.output
    assert json.loads(CliRunner().invoke(cli, ["recipe", "schema"]).stdout) == json_schema()


def test_defaults_of_the_reference_are_those_of_the_settings(tmp_path: Path) -> None:
    """A recipe that says every default by name is the one that says none."""
    short = tmp_path / "short.yaml"
    short.write_text("name: a\nmodel: {name: resnet18, weights: IMAGENET1K_V1}\n")
    defaults = {key.path: key.default for key in all_keys()}
    told = [
        f"{key.name}={flow(key.default)}"
        for key in all_keys()
        if not key.required and all(defaults[key.path[:end]] == {} for end in range(1, len(key.path)))
    ]
    assert len(told) > 60
    assert load(short, told) == load(short)
