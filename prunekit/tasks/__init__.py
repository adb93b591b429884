"""What a model is trained for: how a batch comes apart, the loss, and what is counted as good."""

from prunekit.tasks.batches import BATCH, Pairs, joined_inputs
from prunekit.tasks.classification import IMAGE_CLASSIFICATION, TEXT_CLASSIFICATION, wilson_interval
from prunekit.tasks.named import TASKS, get_task, register_task
from prunekit.tasks.segmentation import SEGMENTATION
from prunekit.tasks.task import Counts, Loss, Score, Task, Unpacking, training_loss

__all__ = [
    "BATCH",
    "IMAGE_CLASSIFICATION",
    "SEGMENTATION",
    "TASKS",
    "TEXT_CLASSIFICATION",
    "Counts",
    "Loss",
    "Pairs",
    "Score",
    "Task",
    "Unpacking",
    "get_task",
    "joined_inputs",
    "register_task",
    "training_loss",
    "wilson_interval",
]
