"""What stops the rest: why a model keeps more of its inner weights than halving every width would."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator

import numpy as np
from coverage_least import Least

from prunekit.channels.channel_map import ChannelMap, Keep
from prunekit.channels.constraints import LockRecord
from prunekit.channels.labels import Labels


def stops(chart: ChannelMap, keep: Keep, least: Least, from_share: float = 0.001) -> list[str]:
    """A sentence for each thing that keeps weights, the most first; from a share of the inner weights on."""
    beyond: dict[str, dict[str, int]] = defaultdict(dict)
    records = _records(chart)
    for name, wanted in least.widths.items():
        excess = chart.parameters_kept(keep, [name]) - wanted
        if excess > 0:
            causes = "; ".join(_causes(chart, keep, name, records)) or "no axis of it stays, but more of each is kept"
            beyond[causes][name] = excess
    ranked = sorted(beyond.items(), key=lambda item: -sum(item[1].values()))
    kept = [(causes, weights) for causes, weights in ranked if sum(weights.values()) >= from_share * least.entries]
    return [_said(causes, weights, least.entries) for causes, weights in kept]


def _said(causes: str, weights: dict[str, int], entries: int) -> str:
    worst = max(weights, key=lambda name: weights[name])
    others = f" and {len(weights) - 1} more" if len(weights) > 1 else ""
    return f"{100 * sum(weights.values()) / entries:.1f} points in {worst}{others}: {causes}"


def _records(chart: ChannelMap) -> list[tuple[LockRecord, Labels]]:
    """All locks, each with the classes of its labels."""
    flow = chart.traced.trace.flow
    found = [lock for lock in (*flow.locks, *chart.traced.extra) if isinstance(lock, LockRecord)]
    return [(lock, np.unique(flow.union.find(lock.labels))) for lock in found]


def _causes(chart: ChannelMap, keep: Keep, name: str, records: Iterable[tuple[LockRecord, Labels]]) -> Iterator[str]:
    """Why axes of a parameter stay of which more than half is left."""
    union = chart.traced.trace.flow.union
    records = list(records)
    for index, (final, axis) in enumerate(zip(chart.labels[name], chart.traced.trace.labels[name], strict=True)):
        if final is None or axis is None or np.count_nonzero(keep[final]) <= (final.size + 1) // 2:
            continue
        classes = np.unique(union.find(axis))
        mine = [lock for lock, labels in records if np.isin(labels, classes, assume_unique=True).any()]
        causes = dict.fromkeys(" ".join(f"{lock.operator} {lock.reason}{_where(lock, name)}".split()) for lock in mine)
        if not causes and not final.any():
            causes = {"locked together with other axes": None}
        if causes:
            yield f"axis {index} has {final.size} that stay: {', '.join(causes)}"


def _where(lock: LockRecord, name: str) -> str:
    """The place of a lock outside of the parameter's layer, by the last name alone: alike layers are told together."""
    if lock.module == name.rpartition(".")[0]:
        return ""
    return f" in {lock.module.rpartition('.')[2] or 'the top-level forward'}"
