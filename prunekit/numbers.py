"""Numbers as people read them: a unit, three digits, and a dash where there is nothing."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, TypeGuard

NOTHING = "–"
PREFIXES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def is_number(value: Any) -> TypeGuard[float]:
    """Whether `value` is a finite number (a bool is none)."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def digits(value: Any, significant: int = 3) -> str:
    """Plain decimal notation with three significant digits, e.g. 0.0123, 4.57, 1240."""
    if not is_number(value):
        return NOTHING
    if value == 0:
        return "0"
    # Rounding comes first, so that 9.996 is 10.0 and not 10.00.
    rounded = float(f"{value:.{significant - 1}e}")
    return f"{rounded:.{max(0, significant - 1 - math.floor(math.log10(abs(rounded))))}f}"


def count(value: Any) -> str:
    """A count with a decimal prefix, e.g. 21.3 M; whole below 1,000."""
    if not is_number(value):
        return NOTHING
    for size, prefix in PREFIXES:
        if abs(value) >= size * 0.9995:
            return f"{digits(value / size)} {prefix}"
    return digits(value) if isinstance(value, float) and not value.is_integer() else str(int(value))


def plural(number: int, word: str, ending: str = "s") -> str:
    """A count with its word, e.g. 2 layers."""
    return f"{number:,} {word}{ending if number != 1 else ''}"


def listed(names: Iterable[str], most: int) -> str:
    """Return the first of several names, and how many more there are."""
    every = list(names)
    return ", ".join(every[:most]) + (f" and {len(every) - most} more" if len(every) > most else "")


def size(value: Any) -> str:
    """Bytes in decimal units, e.g. 85.3 MB."""
    text = count(value)
    if text == NOTHING:
        return text
    return f"{text}B" if text[-1].isalpha() else f"{text} B"


def percent(value: Any, places: int = 1) -> str:
    """A number that is in percent already, e.g. 98.6 %."""
    return f"{value:.{places}f} %" if is_number(value) else NOTHING


def share(value: Any, places: int = 1) -> str:
    """A share between 0 and 1 as percent."""
    return percent(100 * value, places) if is_number(value) else NOTHING


def difference(before: Any, after: Any, places: int = 2) -> str:
    """What was added, with its sign, e.g. −0.37."""
    return signed(after - before, places) if is_number(before) and is_number(after) else NOTHING


def change(before: Any, after: Any) -> str:
    """Relative change, e.g. −55.2 %."""
    if not (is_number(before) and is_number(after)) or before == 0:
        return NOTHING
    return f"{signed(100 * (after / before - 1), 1)} %"


def signed(value: Any, places: int = 2) -> str:
    """A difference with its sign, and a true minus."""
    if not is_number(value):
        return NOTHING
    text = f"{value:+.{places}f}".replace("-", "−")
    return text[1:] if not text.strip("+−0.") else text


def factor(value: Any) -> str:
    """A ratio, e.g. 2.31×."""
    return f"{value:.2f}×" if is_number(value) else NOTHING


def interval(low: Any, high: Any, places: int = 2) -> str:
    """A 95 % interval, e.g. [97.2, 99.1]; nothing where there is none."""
    return f"[{low:.{places}f}, {high:.{places}f}]" if is_number(low) and is_number(high) else ""


def scientific(value: Any) -> str:
    """A very small number, e.g. 3.1e-15."""
    return f"{value:.1e}" if is_number(value) and value != 0 else digits(value)


def moment(text: Any) -> str:
    """A time in ISO 8601 as people write it, e.g. 2026-11-20 11:02:54 UTC."""
    return str(text).replace("T", " ").replace("+00:00", " UTC")


def duration(seconds: Any) -> str:
    """Seconds, or minutes and seconds from two minutes up."""
    if not is_number(seconds):
        return NOTHING
    if seconds < 120:
        return f"{digits(seconds)} s"
    return f"{int(seconds) // 60} min {int(seconds) % 60} s"
