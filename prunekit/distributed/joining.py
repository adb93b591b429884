"""Joining the group of processes that a launcher started."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from prunekit.distributed.exchange import wait_for_all
from prunekit.distributed.group import grouped
from prunekit.distributed.launch import launched, local_rank
from prunekit.errors import RunError

TIMEOUT = timedelta(minutes=30)
"""Of one exchange between processes that are all at work; waiting for one that works alone has no limit."""


@contextmanager
def joined() -> Iterator[None]:
    """Makes the group that the environment describes, and leaves it; nothing for a single process.

    gloo on the CPU, and nccl on CUDA where that is there. A group that exists already is used as it is, and stays.

    Raises:
        UsageError: the environment is incomplete.
        RunError: the others cannot be reached.
    """
    if grouped() or not launched():
        yield
        return
    if cuda := torch.cuda.is_available():
        torch.cuda.set_device(local_rank() % torch.cuda.device_count())  # too few are an error once one is asked for
    try:
        dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", timeout=TIMEOUT)
    except (RuntimeError, ValueError, OSError) as error:
        where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        raise RunError(
            f"process {os.environ['RANK']} of {os.environ['WORLD_SIZE']}: expected to meet the others at {where}: "
            f"{error}; check MASTER_ADDR, MASTER_PORT and that all processes are started"
        ) from error
    try:
        wait_for_all()  # or one that fails at once would break what another is still setting up
        yield
    finally:
        dist.destroy_process_group()
