"""`prunekit list`: criteria, budgets, runtimes, models and whatever else a recipe can choose."""

from collections.abc import Callable, Iterator
from fnmatch import fnmatch
from typing import Any, get_args

import click

from prunekit.cli.groups import register_command
from prunekit.cli.options import Zoo, common_options
from prunekit.cli.output import Console
from prunekit.known_names import BUDGETS, CRITERIA, FORMATS, RUNTIMES, SECTIONS, TASKS
from prunekit.utils.availability import unusable
from prunekit.utils.display import table
from prunekit.utils.registry import Registry

Row = dict[str, Any]


def _criteria() -> Iterator[Row]:
    for name, facts in CRITERIA.facts().items():
        needs = list(facts.get("needs", ()))
        yield {
            "name": name,
            "needs": needs,
            "label_free": "labels" not in needs,
            "comparable": facts.get("comparable", False),
            "measures": facts.get("measures", ""),
            "paper": facts.get("paper", ""),
        }


def _with_availability(registry: Registry[Any]) -> Callable[[], Iterator[Row]]:
    """Return a function that yields what is registered, and whether it can be used here; built-in ones unimported."""

    def rows() -> Iterator[Row]:
        for name in registry.installed:
            registry.get(name)  # only its package knows its facts
        for name, facts in registry.facts().items():
            about = (registry is RUNTIMES and facts.get("runs")) or facts["about"]
            missing = unusable(facts)
            yield {"name": name, "about": about, "usable": not missing, "missing": missing}

    return rows


def _devices() -> Iterator[Row]:
    from prunekit.pruning.latency.device_clock import device_rows

    yield from device_rows()


def _recipes() -> Iterator[Row]:
    from prunekit.recipe.loading import recipe_names, recipe_summary

    yield from ({"name": name, "about": recipe_summary(name)} for name in recipe_names())


def _models() -> Iterator[Row]:
    from prunekit.errors import PrunekitError
    from prunekit.models.zoo import zoo_names

    for zoo in get_args(Zoo):
        try:
            names = zoo_names(zoo)
        except PrunekitError as error:  # an extra that is not installed
            click.echo(f"prunekit: note: models of {zoo} are not listed: {error}", err=True)
            continue
        yield from ({"name": name, "zoo": zoo} for name in names)


def _of(registry: Registry[Any], *keys: str) -> Callable[[], Iterator[Row]]:
    """Return a function that yields the rows of a registry, with these keys of its registrations."""

    def rows() -> Iterator[Row]:
        for name, facts in registry.facts().items():
            yield {"name": name, **{key: facts.get(key, "") for key in keys}}

    return rows


KINDS: dict[str, Callable[[], Iterator[Row]]] = {
    "criteria": _criteria,
    "budgets": _of(BUDGETS, "unit", "about"),
    "runtimes": _with_availability(RUNTIMES),
    "devices": _devices,
    "formats": _with_availability(FORMATS),
    "tasks": _of(TASKS, "data", "measures"),
    "sections": _of(SECTIONS, "about"),
    "recipes": _recipes,
    "models": _models,
}


@register_command("list", about="Show criteria, budgets, runtimes, formats, models ...", place=16)
@click.argument("what", type=click.Choice(list(KINDS)))
@click.argument("pattern", default="*", metavar="[PATTERN]")
@common_options
def list_command(what: str, pattern: str, as_json: bool) -> None:
    """List what a recipe can choose, a line each; PATTERN is a glob over the names, such as 'resnet*'.

    Devices are other machines, with the kits that they measured. What packages and you register is included. A job
    collects by itself what its criterion needs; criteria that don't need labels work on any images.
    """
    rows = [row for row in KINDS[what]() if fnmatch(row["name"], pattern)]
    headings = tuple(rows[0]) if rows else ()
    cells = [tuple(map(_text, row.values())) for row in rows]
    shown = (
        table(headings, cells, text=headings)
        if rows
        else f"no {what} are called {pattern}"
        if pattern != "*"
        else f"no {what} yet"
    )
    Console(as_json).result({what: rows}, shown)


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return ", ".join(value) if isinstance(value, list) else str(value)
