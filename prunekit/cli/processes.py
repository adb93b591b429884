"""Commands that several processes run together, as `torchrun` and `accelerate launch` start them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import click

from prunekit.distributed.launch import launched
from prunekit.errors import UsageError

TOGETHER = ("finetune", "prune", "calibrate", "evaluate")


def require_alone(command: str | None) -> None:
    """Refuses a command that every process would run for itself.

    Raises:
        UsageError: this is one of several processes, and the command is for one.
    """
    if command not in TOGETHER and launched():
        raise UsageError(
            f"{command}: expected a single process, but a launcher started several; run `prunekit {command}` without "
            f"it. Those that run in several are {', '.join(TOGETHER)}"
        )


@contextmanager
def as_one() -> Iterator[None]:
    """Runs a command in the group of processes that the environment describes; where one fails, all do."""
    if not launched():
        yield
        return
    from prunekit.distributed.failing import one_for_all
    from prunekit.distributed.joining import joined

    with joined(), one_for_all(click.exceptions.Exit):
        yield
