"""The reference of every key of a recipe, with type, default, meaning and example: a page, and a JSON schema.

Both are made from the settings: annotations say what a key may hold, and the text below a field what it means. After a
change of the settings run `python -m prunekit.recipe.reference`, which writes them again.
"""

import ast
import inspect
import json
import re
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from functools import cache
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt, MaxLen, MinLen

from prunekit.errors import UsageError, nearest
from prunekit.recipe.keys import beside_of, describe, own_keys, settings_in, split_key
from prunekit.recipe.yaml_positions import KeyPath
from prunekit.settings.job import JobSettings, changed_values, yaml_value
from prunekit.utils.files import write_text
from prunekit.utils.registry import Registered

PAGE = Path(__file__).parent.parent / "guide" / "reference" / "recipe.md"
SCHEMA = Path(__file__).parent / "schema.json"
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

`python -m prunekit.recipe.reference` makes this page from `prunekit.settings`.

| | sections |
|---|---|"""
EXAMPLES: dict[str, Any] = {
    "JobSettings.name": "resnet34-half",
    "JobSettings.activations": {"modules": ["layer1.*.relu"], "target": 0.5},
    "JobSettings.export": ["onnx", "openvino"],
    "JobSettings.device": "cuda:0",
    "JobSettings.threads": 4,
    "LatencySettings.runtimes": ["eager", "onnxruntime"],
    "Target.command": "scp -r {kit} pi5:k && ssh pi5 python3 k/measure.py && scp pi5:k/times.json {kit}",
    "LatencySettings.dtypes": ["fp32", "bf16"],
    "LatencySettings.memory_formats": ["contiguous", "channels_last"],
    "ModelSettings.name": "resnet18",
    "ModelSettings.arguments": {"zero_init_residual": True},
    "ModelSettings.weights": "resnet18.safetensors",
    "ModelSettings.origin": "ask the team of the first floor",
    "ModelSettings.head": "causal_lm",
    "DataSettings.root": "photos",
    "DataSettings.name": "CIFAR10",
    "DataSettings.images": 1000,
    "DataSettings.tokenizer": "models/SmolLM2-135M-Instruct",
    "DataSettings.window": 512,
    "DataSettings.columns": ["image", "label"],
    "DataSettings.image_size": 224,
    "DataSettings.mean": [0.485, 0.456, 0.406],
    "DataSettings.std": [0.229, 0.224, 0.225],
    "DataSettings.augment": "crop_flip",
    "DataSettings.max_corrupt": 0.01,
    "DataSettings.workers": 4,
    "DataSettings.origin": "ask the team of the first floor",
    "AugmentSettings.scale": [0.3, 1.0],
    "AugmentSettings.flip": 0.5,
    "AugmentSettings.erase": 0.25,
    "BudgetSettings.channels": 0.5,
    "BudgetSettings.macs": 0.4,
    "BudgetSettings.params": 0.5,
    "BudgetSettings.size_mb": 12,
    "BudgetSettings.latency_ms": 8,
    "BudgetSettings.speedup": 2,
    "BudgetSettings.memory_mb": 40,
    "BudgetSettings.max_drop": 0.01,
    "PruneSettings.budget": {"macs": 0.4, "params": 0.5},
    "PruneSettings.round_to": 8,
    "PruneSettings.min_channels": 16,
    "PruneSettings.ignore": ["conv1", "layer4.*"],
    "PruneSettings.ratios": {"layer1.*.conv1": 0.75},
    "PruneSettings.depth": True,
    "PruneSettings.min_blocks": 1,
    "PatternSettings.kind": "2:4",
    "PatternSettings.sparsity": 0.8,
    "PatternSettings.block": [4, 1],
    "PatternSettings.layers": {"layer4.*": 0.9},
    "PatternSettings.ignore": ["layer1.*"],
    "ScheduleSettings.masked_decay": 0.001,
    "ScheduleSettings.end": 6,
    "ScheduleSettings.rounds": 8,
    "ScheduleSettings.every": 0.5,
    "ScheduleSettings.freeze": 8,
    "DistillSettings.temperature": 2.0,
    "DistillSettings.labels": 0.5,
    "DistillSettings.blend": False,
    "TrainSettings.fake_quantize": "int8",
    "TrainSettings.label_smoothing": 0.1,
    "TrainSettings.mixup": 0.2,
    "TrainSettings.cutmix": 1.0,
    "TrainSettings.norms": "running",
    "TrainSettings.accumulate": 4,
    "AdapterSettings.modules": ["*.mlp.*"],
    "FeatureSettings.modules": ["layer*"],
    "RegularizerSettings.strength": 0.001,
    "AverageSettings.start": 0.5,
    "AverageSettings.every": 10,
    "AverageSettings.lr": 0.005,
    "AverageSettings.statistics": "recalibrated",
    "ClampSettings.limit": 0.1,
    "ClampSettings.modules": ["layer4.*"],
    "ActivationSettings.modules": ["layer1.*.relu"],
    "ActivationSettings.threshold": 0.05,
    "ActivationSettings.target": 0.5,
    "ActivationSettings.overall": 0.6,
    "CheckpointSettings.every_steps": 500,
}
"""Examples of keys whose default is a bad one; of others the default, or another choice, is the example."""


@dataclass(frozen=True)
class RecipeKey:
    """One key of a recipe."""

    path: KeyPath  # its key path
    hint: Any  # annotation of its value
    required: bool  # whether it must be given; then there is no default
    default: Any  # as plain values
    meaning: str  # in words
    example: Any  # a value, as plain values
    home: KeyPath  # key path under which it is described, if several sections have the same keys

    @property
    def name(self) -> str:
        """Its path with dots."""
        return ".".join(map(str, self.path))

    @property
    def allowed(self) -> str:
        """The allowed values, in words."""
        words = describe(self.hint, brief=True)
        names = [f"`{name}`" for registry in _registries(self.hint) for name in registry.declared]
        return f"{words} (built in: {', '.join(names)})" if names else words

    @property
    def text(self) -> str:
        """Type, default, meaning and example in a paragraph."""
        default = "required" if self.required else f"default `{flow(self.default)}`"
        return f"{self.allowed}; {default}. {self.meaning} Example: `{self.name}={flow(self.example)}`."

    @property
    def entry(self) -> str:
        """Name, default, allowed values and meaning, as a line of the page."""
        inner = next((one.home[:-1] for one in all_keys() if one.path[:-1] == self.path), None)
        name = f"**`{self.name}`**" if inner is None else f"[**`{self.name}`**]({_anchor(inner)})"
        values = "" if isinstance(self.default, bool) else brief(self.hint, self.meaning).removeprefix("section")
        values = (
            re.sub("^(integer|number) ", "", values) if self.default is not None else values
        )  # the default shows it
        default = "required" if self.required else f"default `{flow(self.default)}`"
        shown = inner is None and isinstance(self.example, dict)
        example = f" Example: `{flow(self.example)}`." if shown else ""
        return f"- {name} ({default}{f', {values}' if values else ''}): {self.meaning}{example}"


@cache
def all_keys() -> tuple[RecipeKey, ...]:
    """Return every key, in the order of the settings, those of a section after it."""
    homes: dict[type, KeyPath] = {}
    for optional in (False, True):  # sections that are always there first, and those of fine-tuning
        for path, hint in sorted(_sections(JobSettings, (), optional), key=lambda one: one[0][:1] != ("finetune",)):
            homes.setdefault(hint, path)
    return tuple(_keys_of(JobSettings, (), homes))


def _sections(kind: Any, path: KeyPath, optional: bool) -> Iterator[tuple[KeyPath, Any]]:
    yield path, kind
    for name, hint in own_keys(kind).items():
        for part in settings_in(hint):
            if optional or part is hint:
                yield from _sections(part, (*path, name), optional)


def _keys_of(kind: Any, path: KeyPath, homes: Mapping[type, KeyPath]) -> Iterator[RecipeKey]:
    said, known = meanings(kind), {field.name: field for field in fields(kind)}
    for name, hint in own_keys(kind).items():
        required, default = _is_required(known[name]), _default(known[name])
        example = _example(kind, name, hint, default)
        yield RecipeKey((*path, name), hint, required, default, said.get(name, ""), example, (*homes[kind], name))
        for part in settings_in(hint):
            yield from _keys_of(part, (*path, name), homes)


def _is_required(field: Field[Any]) -> bool:
    return field.default is MISSING and field.default_factory is MISSING


def _registries(hint: Any) -> list[Any]:
    if get_origin(hint) is Annotated:
        own = [one.registry for one in hint.__metadata__ if isinstance(one, Registered)]
        return own or _registries(get_args(hint)[0])
    return [found for part in get_args(hint) if get_origin(hint) is not Literal for found in _registries(part)]


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


def _example(kind: Any, name: str, hint: Any, default: Any) -> Any:
    given = f"{kind.__name__}.{name}"
    if given in EXAMPLES:
        return EXAMPLES[given]
    if isinstance(default, bool):
        return not default
    for part in settings_in(hint):
        shown = [one for one in fields(part) if _is_required(one)] or fields(part)[:1]
        return {one.name: _example(part, one.name, own_keys(part)[one.name], _default(one)) for one in shown}
    named = () if isinstance(default, list) else (name for one in _registries(hint) for name in one.declared)
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


def page() -> str:
    """Return the reference as a page of the guide: contents, then a heading for each section."""
    sections: dict[KeyPath, list[RecipeKey]] = {}
    for key in all_keys():
        if key.path == key.home:
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
            same = {key.path[:-1] for key in all_keys() if key.home[:-1] == path != key.path[:-1]}
            named = ", ".join(f"`{'.'.join(map(str, other))}`" for other in sorted(same))
            lines += ["", textwrap.fill(f"The same keys are in {named}.", 120, **_IN_LISTS)] if same else []
            lines += ["", *(textwrap.fill(key.entry, 120, **_IN_LISTS) for key in sections[path])]
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
        if names := [name for registry in _registries(hint) for name in registry.declared]:
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


def main() -> None:
    """Write the page and the schema."""
    for path, text in ((PAGE, page()), (SCHEMA, schema_text())):
        write_text(path, text)


if __name__ == "__main__":
    main()
