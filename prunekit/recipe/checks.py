"""What a recipe's keys must be together; each check sees plain values, so that all problems come at once."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from prunekit.data.settings import DataSettings
from prunekit.recipe.document import KeyPath
from prunekit.recipe.schema import show

Finding = tuple[KeyPath, str]
DEVICE = re.compile(r"auto|cpu|mps|cuda(:\d+)?")
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def consistency(values: Mapping[str, Any]) -> Iterator[Finding]:
    """Every key path whose value does not fit the rest of the recipe, with what was expected."""
    yield from _finite(values, ())
    for check in (_names, _budget, _baseline, _data):
        yield from check(values)


def _section(values: Mapping[str, Any], name: str) -> Mapping[str, Any] | None:
    """A section of the recipe, {} when it is left out, None when it is no mapping (reported elsewhere)."""
    section = values.get(name, {})
    return section if isinstance(section, Mapping) else None


def _finite(value: Any, path: KeyPath) -> Iterator[Finding]:
    if isinstance(value, float) and not math.isfinite(value):
        yield path, f"expected a finite number, got {show(value)}"
    items = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from _finite(item, (*path, key))


def _names(values: Mapping[str, Any]) -> Iterator[Finding]:
    name, device = values.get("name", "unnamed"), values.get("device", "auto")
    if isinstance(name, str) and not NAME.fullmatch(name):
        expected = "a name for a folder (letters, digits, '.', '_' and '-', a letter or digit first)"
        yield ("name",), f"expected {expected}, got {show(name)}"
    if isinstance(device, str) and not DEVICE.fullmatch(device):
        yield ("device",), f"expected auto, cpu, cuda, cuda:n or mps, got {show(device)}"


def _budget(values: Mapping[str, Any]) -> Iterator[Finding]:
    prune = _section(values, "prune") or {}
    budget = prune.get("budget")
    if not isinstance(budget, Mapping):
        return
    given = [key for key in ("channels", "macs") if budget.get(key) is not None]
    if not given:
        yield ("prune", "budget"), "expected exactly one of 'channels' and 'macs', got neither"
    elif len(given) > 1:
        text = "expected exactly one of 'channels' and 'macs', got both; remove one or set it to null"
        yield ("prune", "budget", given[-1]), text


def _baseline(values: Mapping[str, Any]) -> Iterator[Finding]:
    model = _section(values, "model")
    if model and model.get("weights") is None and values.get("baseline") is None:
        text = "expected a mapping that says how to train the dense model, because model.weights is not given, got {}"
        yield ("baseline",), text.format("null" if "baseline" in values else "nothing")


def _data(values: Mapping[str, Any]) -> Iterator[Finding]:
    data = _section(values, "data")
    if data is None:
        return
    source = data.get("source", "digits")
    if source in ("imagefolder", "npz") and data.get("root") is None:
        what = "a folder of images" if source == "imagefolder" else "an .npz file"
        yield ("data", "root"), f"expected the path of {what}, because data.source is {source!r}, got nothing"
    if source == "digits" and data.get("root") is not None:
        text = "expected nothing, because data.source is 'digits', which come with the package"
        yield ("data", "root"), f"{text}, got {show(data['root'])}; set data.source to 'imagefolder' or 'npz'"
    shares = [data.get(key, getattr(DataSettings, key)) for key in ("test_share", "validation_share")]
    if all(isinstance(share, int | float) and 0 < share < 1 for share in shares) and sum(shares) >= 1:
        text = f"expected test_share and validation_share to sum to less than 1, got {shares[0]} + {shares[1]}"
        yield ("data", "test_share"), f"{text}; nothing would be left to train on"
