"""Why a model keeps more than it should: the operators that hold its widths, and those with one width alone."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import numpy as np

from prunekit.channels.channel_map import ChannelMap, Keep, Lock
from prunekit.channels.constraints import LockRecord
from prunekit.channels.labels import Labels

EXPECTED = ("output of the model", "reads channels whose number no parameter decides, such as those of the input")
"""Locks that every model has: its classes and the channels of its images."""


def costly(chart: ChannelMap, keep: Keep, least: float = 0.001) -> list[str]:
    """What keeps more than a quarter of its MACs, the most first, and why; from `least` of the model's MACs on.

    An operator between two widths falls to a quarter where each is halved; half of it is left where one of them stays,
    or where the other is no width of the model's (depthwise convolutions, attention over positions).
    """
    beyond: dict[tuple[str, str], dict[str, float]] = defaultdict(dict)
    for term, traced in zip(chart.mac_terms, chart.traced.trace.flow.macs, strict=True):
        dense = term.constant * float(np.prod([factor.size for factor in term.factors]))
        kept = term.constant * float(np.prod([np.count_nonzero(keep[factor]) for factor in term.factors]))
        widths = zip(term.factors, traced.factors, strict=True)
        stays = [_stays(chart, term.module, before) for factor, before in widths if not factor.any()]
        if kept > dense / 3:  # not by rounding alone
            layers = beyond[term.operator, ", ".join(stays) or "has one width alone"]
            layers[term.module] = layers.get(term.module, 0.0) + (kept - dense / 4) / chart.macs()
    ranked = sorted(beyond.items(), key=lambda item: -sum(item[1].values()))
    return [_in_points(*key, layers) for key, layers in ranked if sum(layers.values()) >= least]


def _in_points(operator: str, why: str, layers: dict[str, float]) -> str:
    worst = max(layers, key=lambda path: layers[path])
    return f"{100 * sum(layers.values()):.1f} points in {_modules(worst, len(layers))}: {operator} {why}"


def _stays(chart: ChannelMap, module: str, width: Labels) -> str:
    """Why a width stays, given its labels as the trace numbers them: the locks that lie on it."""
    records = [lock for lock in (*chart.traced.trace.flow.locks, *chart.traced.extra) if isinstance(lock, LockRecord)]
    mine = [record for record in records if np.isin(width, record.labels).any()]
    causes = dict.fromkeys(f"{record.operator} {record.reason}{_where(record, module)}".strip() for record in mine)
    return f"has a width of {width.size} that stays ({', '.join(causes) or 'it hangs together with others that do'})"


def _where(record: LockRecord, module: str) -> str:
    """The place of a lock outside its layer, by the last name alone, so that alike layers are told together."""
    if record.module == module:
        return ""
    return f" in {record.module.rpartition('.')[2] or 'the top-level forward'}"


def held(chart: ChannelMap, most: int = 3) -> list[str]:
    """The locks that hold most channels, alike ones of several modules together."""
    alike: dict[tuple[str, str], list[Lock]] = defaultdict(list)
    for lock in chart.locks:
        if lock.reason not in EXPECTED:
            alike[lock.operator, lock.reason].append(lock)
    ranked = sorted(alike.items(), key=lambda item: -sum(lock.channels for lock in item[1]))
    return [_said(operator, reason, locks) for (operator, reason), locks in ranked[:most]]


def _said(operator: str, reason: str, locks: Iterable[Lock]) -> str:
    locks = list(locks)
    return f"{_modules(locks[0].module, len(locks))}: {operator} {reason}".replace("  ", " ")


def _modules(path: str, count: int) -> str:
    return (path or "the top-level forward") + (f" and {count - 1} more" if count > 1 else "")
