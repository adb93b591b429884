"""A run in one sentence, and the command that makes it again."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from io import StringIO
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from prunekit import numbers
from prunekit.measure.wording import doubtful
from prunekit.registry import named
from prunekit.report.headline import capital, guessing, reference, scores, speedup
from prunekit.report.run import Run
from prunekit.settings.job import JobSettings
from prunekit.user_code import is_reference

PROVEN = 1e-9
"""Largest relative difference of masked and compact model that counts as rounding in float64."""
FACTORY = "FILE.py:FACTORY"


@dataclass(frozen=True)
class Again:
    """How a run is made again."""

    command: str
    said: str


def sentence(metrics: Mapping[str, Any]) -> str:
    """What came out, e.g. "1.74× faster on this CPU (eager, batch 1), top-1 98.52 % against 98.89 %, 55.8 % fewer
    parameters, verified."; empty where nothing was measured.
    """
    text = ", ".join(_parts(metrics)).replace(" %", "\u00a0%")
    return f"{capital(text)}." if text else ""


def _parts(metrics: Mapping[str, Any]) -> Iterator[str]:
    dense, pruned, against = (metrics.get(name) or {} for name in ("dense", "pruned", reference(metrics)))
    if (row := speedup(metrics)) is not None:
        yield _speed(row)
    name, label = scores(metrics)[0]
    if numbers.is_number(pruned.get(name)) and numbers.is_number(against.get(name)):
        chance = " (at chance, so that it says nothing)" if guessing(metrics) else ""
        yield f"{label} {numbers.percent(pruned[name], 2)} against {numbers.percent(against[name], 2)}{chance}"
    before, after = dense.get("params"), pruned.get("params")
    if numbers.is_number(before) and numbers.is_number(after) and before:
        yield f"{numbers.share(abs(1 - after / before))} {'fewer' if after <= before else 'more'} parameters"
    parity = metrics.get("parity", {}).get("max_relative_difference")
    if numbers.is_number(parity) and parity <= PROVEN:
        yield "verified"


def _speed(row: Mapping[str, Any]) -> str:
    ratio, device = row["median"], row.get("device", "cpu")
    where = "on this CPU" if device == "cpu" else f"on {device}"
    change = f"{numbers.factor(ratio)} faster" if ratio >= 1 else f"{numbers.factor(1 / ratio)} slower"
    unstable = f",{doubtful(row)}" if doubtful(row) else ""
    return f"{change} {where} ({row.get('runtime', 'eager')}, batch {row.get('batch', '–')}{unstable})"


def again(run: Run, job: str | None = None) -> Again | None:
    """The command that runs the recipe of a run's folder once more; None where it has none.

    Args:
        run: whose folder it is.
        job: the command's name; None: as its metrics say.
    """
    if run.recipe is None:
        return None
    job = job or ("prune" if run.metrics.get("fine_tuned") is False else "finetune")
    command = f"prunekit {job} {shlex.quote(str(run.folder / 'recipe.yaml'))}"
    recipe = recipe_of(run)
    own = dict(_own(recipe))
    words = [f"--{name} {shlex.quote(reference)}" for name, reference in own.items()]
    words += ["--allow-code"] * any(is_reference(name) for _, name, _ in named(JobSettings, recipe))
    said = "Makes this run again, in a new folder; on the same machine and versions"
    more = f", with your own {' and '.join(own)}" if own else ""
    return Again(" ".join([command, *words]), f"{said}{more}:")


def recipe_of(run: Run) -> dict[str, Any]:
    """The recipe of a run as nested dicts; {} where there is none, or none that can be read."""
    try:
        found = YAML(typ="safe", pure=True).load(StringIO(run.recipe or ""))
    except YAMLError:
        return {}
    return found if isinstance(found, dict) else {}


def _own(recipe: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Options of what a recipe has of the user's own code, each with its factory; only a model's is in the recipe."""
    if _at(recipe, "model", "zoo") == "own":
        named = str(_at(recipe, "model", "name"))
        yield "model", named if ":" in named else FACTORY
    if _at(recipe, "data", "source") == "own":
        yield "data", FACTORY
    if "own" in (_at(recipe, part, "optimizer") for part in ("baseline", "sparsify", "finetune")):
        yield "optimizer", FACTORY


def _at(recipe: Mapping[str, Any], part: str, key: str) -> Any:
    found = recipe.get(part)
    return found.get(key) if isinstance(found, Mapping) else None
