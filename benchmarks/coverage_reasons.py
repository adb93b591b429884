"""What stops the rest: why a model keeps more of its inner weights than halving every width would."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
from coverage_least import Least

from prunekit.channels.labels.constraints import LockRecord
from prunekit.channels.labels.label_union import Labels
from prunekit.channels.tracing.channel_map import ChannelMap, Keep

NAMED = 2
"""Locks that a sentence names: the first come first, those behind them follow from these."""
FROM = 0.001
"""The share of the inner weights from which on a thing is worth a sentence."""


class Stops:
    """What keeps weights of a model under a plan, by the locks that lie on their axes.

    A lock lies on an axis, too, where it lies on another of the same size: where the two are added, or where one reads
    the other.
    """

    def __init__(self, chart: ChannelMap, keep: Keep, least: Least) -> None:
        self.chart, self.keep, self.least = chart, keep, least
        self.axes: dict[int, list[Labels]] = defaultdict(list)
        for (name, axis), number in least.alike.items():
            labels = chart.traced.trace.labels[name][axis] if name in chart.traced.trace.labels else None
            if labels is not None:
                self.axes[number].append(labels)
        found = (*chart.traced.trace.flow.locks, *chart.traced.extra)
        self.locks = [lock for lock in found if isinstance(lock, LockRecord)]
        self.known: dict[int, list[LockRecord]] = {}

    def sentences(self) -> list[str]:
        """A sentence for each thing that keeps weights, the most first."""
        beyond: dict[str, dict[str, int]] = defaultdict(dict)
        for name, wanted in self.least.widths.items():
            excess = self.chart.parameters_kept(self.keep, [name]) - wanted
            if excess > 0:
                beyond[self._causes(name)][name] = excess
        ranked = sorted(beyond.items(), key=lambda item: -sum(item[1].values()))
        entries = self.least.entries
        return [_said(causes, names, entries) for causes, names in ranked if sum(names.values()) >= FROM * entries]

    def _causes(self, name: str) -> str:
        """Why axes of a parameter stay of which more than half is left."""
        causes: dict[str, None] = {}
        for axis, final in enumerate(self.chart.labels[name]):
            if final is None or np.count_nonzero(self.keep[final]) <= (final.size + 1) // 2:
                continue
            locks = self._locks(self.least.alike.get((name, axis), -1))
            causes |= dict.fromkeys(self._worded(lock, name) for lock in locks)
        if causes:
            return _first(causes)
        tried = dict.fromkeys(self._worded(lock, name) for lock in self.chart.traced.extra if lock in self.locks)
        return f"they hang together with others; the trial locked {_first(tried) or 'nothing'}"

    def _locks(self, number: int) -> list[LockRecord]:
        """The locks that lie on any axis of a class."""
        if number not in self.known:
            labels = np.unique(np.concatenate([np.zeros(0, dtype=np.int64), *self.axes[number]]))
            self.known[number] = [lock for lock in self.locks if np.isin(lock.labels, labels).any()]
        return self.known[number]

    def _worded(self, lock: LockRecord, name: str) -> str:
        """A lock, with its place outside of the parameter's layer by the last name alone: alike layers are as one."""
        place = lock.module.rpartition(".")[2] or "the top-level forward"
        here = "" if lock.module == name.rpartition(".")[0] else f" in {place}"
        return " ".join(f"{lock.operator} {lock.reason}{here}".split())


def _first(causes: dict[str, None]) -> str:
    more = f" (and {len(causes) - NAMED} more)" if len(causes) > NAMED else ""
    return ", ".join(list(causes)[:NAMED]) + more


def _said(causes: str, weights: dict[str, int], entries: int) -> str:
    worst = max(weights, key=lambda name: weights[name])
    others = f" and {len(weights) - 1} more" if len(weights) > 1 else ""
    return f"{100 * sum(weights.values()) / entries:.1f} points in {worst}{others}: {causes}"
