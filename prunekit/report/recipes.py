"""What differs between the recipes of several runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from prunekit.artifacts import flat
from prunekit.settings.job import WITHOUT_EFFECT

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
    flats = [{key: _word(value) for key, value in flat(recipe)} for recipe in recipes]
    # A section that is null here has keys elsewhere: those say what differs.
    sections = {key.rpartition(".")[0] for one in flats for key in one}
    rows, missing = [], []
    for key in dict.fromkeys(key for one in flats for key in one):
        if key.split(".")[0] in WITHOUT_EFFECT or key in sections:
            continue
        values = [one.get(key, ABSENT) for one in flats]
        if len(set(values)) > 1:
            known = {one[key] for one in flats if key in one}
            emptied = any(_emptied(one, key) for one in flats)
            if len(known) > 1 or emptied:
                rows.append((key, tuple(values)))
            else:
                missing.append(key)
    return Differences(tuple(rows), tuple(missing))


def _emptied(flat: Mapping[str, str], key: str) -> bool:
    """Whether a section that would hold the key is null in a recipe."""
    parts = key.split(".")
    return any(flat.get(".".join(parts[:length])) == "null" for length in range(1, len(parts)))


def _word(value: Any) -> str:
    """A value as a recipe has it."""
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
