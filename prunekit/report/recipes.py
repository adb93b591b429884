"""What differs between the recipes of several runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

WITHOUT_EFFECT = ("output", "checkpoint", "watch")
"""Parts of a recipe that change nothing in what comes out."""
ABSENT = "–"


@dataclass(frozen=True)
class Differences:
    """Keys of recipes whose values differ, with the value of each recipe as text.

    Attributes:
        rows: (key, values).
        missing: keys that recipes of another version do not have, and on which the others agree.
    """

    rows: tuple[tuple[str, tuple[str, ...]], ...]
    missing: tuple[str, ...]


def differences(recipes: Sequence[Mapping[str, Any]]) -> Differences:
    """Compares recipes key by key, in the order of the first that has the key.

    A section that one recipe leaves out (`null`) and another fills is a difference in each of its keys.
    """
    flats = [dict(_flat(recipe)) for recipe in recipes]
    # A section that is null here has keys elsewhere: those say what differs.
    sections = {key.rpartition(".")[0] for flat in flats for key in flat}
    rows, missing = [], []
    for key in dict.fromkeys(key for flat in flats for key in flat):
        if key.split(".")[0] in WITHOUT_EFFECT or key in sections:
            continue
        values = [flat.get(key, ABSENT) for flat in flats]
        if len(set(values)) > 1:
            known = {flat[key] for flat in flats if key in flat}
            emptied = any(_emptied(flat, key) for flat in flats)
            if len(known) > 1 or emptied:
                rows.append((key, tuple(values)))
            else:
                missing.append(key)
    return Differences(tuple(rows), tuple(missing))


def _emptied(flat: Mapping[str, str], key: str) -> bool:
    """Whether a section that would hold the key is null in a recipe."""
    parts = key.split(".")
    return any(flat.get(".".join(parts[:length])) == "null" for length in range(1, len(parts)))


def _flat(recipe: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for key, value in recipe.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", _word(value)


def _word(value: Any) -> str:
    """A value as a recipe has it."""
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
