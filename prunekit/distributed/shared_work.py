"""Work that processes share: samples are dealt out, sums go over all of them, and independent problems have an owner.

Outside `sharing_work` every function here is that of a single process, so that one text serves both.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import islice
from typing import TypeVar

import torch
from torch import Tensor

from prunekit.distributed.process_group import everyone, gather_values, rank, size, total, total_of, wait_for_all

PARTS = 4
"""Batches, at least, that samples run in where there are as many: what a batch draws depends on its number, and so the
results do not depend on how many processes share them, up to this number."""
T = TypeVar("T")
_SHARING: ContextVar[bool] = ContextVar("sharing_work", default=False)


@contextmanager
def sharing_work(share: bool = True) -> Iterator[None]:
    """Share the work of calibration and repair in this context with all processes of torch's group.

    All of them enter it, and make the same calls in the same order, with the same model and the same samples: `prune`
    then returns the same in each, up to the order of sums. Each runs its part of the samples; orders of removal are
    divided among them. Without a group it does nothing.

    Args:
        share: False for work in such a context that each process does alone.

    `prune` raises there a `RunError` if processes have other weights or samples, and a `UsageError` for budgets of
    time, as each would measure its own.

    Example:
        >>> import prunekit as pk, torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 64), torch.nn.ReLU(), torch.nn.Linear(64, 2))
        >>> with pk.sharing_work():  # under torchrun, behind torch.distributed.init_process_group("gloo")
        ...     result = pk.prune(model, calibration=torch.randn(900, 4), params=0.5)
    """
    before = _SHARING.set(share and size() > 1)
    try:
        yield
    finally:
        _SHARING.reset(before)


def workers() -> int:
    """Return how many processes share the work."""
    return size() if _SHARING.get() else 1


def wait_for_workers() -> None:
    """Wait until every process that shares the work is here."""
    if _SHARING.get():
        wait_for_all()


def dealt(items: Iterable[T]) -> Iterator[T]:
    """Return the items that are this process's."""
    return islice(items, rank(), None, size()) if _SHARING.get() else iter(items)


def own_entries() -> slice:
    """Return which of a tensor's entries are this process's, in sums over a long dimension."""
    return slice(rank(), None, size()) if _SHARING.get() else slice(None)


def batch_parts() -> int:
    """Return how many batches samples run in at least, see `PARTS`."""
    return max(PARTS, workers())


def shared_count(number: int) -> int:
    """Return the sum of a whole number over all processes."""
    return int(total(number)[0]) if _SHARING.get() else number


def shared_sum(values: Tensor) -> Tensor:
    """Return the sum of a tensor over all processes, entry by entry."""
    return total_of(values) if _SHARING.get() else values


def shared_mean(mean: Tensor, rows: int) -> Tensor:
    """Return the mean over the rows of all processes, by the one over this process's, of which there may be none."""
    if not _SHARING.get():
        return mean
    return total_of(mean * rows if rows else torch.zeros_like(mean)) / max(1, shared_count(rows))


def shared_values(value: T) -> list[T]:
    """Return the value of each process."""
    return gather_values(value) if _SHARING.get() else [value]


def shared_rows(rows: Tensor) -> Tensor:
    """Return the rows of all processes, one process after the other."""
    return torch.cat([part.to(rows) for part in gather_values(rows.cpu())]) if _SHARING.get() else rows


def agreed(flag: bool) -> bool:
    """Return whether a flag is true in every process."""
    return everyone(flag) if _SHARING.get() else flag


def owned(costs: Sequence[float]) -> list[int]:
    """Return which of some independent problems this process solves, by their costs: each gets about the same.

    The most expensive go first, each to the process that has the least so far (Graham 1969, "Bounds on multiprocessing
    timing anomalies"): so none waits longer than the most expensive one takes.
    """
    if not _SHARING.get():
        return list(range(len(costs)))
    loads, found = [(0.0, number) for number in range(size())], list[int]()
    for place in sorted(range(len(costs)), key=lambda place: -costs[place]):
        load, owner = heapq.heappop(loads)
        heapq.heappush(loads, (load + costs[place], owner))
        found += [place] if owner == rank() else []
    return found
