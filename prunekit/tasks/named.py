"""The tasks that are known by a name."""

from __future__ import annotations

from prunekit.errors import UsageError, nearest
from prunekit.tasks.classification import IMAGE_CLASSIFICATION, TEXT_CLASSIFICATION
from prunekit.tasks.segmentation import SEGMENTATION
from prunekit.tasks.task import Task

TASKS: dict[str, Task] = {task.name: task for task in (IMAGE_CLASSIFICATION, SEGMENTATION, TEXT_CLASSIFICATION)}
"""Those that recipes know by name."""


def get_task(task: Task | str) -> Task:
    """A task, given as it is or by its name.

    Raises:
        UsageError: there is none of that name, or it is neither.
    """
    if isinstance(task, Task):
        return task
    if isinstance(task, str) and task in TASKS:
        return TASKS[task]
    shown = repr(task) if isinstance(task, str) else type(task).__name__
    near = f"; {nearest(task, TASKS)}" if isinstance(task, str) else ""
    raise UsageError(f"task: expected one of {', '.join(TASKS)}, or a prunekit.tasks.Task, got {shown}{near}")
