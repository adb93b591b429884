"""What a model is trained for: how a batch comes apart, the loss, and what is counted as good."""

from prunekit.tasks.classification import IMAGE_CLASSIFICATION, TEXT_CLASSIFICATION, wilson_interval
from prunekit.tasks.segmentation import SEGMENTATION
from prunekit.tasks.settings import TaskName
from prunekit.tasks.task import Counts, Loss, Score, Task, Unpacking, training_loss

TASKS: dict[str, Task] = {task.name: task for task in (IMAGE_CLASSIFICATION, SEGMENTATION, TEXT_CLASSIFICATION)}
"""Those that recipes know by name."""

__all__ = [
    "IMAGE_CLASSIFICATION",
    "SEGMENTATION",
    "TASKS",
    "TEXT_CLASSIFICATION",
    "Counts",
    "Loss",
    "Score",
    "Task",
    "TaskName",
    "Unpacking",
    "training_loss",
    "wilson_interval",
]
