"""Tasks by name, and the function that registers one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from prunekit.errors import UsageError
from prunekit.registries import TASKS as _TASKS
from prunekit.registry import Registry
from prunekit.tasks.task import Task
from prunekit.user_code import made_by

TASKS: Registry[Task] = _TASKS
"""What models are trained for, by the names that recipes and functions take."""
Made = TypeVar("Made", bound=Task | Callable[[], Task])


def register_task(name: str, *, data: str = "", measures: str = "") -> Callable[[Made], Made]:
    """Registers a task under a name that Python, recipes and commands take from then on.

    Args:
        name: as in a recipe's `task`; also that of the `Task`.
        data: what a batch is, in a few words, for `prunekit list tasks`.
        measures: its loss and scores, likewise.

    Returns:
        A decorator of a function that takes nothing and returns the `Task`; a `Task` itself may be given too.

    Raises:
        ValueError: the name is taken, or the task has another.
        UsageError: the function returns no task.

    Example:
        >>> import torch
        >>> import prunekit as pk
        >>> from prunekit.tasks import Score, Task
        >>> def counts(output, target):  # of which a task's scores are made; they add up over batches
        ...     return torch.stack([(output - target).square().sum(), target.square().sum()])
        >>> @pk.register_task("regression", data="inputs with targets (B, K)", measures="mean squared error")
        ... def regression():
        ...     explained = Score("explained", "share explained", lambda sums: 100 * float(1 - sums[0] / sums[1]))
        ...     return Task("regression", torch.nn.functional.mse_loss, counts, (explained,))
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
        >>> batches = [(torch.randn(8, 4), torch.randn(8, 2))]
        >>> gradients = pk.collect_gradients(model, batches, device=torch.device("cpu"), task="regression")
        >>> small = pk.prune(model, batches[0][0], channels=0.5, criterion="taylor", gradients=gradients).model
        >>> small[0].out_features
        4
    """

    def register(made: Made) -> Made:
        task = _task(name, made if isinstance(made, Task) else made())
        if task.name != name:
            raise ValueError(f"task {name!r}: expected a Task of this name, got {task.name!r}")
        TASKS.add(name, task, None if isinstance(made, Task) else made)
        return made

    return register


def get_task(task: Task | str) -> Task:
    """A task, given as it is, by its name, or as `file.py:object`.

    Raises:
        UsageError: there is none of that name, or it is neither.
    """
    if isinstance(task, Task):
        return task
    if isinstance(task, str):
        return TASKS.get(task)
    known = ", ".join(TASKS.names)
    raise UsageError(f"task: expected one of {known}, or a prunekit.tasks.Task, got {type(task).__name__}")


def accept(reference: str, found: Any) -> Task:
    """The task that `file.py:object` names, or that the function which it names returns.

    Raises:
        UsageError: it is neither, or the function raises.
    """
    return _task(reference, made_by(found, reference, UsageError) if callable(found) else found)


def _task(name: str, found: Any) -> Task:
    if not isinstance(found, Task):
        text = "expected a prunekit.tasks.Task, or a function that returns one"
        raise UsageError(f"task {name}: {text}, got {type(found).__name__}")
    return found
