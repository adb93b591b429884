"""Inputs of exports: samples to check a file on, its interface, and axes of any size."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from prunekit.data.datasets import SampleDataset
from prunekit.data.loader import Batches, batches
from prunekit.errors import ModelError, UsageError, nearest, reason_of, reraise_shortage
from prunekit.jobs.run.job_inputs import Own
from prunekit.jobs.run.model_sources import InputModel, inputs_of_task, splits_of
from prunekit.models.interface import ModelInterface, TensorSpec, interface_of, with_batch
from prunekit.settings.inputs import DataSettings
from prunekit.utils.inputs import call, inputs_as_example, is_batched, sample_count, select_samples
from prunekit.utils.tensors import map_tensors

SAMPLES = 32
"""Real samples that exports are checked on, at most."""
TRACED, OTHER = 2, 5
"""Batch sizes: that a model is exported at, and the other one that its file is checked at."""
READ = 32
"""Samples of a batch that files are scored and calibrated with."""
PRESETS = ("image", "sequence")
"""Names of axes of any size: height and width of images, and the length of token sequences."""


def with_data(target: InputModel, data: DataSettings | None, own: Own, task: str | None) -> InputModel:
    """Return a model with its data, whose samples files are checked and scored on; as it is without any."""
    if target.splits is not None or (data is None and own.data is None):
        return target
    splits = splits_of(target, data, own, "check the export on", task)
    return replace(target, splits=splits, sample_shape=splits.sample_shape, inputs=inputs_of_task(target.model, splits))


def real_samples(target: InputModel) -> tuple[tuple[Any, ...], bool]:
    """Return up to 32 samples as one example, and whether they are real.

    They are test samples if the model has data, else those of its example if it has several that differ, else random
    numbers in the example's shapes.
    """
    if target.splits is not None:
        test = target.splits.test
        inputs, _ = next(iter(batches(test, min(SAMPLES, len(test)), shuffle_seed=None)))
        return inputs_as_example(target.model, inputs), True
    example = target.example_inputs()
    if target.inputs is not None and sample_count(example) > 1:
        return example, True
    generator = torch.Generator().manual_seed(0)

    def drawn(tensor: Tensor) -> Tensor:
        shape = (OTHER + TRACED, *tensor.shape[1:])
        if tensor.is_floating_point():
            return torch.randn(shape, generator=generator)
        return tensor[:1].expand(shape).clone()

    return (map_tensors(example, drawn) if is_batched(example) else example), False


def file_batches(data: SampleDataset, interface: ModelInterface, indices: Tensor | None = None) -> Batches:
    """Return batches of a data set as a file takes them; of a fixed size, the samples that are left over are not in."""
    chosen, fixed = torch.arange(len(data)) if indices is None else indices, fixed_batch(interface)
    if fixed is not None:
        chosen = chosen[: len(chosen) // fixed * fixed]
    return batches(data, fixed or READ, shuffle_seed=None, indices=chosen)


def samples_in_batches(samples: tuple[Any, ...], size: int) -> Iterator[tuple[Any, ...]]:
    """Yield the samples of an example in whole batches, or all of them if there are fewer."""
    count = sample_count(samples)
    for start in range(0, max(count - size, 0) + 1, size):
        yield select_samples(samples, slice(start, start + size))


def fixed_batch(interface: ModelInterface) -> int | None:
    """Return the only batch size that a file takes; None if it takes any."""
    sizes = [one.shape[0] for one in interface.inputs if one.shape]
    return sizes[0] if sizes and isinstance(sizes[0], int) else None


def checked_batches(samples: tuple[Any, ...], batch: int | None) -> Iterator[tuple[Any, ...]]:
    """Yield the examples that a file is checked on, first the one that it is exported with.

    They are two batches of different sizes, of different samples as far as there are any; one if the batch is fixed, or
    if samples are not on the first axis of every tensor.
    """
    count = sample_count(samples)
    if not is_batched(samples):
        yield samples
        return
    sizes = (batch,) if batch is not None else (TRACED, OTHER)
    start = 0
    for wanted in sizes:
        index = (torch.arange(wanted) + start) % count
        yield select_samples(samples, index)
        start += wanted


def described_interface(
    model: nn.Module,
    example: tuple[Any, ...],
    target: InputModel,
    dynamic: Sequence[str] = (),
    batch: int | None = None,
) -> ModelInterface:
    """Return the interface of an export: what is known of the model, with axes as they are asked for."""
    try:
        found = interface_of(model, example)
    except Exception as error:  # a model's own code may raise anything
        reraise_shortage(error)
        name, samples = target.name or type(model).__name__, real_samples(target)[0]
        given, tried = sample_count(samples), sample_count(example)
        if batch is None and is_batched(samples) and given != tried and runs(model, samples):
            raise ModelError(
                f"{name}: the model runs on {given} samples and not on {tried}, so its code fixes the batch "
                f"({reason_of(error)}); export it for that batch alone: --batch {given} (batch={given})"
            ) from error
        raise ModelError(f"{name}: the model does not run on its example: {reason_of(error)}") from error
    if target.interface is not None:
        known = target.interface
        found = replace(found, task=known.task, classes=known.classes, preprocessing=known.preprocessing)
    splits = target.splits
    if splits is not None:
        feed = found.preprocessing or splits.preprocessing
        found = replace(found, task=splits.task.name, classes=tuple(splits.classes), preprocessing=feed)
    if batch is not None:
        found = with_batch(found, batch)
    return replace(found, inputs=tuple(dynamic_inputs(found.inputs, dynamic)))


def runs(model: nn.Module, example: tuple[Any, ...]) -> bool:
    """Return whether a model runs on an example."""
    try:
        with torch.inference_mode():
            call(model, example)
    except Exception as error:  # a model's own code may raise anything
        reraise_shortage(error)
        return False
    return True


def dynamic_inputs(inputs: Sequence[TensorSpec], asked: Iterable[str]) -> Iterator[TensorSpec]:
    """Yield the inputs with names for the axes that may have any size."""
    axes: dict[tuple[str, int], str] = {}
    for text in asked:
        if text == "image":
            images = [one for one in inputs if len(one.shape) == 4 and one.dtype.startswith(("float", "bfloat"))]
            found = {(one.name, axis): name for one in images for axis, name in ((2, "height"), (3, "width"))}
        elif text == "sequence":
            tokens = [one for one in inputs if len(one.shape) == 2 and not one.dtype.startswith(("float", "bfloat"))]
            found = {(one.name, 1): "sequence" for one in tokens}
        else:
            name, _, axis = text.rpartition(":")
            known = {one.name: one for one in inputs}
            if name not in known or not axis.isdigit() or not 0 < int(axis) < len(known[name].shape):
                raise UsageError(
                    f"dynamic {text!r}: expected {', '.join(PRESETS)}, or INPUT:AXIS with an axis after the first of "
                    f"{'; '.join(map(str, inputs))}{'' if name in known else '; ' + nearest(name, list(known))}"
                )
            found = {(name, int(axis)): f"{name}_{axis}"}
        if not found:
            raise UsageError(f"dynamic {text!r}: the model takes none, but {'; '.join(map(str, inputs))}")
        axes |= found
    for one in inputs:
        shape = tuple(axes.get((one.name, axis), size) for axis, size in enumerate(one.shape))
        yield replace(one, shape=shape)


def other_sizes(example: tuple[Any, ...], interface: ModelInterface, asked: Sequence[str]) -> list[tuple[Any, ...]]:
    """Return the example with half of each axis that may have any size, to check a file on; empty without such axes."""
    if not asked:
        return []
    specs = iter(interface.inputs)

    def halved(tensor: Tensor) -> Tensor:
        for axis, size in enumerate(next(specs).shape):
            if axis and isinstance(size, str):
                tensor = tensor.narrow(axis, 0, max(1, tensor.shape[axis] // 2))
        return tensor.contiguous()

    return [map_tensors(example, halved)]
