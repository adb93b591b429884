"""Mutants of sound files, drawn from a seed: damaged bytes, values of other types, and what breaks parsers.

A reader is sound if each of them is taken, or refused by an error of prunekit's own: `unclean` names the others.
`benchmarks/fuzz.py` draws more of them.
"""

from __future__ import annotations

import copy
import json
import random
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from prunekit.errors import PrunekitError

SECONDS = 10.0
"""Time after which a reader counts as one that does not end, on a busy machine."""
ODD_VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 0.5, -0.0, 2**31, 2**63, 2**64, -(2**63), 10**25, 10**300, 1e308, 1e-320,
    float("nan"), float("inf"), float("-inf"), "", " ", "x", "x" * 5000, "0", "1e3", "../x", "a\0b",
    "/etc/passwd", "\u202e\u2028", "\U0001f600", "e\u0301", "\ud800", "\udcff", "\x1b[31m", "file.py:object",
    "python:os:system", [], [None], [[]], [1, "x"], [[1, 2], [3]], {}, {"": None}, {"x": {"x": []}},
)  # fmt: skip
"""Values in the place of others."""
ODD_TEXTS = (
    "", " ", "\n", "null", "0", '""', "[]", "{}", "nan", "[" * 3000 + "]" * 3000, '{"a":' * 500 + "1" + "}" * 500,
    "9" * 5000, "-" + "9" * 4000, "1e999", "NaN", '{"a": 1, "a": 2}', '"\\ud800"', "\ufeff{}", "\0", "\x07",
    "\U0001f600", "# x", "--- a\n--- b", "a: &a [*a]", "!!bool maybe", "2001-99-99", "*x", "? [a]\n: b", "'",
)  # fmt: skip
"""Whole files, and what is put somewhere into others."""
_DTYPES = ("bool", "int8", "uint8", "int32", "int64", "float16", "float32", "float64", "complex64", ">f4")


def damaged_bytes(sound: bytes, count: int, seed: int) -> Iterator[bytes]:
    """Yield damaged copies of a file's content: cut, flipped, with parts doubled, removed, swapped or replaced."""
    draw = random.Random(seed)
    for number in range(count):
        data = bytearray(sound)
        for _ in range(draw.choice((1, 1, 2, 8))):
            at, end = sorted((draw.randint(0, len(data)), draw.randint(0, len(data))))
            end = min(end, at + draw.choice((1, 4, 64, 1024)))
            match draw.randrange(7):
                case 0:
                    del data[draw.randint(0, len(data)) :]
                case 1 if data:
                    data[min(at, len(data) - 1)] ^= 1 << draw.randrange(8)
                case 2:
                    data[at:at] = data[at:end]
                case 3:
                    del data[at:end]
                case 4:
                    data[at:end] = draw.randbytes(end - at)
                case 5:
                    data[at:end] = draw.choice(ODD_TEXTS).encode("utf-8", "surrogatepass")
                case 6:
                    data[at:end] = b"\xff\xfe\x00" * ((end - at) // 3 + 1)
        yield draw.choice(ODD_TEXTS).encode() if number % 25 == 0 else bytes(data)


def changed_values(sound: Any, count: int, seed: int) -> Iterator[Any]:
    """Yield copies of nested plain values, some of which are of other types, absent, renamed, doubled or deep."""
    draw = random.Random(seed)
    for _ in range(count):
        values = [copy.deepcopy(sound)]
        for _ in range(draw.choice((1, 1, 1, 2, 4))):
            _change(values, draw)
        yield values[0]


def changed_json(sound: Any, count: int, seed: int) -> Iterator[bytes]:
    """Yield JSON of changed values, and of damaged bytes, by turns."""
    texts = damaged_bytes(json.dumps(sound).encode(), count, seed)
    for number, (values, damaged) in enumerate(zip(changed_values(sound, count, seed), texts, strict=True)):
        yield damaged if number % 3 == 2 else json.dumps(values).encode()


def changed_arrays(
    sound: dict[str, np.ndarray[Any, Any]], count: int, seed: int
) -> Iterator[dict[str, np.ndarray[Any, Any]]]:
    """Yield copies of named arrays, some of which are absent, of another name, shape or dtype, or of odd values."""
    draw = random.Random(seed)
    for _ in range(count):
        arrays = dict(sound)
        for _ in range(draw.choice((1, 1, 2))):
            name = draw.choice(sorted(arrays) or ["x"])
            array = arrays.pop(name, np.zeros(()))
            match draw.randrange(8):
                case 0:
                    pass
                case 1:
                    arrays[draw.choice(("x", "", name + "/0", name.swapcase()))] = array
                case 2 if array.dtype.kind in "biuf":
                    with warnings.catch_warnings():
                        warnings.simplefilter("ignore")
                        arrays[name] = array.astype(draw.choice(_DTYPES))
                case 3:
                    arrays[name] = array.reshape(-1)[: draw.randint(0, array.size)]
                case 4:
                    arrays[name] = array[None] if draw.random() < 0.5 else array.reshape(-1)
                case 5:
                    arrays[name] = np.zeros(draw.choice(((), (0,), (3, 0), (2, 2), (1, 1, 1, 1, 1))), array.dtype)
                case _:
                    arrays[name] = _odd(array, draw)
        yield arrays


def unclean(read: Callable[[Any], Any], mutants: Iterable[Any], seconds: float = SECONDS) -> list[str]:
    """Return what a reader did wrong: raised what is not prunekit's own or cannot be printed, or did not end.

    Args:
        read: takes a mutant, reads it and uses what it read.
        mutants: to be read.
        seconds: that it may take for each.
    """
    wrong = []
    for number, mutant in enumerate(mutants):
        start = time.monotonic()
        try:
            read(mutant)
        except PrunekitError as error:
            message = str(error)
            if not message.strip() or "\0" in message or any("\ud800" <= sign <= "\udfff" for sign in message):
                wrong.append(f"{number}: a message that cannot be printed: {ascii(message)[:200]}")
        except Exception as error:
            wrong.append(f"{number}: {type(error).__name__}: {ascii(str(error))[:120]}; of {ascii(mutant)[:300]}")
        if time.monotonic() - start > seconds:
            wrong.append(f"{number}: took {time.monotonic() - start:.0f} s; of {ascii(mutant)[:300]}")
    return wrong


def _odd(array: np.ndarray[Any, Any], draw: random.Random) -> np.ndarray[Any, Any]:
    changed = array.copy()
    if changed.size:
        at = draw.randrange(changed.size)
        choices = [0, 1] if changed.dtype.kind == "b" else [0, -1, 10**6, np.nan, np.inf, -(2**31), 2**62]
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore")
            changed.reshape(-1)[at : at + 1] = np.array([draw.choice(choices)]).astype(changed.dtype)
    return changed


def _change(root: list[Any], draw: random.Random) -> None:
    """Change one place in nested values, each as likely as any other."""
    places: list[tuple[Any, Any]] = []
    waiting: list[Any] = [root]
    while waiting:
        holder = waiting.pop()
        keys = list(holder) if isinstance(holder, dict) else range(len(holder))
        places += [(holder, key) for key in keys]
        waiting += [holder[key] for key in keys if isinstance(holder[key], (dict, list))]
    holder, key = draw.choice(places)
    value = holder[key]
    match draw.randrange(9):
        case 0 if isinstance(holder, dict):
            del holder[key]
        case 1 if isinstance(holder, dict):
            holder[draw.choice(("", "x", "\U0001f600", f"{key}x", f"{key}".upper()))] = holder.pop(key)
        case 2 if isinstance(value, dict):
            holder[key] = [list(pair) for pair in value.items()]
        case 2 | 3 if isinstance(value, list):
            holder[key] = value[: draw.randint(0, len(value))] + value[draw.randint(0, len(value)) :]
        case 4:
            holder[key] = [value]
        case 5:
            holder[key] = str(value)
        case 6:
            deep: Any = value
            for _ in range(draw.choice((3, 30, 150))):
                deep = [deep]
            holder[key] = deep
        case 7 if isinstance(value, (int, float)):
            holder[key] = draw.choice((-value, value + 1, value * 10**6, value + 0.5, str(value)))
        case _:
            other = draw.choice(places)
            try:
                holder[key] = copy.deepcopy(other[0][other[1]] if draw.random() < 0.2 else draw.choice(ODD_VALUES))
            except RecursionError:  # it was made deep before
                holder[key] = None
