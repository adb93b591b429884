"""Settings that check themselves when they are made, against the annotations of their own fields."""

import math
import operator
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import is_dataclass
from numbers import Integral, Real
from os import PathLike
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt, MaxLen, MinLen

from prunekit.errors import SettingsError, cut_short, nearest, share_meant
from prunekit.utils.registry import Registered, field_hints
from prunekit.utils.user_code import is_reference

KINDS: dict[Any, Any] = {int: Integral, float: Real, str: str, bool: bool, Path: (str, PathLike)}
"""Types of values that an annotation allows; numbers of NumPy too."""
CONTAINERS: dict[Any, Any] = {dict: Mapping, tuple: (tuple, list)}
"""The same of an annotation of items."""
IN_PYTHON = {int: "a whole number", float: "a number", str: "a string", bool: "True or False", Path: "a path",
             type(None): "None", dict: "a dictionary", tuple: "a tuple"}  # fmt: skip
IN_YAML = {**IN_PYTHON, str: "text", bool: "true or false", type(None): "null", dict: "a mapping", tuple: "a list"}
BOUNDS = {Gt: ("above", "gt"), Ge: ("of at least", "ge"), Lt: ("below", "lt"), Le: ("of at most", "le")}
"""Words for each, and the name of its bound, which is also that of the operator that compares."""


class Checked:
    """Base class of settings: a dataclass that checks its fields against their annotations when it is made."""

    def __post_init__(self) -> None:
        """Check every field."""
        hints = field_hints(type(self))  # type: ignore[arg-type]  # a class is hashable, whatever its objects are
        given = [(hint, getattr(self, name), name) for name, hint in hints.items()]
        misfits = [each for each in given if not _fits(*each[:2])]
        problems = [text for misfit in misfits for text in _problems(*misfit)]
        if problems:
            raise SettingsError(f"{type(self).__name__}: {'; '.join(problems)}")


def _problems(hint: Any, value: Any, path: str) -> Iterator[str]:
    """Yield a message for each part of a value that does not fit its annotation; the innermost parts are named."""
    parts = [part for part in alternatives(hint) if isinstance(value, CONTAINERS.get(get_origin(part), ()))]
    inner = get_args(parts[0])[-1 if get_origin(parts[0]) is dict else 0] if parts else None
    items = (value.items() if isinstance(value, Mapping) else enumerate(value)) if parts else ()
    misfits = [(f"{path}[{key!r}]", item) for key, item in items if not _fits(inner, item)]
    found = [text for where, item in misfits for text in _problems(inner, item, where)]
    yield from found or [
        f"{path}: expected {describe(hint, IN_PYTHON)}, got {cut_short(repr(value))}{_near(hint, value)}"
    ]


def alternatives(hint: Any) -> tuple[Any, ...]:
    """Return the parts of a union, or the annotation itself, without constraints."""
    if get_origin(hint) is Annotated:
        return alternatives(get_args(hint)[0])
    if get_origin(hint) in (types.UnionType, Union):
        return tuple(inner for part in get_args(hint) for inner in alternatives(part))
    return (hint,)


def _fits(hint: Any, value: Any) -> bool:
    origin, parts = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return _fits(parts[0], value) and all(_meets(one, value) for one in parts[1:])
    if origin in (types.UnionType, Union):
        return any(_fits(part, value) for part in parts)
    if origin is Literal:
        return any(type(value) is type(one) and value == one for one in parts)
    if origin is tuple:
        return isinstance(value, CONTAINERS[tuple]) and all(_fits(parts[0], item) for item in value)
    if origin is dict:
        whole = isinstance(value, Mapping)
        return whole and all(_fits(parts[0], k) and _fits(parts[1], item) for k, item in value.items())
    if hint is Any:
        return True
    if hint is None or hint is type(None):
        return value is None
    if hint in (int, float) and (isinstance(value, bool) or (isinstance(value, Real) and not math.isfinite(value))):
        return False
    return isinstance(value, KINDS.get(hint, hint))


def _meets(constraint: Any, value: Any) -> bool:
    for kind, (_, name) in BOUNDS.items():
        if isinstance(constraint, kind):
            return bool(getattr(operator, name)(value, getattr(constraint, name)))
    match constraint:
        case MinLen(min_length=least):
            return len(value) >= least
        case MaxLen(max_length=most):
            return len(value) <= most
        case Registered(registry=registry):  # the object of a reference is looked up where it is used
            return is_reference(value) or value in registry.names
    return True


def _near(hint: Any, value: Any) -> str:
    """Return a hint about allowed names that are similar to a wrong one; may be empty."""
    parts = (hint, *alternatives(hint))
    if callable(value) and any(isinstance(one, Registered) for part in parts for one in get_args(part)):
        return "; register it under a name first, by prunekit.register_..., and give the name"
    if not isinstance(value, str):
        return meant_at(hint, value)
    names: list[str] = []
    for part in parts:
        if get_origin(part) is Annotated:
            names += [name for one in get_args(part) if isinstance(one, Registered) for name in one.registry.names]
        if get_origin(part) is Literal:
            names += [one for one in get_args(part) if isinstance(one, str)]
    hint_text = nearest(value, names) if names else ""
    return f"; {hint_text}" if hint_text.startswith("did you mean") or get_origin(hint) is Annotated else ""


def meant_at(hint: Any, value: Any) -> str:
    """Return the share that was meant where a number is too large and its hundredth fits; may be empty."""
    return share_meant(value) if isinstance(value, (int, float)) and _fits(hint, value / 100) else ""


def describe(hint: Any, words: Mapping[Any, str], keys: Callable[[Any], Iterable[str]] | None = None) -> str:
    """Return a description of an annotation, e.g. "a number above 0 and of at most 1, or null"."""
    if get_origin(hint) in (types.UnionType, Union):
        return ", or ".join(describe(part, words, keys) for part in get_args(hint))
    if get_origin(hint) is Annotated:
        kind, *constraints = get_args(hint)
        named = next((one.registry for one in constraints if isinstance(one, Registered)), None)
        if named is not None:
            return f"the name of a {named.kind}, or file.py:object"
        return " ".join([describe(kind, words, keys), *_bounds(constraints)])
    if get_origin(hint) is Literal:
        values = [repr(value) for value in get_args(hint)]
        return f"one of {', '.join(values)}" if len(values) > 1 else values[0]
    if get_origin(hint) is tuple:
        return f"{words[tuple]} ({describe(get_args(hint)[0], words, keys)} each)"
    if is_dataclass(hint):
        if words is IN_PYTHON:
            return f"a {hint.__name__}"  # type: ignore[union-attr]
        return f"{words[dict]} with the keys {', '.join(keys(hint))}" if keys else words[dict]
    return words[dict] if get_origin(hint) is dict else words.get(hint, "a value")


def _bounds(constraints: list[Any]) -> Iterator[str]:
    least = next((one.min_length for one in constraints if isinstance(one, MinLen)), None)
    if least is not None:
        exactly = any(isinstance(one, MaxLen) and one.max_length == least for one in constraints)
        yield f"of {'' if exactly else 'at least '}{least} item{'s'[: least > 1]}"
    bounds = [
        f"{word} {getattr(constraint, name):g}"
        for kind, (word, name) in BOUNDS.items()
        for constraint in constraints
        if isinstance(constraint, kind)
    ]
    if bounds:
        yield " and ".join(bounds)
