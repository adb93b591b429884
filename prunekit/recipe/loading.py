"""Loading of recipes: from a YAML file, or the name of a packaged recipe, to the checked settings of a job."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import reduce
from itertools import product
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from prunekit.errors import RecipeError, UsageError, nearest
from prunekit.reading.text_files import read_text
from prunekit.reading.yaml_files import MOST_BYTES
from prunekit.recipe.consistency import Finding, consistency
from prunekit.recipe.keys import allows, choices, describe, hint_at, key_path, keys_of, show, split_key
from prunekit.recipe.yaml_positions import Document, KeyPath, Origin, Problem, parse
from prunekit.settings.job import JobSettings, dump, yaml_value
from prunekit.settings.pruning import facts_without_code, other_budgets
from prunekit.settings.validation import meant_at
from prunekit.utils.files import StrPath
from prunekit.utils.registry import MappingKey, Registry, registered_names, replaced_at
from prunekit.utils.user_code import ForbiddenReference, is_reference

INSTALLED = Path(__file__).parent.parent / "recipes"
"""The recipes of the installed package; in a clone a link to the folder at its top, or a text file without links."""


def folder(installed: Path = INSTALLED) -> Path:
    """Return the folder of the packaged recipes, in the package or at the top of a clone."""
    return installed if installed.is_dir() else installed.parent.parent / "recipes"


def recipe_names() -> tuple[str, ...]:
    """Return the names of all packaged recipes."""
    return tuple(sorted(path.stem for path in folder().glob("*.yaml")))


def recipe_text(name: str) -> str:
    """Return the text of a packaged recipe, comments included."""
    path = _packaged(name)
    if path is None:
        raise UsageError(f"recipe {name!r}: prunekit comes with none of this name; {nearest(name, recipe_names())}")
    return path.read_text(encoding="utf-8")


def recipe_summary(name: str) -> str:
    """Return what a packaged recipe is for: the first line of its comment."""
    return recipe_text(name).partition("\n")[0].removeprefix("# ")


def _packaged(name: str) -> Path | None:
    plain = name.removesuffix(".yaml")
    return folder() / f"{plain}.yaml" if plain in recipe_names() else None


COMMAND = ("prune", "target", "command")
"""The key of a command for the shell, which is code as well."""


def load(path: StrPath, overrides: Overrides = (), *, allow_code: bool = False, runs_code: bool = True) -> JobSettings:
    """Read a recipe, apply overrides, and check all of it before anything runs.

    Args:
        path: a YAML 1.2 file, whose keys are the fields of `JobSettings` and of the settings inside it; or the name of
            a packaged recipe.
        overrides: `a.b=value` each, with the value in YAML and later ones winning; or values by key, `{"a.b": value}`.
        allow_code: whether code that the file names as `file.py:object`, instead of a registered name, may run. Code
            that an override names always may. Loading runs none.
        runs_code: whether the caller runs everything that the job names. If not, code that is not allowed is a problem
            only when something is about to run it.

    Relative paths are relative to the working directory. Data, weights and code that the file names, and that are not
    there, are looked for in the folder of the file; their paths are absolute then.

    Returns:
        The job, with the defaults filled in.

    Raises:
        RecipeError: the file cannot be read, or the recipe has problems, all of which are in the message: one a line,
            with file, line and column (or the override), the key, what was expected and what was given.
    """
    file = Path(path) if Path(path).is_file() else _packaged(str(path)) or Path(path)
    document = parse(_read(file), Origin(str(path), 1, 1))
    if not document.problems and not isinstance(document.values, Mapping):
        got = "an empty file" if document.values is None else show(document.values)
        text = f"expected a recipe, a mapping with the keys {', '.join(keys_of(()) or ())}, got {got}"
        document = Document(None, places=document.places, problems=(Problem(document.place(()), (), text),))
    if document.values is not None:
        document = reduce(apply_override, as_texts(overrides), document)
    folder = file.absolute().parent
    refused = not allow_code
    job = _with_absolute_paths(
        _validated(document, str(path), _code(document, folder, refused and runs_code)), document, folder
    )
    for key, name, registry in _named(job):
        at = (*key[:2], *key[3:]) if key[:3] == ("prune", "budget", "others") else key  # as recipes have it
        if (registry is None or is_reference(name)) and (place := _place(document, at)).line:
            there = name if registry is None else _reference(name, folder)
            where = f"{place}: {'.'.join(map(str, at))}"
            job = replaced_at(job, key, ForbiddenReference(there, where) if refused else there)
    return job


def _place(document: Document, path: KeyPath) -> Origin:
    return document.place(path, key=isinstance(path[-1], MappingKey))


def _code(document: Document, folder: Path, refused: bool) -> list[Finding]:
    """Return the problems of names of registered objects, and code that must not run."""
    found = []
    for path, name, registry in _named(document.values):
        written = (registry is None or is_reference(name)) and _place(document, path).line
        problem = None if registry is None else registry.problem(_reference(name, folder) if written else name)
        if problem is not None or (written and refused):
            found.append((path, problem or ForbiddenReference(name).refusal))
    return found


def _named(given: Any) -> Iterator[tuple[KeyPath, Any, Registry[Any] | None]]:
    """Yield the names of registered objects in a job or its values, and the target's command, without a registry."""
    yield from registered_names(JobSettings, given)
    for key in COMMAND:
        given = given.get(key) if isinstance(given, Mapping) else getattr(given, key, None)
    if given:
        yield COMMAND, given, None


def _reference(name: str, folder: Path) -> str:
    """Return a reference with an absolute path if its file is only in the recipe's folder."""
    file, colon, of_file = name.rpartition(":")
    return f"{folder / file}{colon}{of_file}" if file.endswith(".py") and _only_in(folder, Path(file)) else name


def with_overrides(job: JobSettings, overrides: Overrides) -> JobSettings:
    """Return a job with overrides applied, checked as a recipe is."""
    document = reduce(apply_override, as_texts(overrides), parse(dump(job), Origin(job.name)))
    made = _validated(document, job.name, _code(document, Path(), refused=False))
    there = {key: name for key, name, _ in _named(made)}
    for key, name, _ in _named(job):
        if isinstance(name, ForbiddenReference) and there.get(key) == name:
            made = replaced_at(made, key, name)
    return made


def grid_of(texts: Sequence[str]) -> dict[str, list[Any]]:
    """Return the values of each key of a grid, `a.b=value,value`, the values in YAML; raise UsageError for others."""
    grid = dict[str, list[Any]]()
    for text in texts:
        key, _, values = text.partition("=")
        document = parse(f"[{values}]", Origin(f"--grid {text!r}"))
        if document.problems or not document.values:
            raise UsageError(f"--grid: expected KEY=VALUE,VALUE, such as prune.budget.macs=0.3,0.5, got {text!r}")
        if key in grid:
            raise UsageError(f"--grid: {key} is given twice: expected all its values in one, {key}=VALUE,VALUE")
        grid[key] = document.values
    return grid


def combinations(job: JobSettings, grid: Mapping[str, Sequence[Any]]) -> dict[str, JobSettings]:
    """Return the job of every combination of a grid's values, by name, checked as recipes are; two alike are refused.

    The values of the last key change first.
    """
    found = dict[str, JobSettings]()
    if not grid or any(
        isinstance(values, str) or not isinstance(values, Sequence) or not values for values in grid.values()
    ):
        raise UsageError(f"grid: expected values by key, such as {{'prune.budget.macs': [0.3, 0.5]}}, got {grid!r}")
    for values in product(*grid.values()):
        chosen = dict(zip(grid, values, strict=True))
        name = " ".join(
            f"{key}={value if isinstance(value, str) else json.dumps(yaml_value(value, key))}"
            for key, value in chosen.items()
        )
        made = with_overrides(job, chosen)
        if same := [other for other, there in found.items() if there == made]:
            raise UsageError(f"--grid: {name} is the same as {same[0]}: expected combinations that differ")
        found[name] = made
    return found


def own_overrides(*, model: str | None = None, data: str | None = None) -> list[str]:
    """Return the overrides for the user's own model or data, `file.py:factory` each; None: those of the recipe."""
    given = []
    if model is not None:
        given += ["model.zoo=own", f"model.name={json.dumps(model)}", "model.arguments={}"]
    if data is not None:
        given += ["data.source=own", "data.root=null", "data.name=null", "data.columns=null", "data.download=false"]
    return given


def _with_absolute_paths(job: JobSettings, document: Document, folder: Path) -> JobSettings:
    """Return the job with absolute paths of what the recipe's file names, and what is only in its folder."""
    data, model = job.data, job.model
    for key in ("root", "tokenizer"):
        path = getattr(data, key)
        if path is not None and _only_in(folder, path) and document.place(("data", key)).line:
            data = replace(data, **{key: folder / path})
    named = Path(model.name)
    if model.zoo == "hf" and (folder / named).is_dir() and _only_in(folder, named):
        model = replace(model, name=str(folder / named)) if document.place(("model", "name")).line else model
    weights = None if model.weights is None else Path(model.weights)
    if weights is not None and weights.suffix and _only_in(folder, weights):  # a name of weights has no suffix
        model = replace(model, weights=str(folder / weights)) if document.place(("model", "weights")).line else model
    return replace(job, data=data, model=model)


def _only_in(folder: Path, path: Path) -> bool:
    return not path.is_absolute() and not path.exists() and (folder / path).exists()


def _read(path: Path) -> str:
    try:
        return read_text(path, "a recipe (a YAML file)", RecipeError, most=MOST_BYTES)
    except RecipeError as error:
        inside = path / "recipe.yaml"
        hint = _near(path) if not os.path.lexists(path) else f"; did you mean {inside}?" if inside.is_file() else ""
        raise RecipeError(f"{error}{hint}") from error


def _value_at(path: KeyPath, values: Any) -> Any:
    return reduce(lambda inner, key: inner[key], path, values)


def _near(path: Path) -> str:
    if path.stem in recipe_names():
        return f"; prunekit comes with a recipe of this name: give {path.stem} for the path"
    try:
        recipes = [str(other) for other in path.parent.iterdir() if other.suffix in (".yaml", ".yml")]
    except OSError:
        recipes = []
    recipes += recipe_names() if path.parent == Path() else ()
    hint = nearest(str(path), recipes) if recipes else ""
    return f"; {hint}" if hint.startswith("did you mean") else ""


def _validated(document: Document, name: str, code: Iterable[Finding]) -> JobSettings:
    if document.values is None:
        raise _error(document.problems, name)
    problems = {problem.path or str(problem): problem for problem in document.problems}
    for path, text, at_key in _findings(document.values, code):
        problems.setdefault(path, Problem(document.place(path, key=at_key), path, text))
    if problems:
        raise _error(problems.values(), name)
    return TypeAdapter(JobSettings).validate_json(json.dumps(_as_settings(document.values)), strict=True)


def _as_settings(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the values of a recipe in the form of the settings, where budgets of registries are in `others`.

    Settings raise at budgets without meaning; these are left out here, and reported with their line and column.
    """
    prune = values.get("prune")
    budget = prune.get("budget") if isinstance(prune, Mapping) else None
    if not isinstance(prune, Mapping) or not isinstance(budget, Mapping):
        return values
    others = other_budgets(budget)
    own = {name: value for name, value in budget.items() if name not in others}
    sound = {name: value for name, value in others.items() if facts_without_code(name).problem(value) is None}
    return {**values, "prune": {**prune, "budget": {**own, "others": sound}}}


def _findings(values: Mapping[str, Any], code: Iterable[Finding]) -> Iterator[tuple[KeyPath, str, bool]]:
    """Yield key path, text, and whether the key itself is wrong; the most telling finding of a key first."""
    yield from ((path, text, True) for path, text in _unknown_keys(values, ()))
    yield from ((path, text, isinstance(path[-1], MappingKey)) for path, text in code)
    wrong = list(_wrong_types(values))
    yield from ((path, text, False) for path, text in (*consistency(values, typed=not wrong), *wrong))


def _wrong_types(values: Mapping[str, Any]) -> Iterator[Finding]:
    try:
        # JSON's strict mode takes whole numbers for floats, lists for tuples and text for paths, and nothing else.
        TypeAdapter(JobSettings).validate_json(json.dumps(_as_settings(values)), strict=True)
    except ValidationError as error:
        for entry in error.errors(include_url=False, include_input=False):
            path = key_path(entry["loc"], values)
            missing = entry["type"] == "missing"
            if not missing and keys_of(path) and isinstance(_value_at(path, values), Mapping):
                continue  # a mapping is allowed here: problems inside it are reported themselves
            if entry["type"] == "too_short" and len(_value_at(path, values)) >= entry["ctx"]["min_length"]:
                continue  # pydantic counts only valid items; invalid ones are reported themselves
            yield path, _wrong_value(path, missing, values)


ELSEWHERE: Mapping[KeyPath, str] = {
    (
        "prune",
        "vocabulary",
    ): "recipes prune no tokens: make the model smaller first, in Python, by prunekit.Vocabulary, "
    "save model and tokenizer into a folder, and give that as model.name",
}
"""Keys that a recipe has not, though `prune` has such an argument, and what to do."""


def _unknown_keys(values: Any, path: KeyPath) -> Iterator[Finding]:
    allowed = keys_of(path)
    if allowed is None or not isinstance(values, Mapping):
        return
    for key, value in values.items():
        if allows(path, key):
            yield from _unknown_keys(value, (*path, key))
        else:
            known = ELSEWHERE.get((*path, key)) or nearest(key, allowed)
            yield (*path, key), f"unknown key; {known}"


def _wrong_value(path: KeyPath, missing: bool, values: Any) -> str:
    expected = f"expected {describe(hint_at(path))}"
    if missing:
        return f"{expected}, got nothing; this key is required"
    value = _value_at(path, values)
    hint = nearest(str(value), choices(path)) if choices(path) else ""
    meant = f"; {hint}" if hint.startswith("did you mean") else meant_at(hint_at(path), value)
    return f"{expected}, got {show(value)}{meant}"


def _error(problems: Iterable[Problem], name: str) -> RecipeError:
    # Problems of the file in reading order, then those of overrides, which have no line.
    ordered = sorted(problems, key=lambda problem: (not problem.origin.line, problem.origin))
    lines = list(map(str, ordered))
    count = f"{len(lines)} problem{'s' if len(lines) > 1 else ''}"
    return RecipeError("\n".join([f"{name}: {count} in the recipe", *lines]))


Overrides = Sequence[str] | Mapping[str, Any]
"""`a.b=value` each, the value in YAML, where later ones win; or values by dotted key."""
MOST_PARTS = 32
"""Parts of a key: how deep an override may reach."""


def apply_override(document: Document, override: str) -> Document:
    """Return a new document with one override applied, `a.b=value`.

    The value is YAML (`null` unsets a key). Below a mapping with free keys, such as `prune.ratios`, the rest of the key
    is one name, which may contain dots.
    """
    origin = Origin(f"override {override!r}")
    key, equals, text = override.partition("=")
    path = split_key(key.strip())
    if not equals or not all(path):
        return _with_problem(document, Problem(origin, (), "expected key=value, such as prune.budget.macs=0.4"))
    if len(path) > MOST_PARTS:
        return _with_problem(document, Problem(origin, (), f"expected a key of at most {MOST_PARTS} parts"))
    value = parse(text, origin)
    if value.problems:
        return _with_problem(document, *(Problem(origin, path, problem.text) for problem in value.problems))
    return _put(document, path, value)


def as_texts(overrides: Overrides) -> list[str]:
    """Return overrides as `key=value`; raise UsageError if a recipe cannot hold a value."""
    if not isinstance(overrides, Mapping):
        return list(overrides)
    try:
        return [f"{key}={json.dumps(yaml_value(value, key), ensure_ascii=False)}" for key, value in overrides.items()]
    except RecursionError as error:
        raise UsageError("overrides: expected plain values, got lists or mappings that are very deep") from error


def _put(document: Document, path: KeyPath, value: Document) -> Document:
    values = copy.deepcopy(document.values)
    target: Any = values
    created: dict[KeyPath, Origin] = {}
    for depth, key in enumerate(path[:-1], start=1):
        if target.get(key) is None:
            target[key] = {}
            created[path[:depth]] = value.places[()]
        if not isinstance(target[key], dict):
            name = ".".join(map(str, path[:depth]))
            text = f"expected {name} to be a mapping, but it holds a value; set {name} itself"
            return _with_problem(document, Problem(value.places[()], path, text))
        target = target[key]
    target[path[-1]] = value.values
    keys = _replaced(document.keys, path, {(): value.places[()], **value.keys})
    places = _replaced({**document.places, **created}, path, value.places)
    return replace(document, values=values, keys=keys, places=places)


def _replaced(
    origins: Mapping[KeyPath, Origin], path: KeyPath, new: Mapping[KeyPath, Origin]
) -> Mapping[KeyPath, Origin]:
    """Return the origins with everything at and below `path` replaced by that of the override."""
    kept = {key: origin for key, origin in origins.items() if key[: len(path)] != path}
    return kept | {(*path, *key): origin for key, origin in new.items()}


def _with_problem(document: Document, *problems: Problem) -> Document:
    return replace(document, problems=(*document.problems, *problems))
