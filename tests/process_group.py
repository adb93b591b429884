"""Tests that run in several processes: a group of gloo processes on this machine, one thread each.

They are forked from a server that has imported what they need, because torch takes seconds to import; and meet in a
file, because a port may be taken.
"""

from __future__ import annotations

import multiprocessing
import signal
import time
import traceback
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import torch

PRELOADED = ["torch", "prunekit.jobs.finetune"]
"""Modules that the server of processes imports once."""
LIMIT_S = 240
"""On a machine that does other work meanwhile."""


def together(
    processes: int, folder: Path, work: Callable[..., Any], *arguments: Any, killed: Collection[int] = ()
) -> list[Any]:
    """What `work(*arguments)` returns in each process of a group, in their order.

    Args:
        folder: where they meet, and leave what they return.
        work: a function of a module; the processes import it.
        killed: numbers of processes that are, and return nothing.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    folder.mkdir(parents=True, exist_ok=True)
    started = [
        context.Process(target=_run, args=(rank, processes, folder, work, arguments), daemon=True)
        for rank in range(processes)
    ]
    for process in started:
        process.start()
    end = time.monotonic() + LIMIT_S
    for process in started:
        process.join(max(0.0, end - time.monotonic()))
        if process.exitcode is None:
            process.kill()
    assert {rank for rank, process in enumerate(started) if process.exitcode == -signal.SIGKILL} == set(killed)
    told = [folder / f"{rank}.pt" for rank in range(processes) if rank not in killed]
    assert [path.name for path in told if not path.exists()] == [], "a process ended without a result"
    found = [torch.load(path, weights_only=False) for path in told]
    failed = [f"process {rank}: {error}" for rank, (_, error) in enumerate(found) if error]
    assert not failed, "\n".join(failed)
    return [value for value, _ in found]


def _run(rank: int, processes: int, folder: Path, work: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder.absolute()}/meet", rank=rank, world_size=processes
    )
    torch.distributed.barrier()  # or one that ends at once would break what another is still setting up
    value, error = None, ""
    try:
        value = work(*arguments)
    except BaseException:
        error = traceback.format_exc()
    torch.save((value, error), folder / f"{rank}.pt")
    torch.distributed.destroy_process_group()
