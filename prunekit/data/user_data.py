"""User data: labeled images, or map-style data sets of any task, from a function in a user's file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from prunekit.data.augmentation import Draw, drawing
from prunekit.data.datasets import CorruptImages, MapStyle, SampleDataset, require_map_style
from prunekit.data.splits import Splits, fingerprint, require_labels, source_of_parts, splits_of
from prunekit.errors import DataError, UsageError, raised_as, reraise_shortage, with_type
from prunekit.models.preprocessing import Preprocessing
from prunekit.settings.inputs import DataSettings
from prunekit.tasks.classification import IMAGE_CLASSIFICATION
from prunekit.tasks.task import BatchUnpacker, Task, get_task
from prunekit.utils.tensors import gather
from prunekit.utils.user_code import run_factory, source_bytes

KNOWN_BY = 16
"""Samples of each part that its fingerprint is computed from: reading all would take too long."""
OF_IMAGES = ("image_size", "augment", "mean", "std", "max_corrupt")
"""Settings of labeled images, which other data ignores."""
_ADVICE = "return other data sets as a tuple (train, test)"
PARTS = ("train", "test", "validation")
READING = ("batch", "workers", "prefetch", "persistent_workers", "pin_memory")
FOR_SPLITS = ("source", "root", "name", "columns", "download", "origin", *READING)
"""Settings that may be given with `Splits`, which are split and transformed already."""


def load_own(
    reference: str,
    settings: DataSettings,
    task: Task = IMAGE_CLASSIFICATION,
    preprocessing: Preprocessing | None = None,
) -> Splits:
    """Run `file.py:factory`, or `python:module:factory`, and return its data, split: name only files you trust.

    The factory takes no arguments and returns `Splits`, or map-style data sets of (image, label), or of images alone if
    labels are not read: a tuple (train, test) or (train, test, validation), or a mapping with these names. Missing
    validation images are drawn from the training images. See `MappedImages` for what an image may be. Samples of
    another task are what it can unpack once they are collated, see `sample_splits`.

    The fingerprint, by which earlier results are found again, is computed from the file, all labels and a few images;
    for `Splits` from the file and their own fingerprint. With a model's preprocessing, pixels become inputs by that
    instead of the settings' size, mean and deviation.
    """
    require_labels(settings, task)
    made = run_factory(reference, DataError)
    code = source_bytes(reference)
    if isinstance(made, Splits):
        for part in (made.train, made.validation, made.test):
            if not isinstance(part, SampleDataset):
                found = type(part).__name__
                raise DataError(
                    f"{reference}: expected Splits of prunekit.data.datasets.ImageDataset, got {found}; {_ADVICE}"
                )
        keys = [field for field in fields(settings) if field.name not in FOR_SPLITS]
        changed = [f"data.{key.name}" for key in keys if getattr(settings, key.name) != key.default]
        if changed:
            raise UsageError(
                f"{reference}: the factory returned Splits, which are split and fed already: {', '.join(changed)} "
                f"would change nothing; leave that out, or {_ADVICE}"
            )
        if made.task.name != task.name:
            raise UsageError(
                f"{reference}: expected Splits of the task {task.name!r}, as the recipe's `task` says, got "
                f"{made.task.name!r}; make the two the same"
            )
        return replace(made, fingerprint=fingerprint([code, made.fingerprint.encode()]))
    parts = _parts(made, reference)
    if not task.labeled_images:
        return sample_splits(parts, task, settings=settings, where=reference, content=code)
    source = source_of_parts(parts, settings, reference, code, preprocessing)
    splits = splits_of(source, settings, task)
    if preprocessing is None or source.shape is not None:
        return splits
    shape = (len(preprocessing.mean), preprocessing.height, preprocessing.width)
    return replace(splits, preprocessing=preprocessing, sample_shape=shape)


def _parts(made: Any, reference: str) -> dict[str, Any]:
    """Return the data sets of a factory by name."""
    parts = dict(zip(PARTS, made, strict=False)) if isinstance(made, tuple) else made
    if isinstance(parts, Mapping) and (not isinstance(made, tuple) or len(made) in (2, 3)):
        names = set(map(str, parts))
        if {"train", "test"} <= names <= set(PARTS):
            return dict(parts)
    got = f"a tuple of {len(made)}" if isinstance(made, tuple) else type(made).__name__
    if isinstance(made, Mapping):
        got = f"a mapping with {', '.join(map(str, made)) or 'nothing'}"
    raise DataError(
        f"{reference}: expected the factory to return prunekit.data.splits.Splits, or data sets as (train, test), as "
        f"(train, test, validation) or as a mapping with these names, got {got}"
    )


def sample_splits(
    parts: Mapping[str, Any],
    task: Task | str,
    *,
    classes: Sequence[str] | None = None,
    settings: DataSettings | None = None,
    where: str = "data",
    content: bytes = b"",
) -> Splits:
    """Return the splits of a task's data sets.

    Args:
        parts: map-style data sets by the names `train`, `test` and perhaps `validation`, which else is drawn from
            `train` at random: `validation_share` of its samples, the same for the same `split_seed`.
        task: that they are for; itself or its name.
        classes: names of the classes; None: the attribute `classes` of the training data, if there is one.
        settings: how they are split.
        where: name of the data in messages.
        content: bytes that identify the data, besides a few samples of each part.

    Raises:
        DataError: a part is no map-style data set or has too few samples, or the task cannot unpack them.
        UsageError: the settings change images.
    """
    settings, task = settings or DataSettings("own"), get_task(task)
    changed = [f"data.{key}" for key in OF_IMAGES if getattr(settings, key) != getattr(DataSettings(), key)]
    if changed:
        raise UsageError(
            f"{where}: {', '.join(changed)} would change nothing, because task {task.name!r} takes samples as they "
            "are; leave that out, and let the data set do it"
        )
    if not {"train", "test"} <= set(parts):
        raise DataError(f"{where}: expected data sets named train and test, and perhaps validation, got {list(parts)}")
    for name, part in parts.items():
        require_map_style(part, f"{where} {name}")
        if len(part) < (2 if name == "train" else 1):
            raise DataError(f"{where} {name}: expected samples, two at least to train on, got {len(part)}")
    names = getattr(parts["train"], "classes", ()) if classes is None else classes
    made = {name: TaskSamples(part, task.unpacking, f"{where} {name}") for name, part in parts.items()}
    if "validation" not in made:
        total = len(parts["train"])
        count = min(max(round(total * settings.validation_share), 1), total - 1)  # at least one in each part
        order = np.random.default_rng(settings.split_seed).permutation(total)
        made["validation"] = replace(made["train"], indices=torch.from_numpy(np.sort(order[:count])))
        made["train"] = replace(made["train"], indices=torch.from_numpy(np.sort(order[count:])))
    seen_by = [part if task.binding is None else part.whole() for part in made.values()]
    known = [part.fetch(torch.linspace(0, len(part) - 1, min(KNOWN_BY, len(part))).long()) for part in seen_by]
    shape = tuple(gather(known[0][0])[0].shape[1:])
    how = f"{task.name} {settings.validation_share} {settings.split_seed} {[len(part) for part in made.values()]}"
    seen = [tensor.contiguous().numpy().tobytes() for batch in known for tensor in gather(batch)]
    marks = fingerprint([how.encode(), content, *seen])
    return Splits(made["train"], made["validation"], made["test"], tuple(map(str, names)), shape, marks, task)


@dataclass(frozen=True, eq=False)
class TaskSamples:
    """A map-style data set whose samples are collated and unpacked by the task.

    What it draws at random for a training sample depends on seed, epoch and index alone, not on workers.
    """

    dataset: MapStyle  # of samples that the task can collate, such as (image, mask) or a mapping of tensors
    unpacking: BatchUnpacker  # of a batch by the task
    where: str  # name of the data in messages
    indices: Tensor | None = None  # (N,) int64, which of the samples; None: all
    corrupt: CorruptImages = field(default_factory=CorruptImages)  # stays empty: a sample that cannot be read raises

    def __len__(self) -> int:
        return len(self.dataset if self.indices is None else self.indices)

    def whole(self) -> TaskSamples:
        """Return the samples with batches left whole, as long as the task cannot take them apart, see `Task.bound`."""
        return replace(self, unpacking=replace(self.unpacking, unpack=lambda batch: (batch, gather(batch)[0])))

    def fetch(self, indices: Tensor, draw: Draw | None = None) -> tuple[Any, Any]:
        """Return a batch, inputs and targets."""
        samples, chosen = [], (indices if self.indices is None else self.indices[indices]).tolist()
        with drawing(draw) as begin:
            for index in chosen:
                begin(index)
                with raised_as(DataError, f"{self.where}: sample {index}: ", reason=with_type):
                    samples.append(self.dataset[index])
        try:
            batch = self.unpacking.collate(samples)
        except (RuntimeError, TypeError, KeyError, ValueError) as error:
            reraise_shortage(error)
            raise DataError(
                f"{self.where}: samples {chosen[:4]}...: expected samples of the same shapes that "
                f"can be collated to a batch, got {type(error).__name__}: {error}"
            ) from error
        return self.unpacking(batch, self.where)
