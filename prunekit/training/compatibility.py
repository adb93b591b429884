"""The check that a model, its data and its task fit together, before anything is trained."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from prunekit.data.datasets import SampleDataset
from prunekit.data.loader import batches
from prunekit.data.splits import Splits
from prunekit.errors import DataError, ModelError, raised_as, with_type
from prunekit.hooks.wrappers import unwrapped
from prunekit.known_names import FloatName
from prunekit.measure.memory_format import in_fastest_format
from prunekit.models.hugging_face import embedded_tokens
from prunekit.tasks.task import Task
from prunekit.utils.context import seeded, training_mode
from prunekit.utils.inputs import described, inputs_as_example, sample_count, select_samples, split, to_device

POSITIONS = "max_position_embeddings"
"""Entry of configurations of transformers: the longest text that a model was made for."""


def two_samples(dataset: SampleDataset) -> tuple[Any, Any]:
    """Return inputs and targets of the first two samples that can be read, or of one of them twice."""
    inputs, targets = next(iter(batches(dataset, 2, shuffle_seed=None)))
    chosen = torch.arange(2) % sample_count(inputs)
    found = [targets[i] for i in chosen.tolist()] if isinstance(targets, list) else select_samples(targets, chosen)
    return select_samples(inputs, chosen), found


def check_fits(model: nn.Module, splits: Splits, device: torch.device) -> None:
    """Run two samples through the model and its task as in training; buffers and random state don't change."""
    require_class_count(model, splits.task, len(splits.classes))
    require_text(model, splits)
    if splits.task.metric is not None:
        splits.task.metric()  # which may need a package that is not installed
    inputs, targets = two_samples(splits.train)
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    shape, advice = described(inputs), ""
    if splits.task.labeled_images:
        shape, advice = f"images of shape {tuple(inputs.shape[1:])}", "; set data.image_size to what it was made for"
    failed = f"{type(model).__name__} does not take {shape}: "
    with seeded(0), training_mode(model, True), torch.no_grad():
        with raised_as(ModelError, failed, advice, with_type, passing=(DataError, ModelError)):
            given, targets = to_device((inputs_as_example(model, inputs), targets), device)
            given = splits.task.example_for_loss(model, given, targets)
            output = functional_call(model, buffers, *split(given))
        _check_classes(model, splits, output)
        _check_task(model, splits.task, output, targets)


def _check_classes(model: nn.Module, splits: Splits, output: Any) -> None:
    """Raise ModelError if the numbers of class scores and of the data's classes are known and differ."""
    task, classes = splits.task, len(splits.classes)
    if task.logits is None or not classes:
        return
    shape = tuple(task.logits(output).shape)
    if task.labeled_images and shape != (2, classes):
        raise ModelError(
            f"{type(model).__name__}: expected logits of shape (2, {classes}) from two images of {classes} classes, "
            f"got {shape}; set model.arguments.num_classes"
        )
    if shape[-1] != classes:
        raise ModelError(
            f"{type(model).__name__}: expected {classes} scores, one for each class of the data, got {shape[-1]}"
        )


def require_class_count(model: nn.Module, task: Task, classes: int) -> None:
    """Raise a `ModelError` if a model tells apart another number of classes than the data has, as far as both say."""
    count = None if task.class_count is None or not classes else task.class_count(model)
    if count not in (None, classes):
        raise ModelError(
            f"{type(model).__name__}: expected {classes} classes, as the data has, and its head has {count}; "
            "set model.arguments.num_classes, which torchvision's detectors count with the background, and weights "
            "that were trained for these classes"
        )


def require_text(model: nn.Module, splits: Splits) -> None:
    """Raise a `ModelError` if texts have more tokens, or other ones, than a model takes, as far as both say."""
    if splits.vocabulary is None:
        return
    require_tokens(model, splits.vocabulary)
    most, window = positions(model), max(splits.sample_shape, default=0)
    if most is not None and window > most:
        raise ModelError(
            f"data.window: expected at most {most:,}, the positions that {type(unwrapped(model)).__name__} has, got "
            f"samples of {window:,} tokens; set data.window={most}"
        )


def require_tokens(model: nn.Module, vocabulary: int, key: str = "data.tokenizer") -> None:
    """Raise a `ModelError` if a tokenizer has ids that a model does not embed, as far as it says."""
    rows = embedded_tokens(unwrapped(model))
    if rows is not None and vocabulary > rows:
        raise ModelError(
            f"{key}: its vocabulary has {vocabulary:,} tokens, ids up to {vocabulary - 1:,}, and "
            f"{type(model).__name__} embeds {rows:,}, ids up to {rows - 1:,}: expected the tokenizer that the model "
            "was trained with, or a model with a larger vocab_size"
        )


def positions(model: nn.Module) -> int | None:
    """Return the most tokens of a text that a model of transformers has positions for; None if nothing says so."""
    configs = (getattr(module, "config", None) for module in unwrapped(model).modules())
    most = next((found for one in configs if isinstance(found := getattr(one, POSITIONS, None), int)), None)
    tables = (module for name, module in model.named_modules() if name.endswith("position_embeddings"))
    first = next((table.padding_idx + 1 for table in tables if getattr(table, "padding_idx", None) is not None), 0)
    return most - first if most is not None and most > first else None  # RoBERTa counts from its padding on


def _check_task(model: nn.Module, task: Task, output: Any, targets: Any) -> None:
    """Raise ModelError if the task cannot compute loss, counts and scores from the model's output."""
    got = f"{type(model).__name__} returned {described(output)}, the targets are {described(targets)}"
    with raised_as(ModelError, f"task {task.name!r}: {got}: ", reason=with_type):
        loss = task.loss(output, targets)
        ok, found, scores = isinstance(loss, Tensor) and loss.numel() == 1, described(loss), dict[str, float]()
        if task.counts is not None and task.scores_of_loss_outputs:
            counts = task.counts(output, targets)
            ok = ok and isinstance(counts, Tensor) and counts.ndim == 1
            found = f"{found} and {described(counts)}"
            scores = task.score(counts.tolist()) if ok else {}
    if not ok:
        raise ModelError(f"task {task.name!r}: expected a loss of one number and counts (K,), got {found}; {got}")
    percents = {score.name for score in task.scores if score.unit == "%"}
    outside = [f"{name} {value:.4g}" for name, value in scores.items() if name in percents and not 0 <= value <= 100]
    if outside:
        raise ModelError(f"task {task.name!r}: expected scores in percent, 0 to 100, got {', '.join(outside)}; {got}")


def runs_channels_last(model: nn.Module, splits: Splits, device: torch.device, precision: FloatName) -> bool:
    """Return whether to lay the channels of images last, which is faster on the CPU and in half precision elsewhere."""
    if device.type != "cpu" and precision == "fp32":
        return False
    inputs, _ = to_device(two_samples(splits.train), device)
    return in_fastest_format(model, inputs, training=True) is not inputs
