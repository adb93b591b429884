"""The group of processes that work on one job: torch's default process group."""

from __future__ import annotations

import torch.distributed as dist


def rank() -> int:
    """Number of this process in the group, from 0."""
    return dist.get_rank() if grouped() else 0


def size() -> int:
    """How many processes work together; 1 without a group."""
    return dist.get_world_size() if grouped() else 1


def is_main() -> bool:
    """Whether this is the process that writes, logs and measures: the first."""
    return rank() == 0


def grouped() -> bool:
    """Whether there is a process group."""
    return dist.is_available() and dist.is_initialized()
