"""Data of any task: map-style data sets whose batches the task takes apart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import default_collate

from prunekit.data.augment import Draw, drawing
from prunekit.data.corrupt import CorruptImages
from prunekit.data.decoded import MapStyle
from prunekit.data.splits import Splits, fingerprint
from prunekit.errors import DataError, UsageError
from prunekit.nested import gather
from prunekit.settings.data import DataSettings
from prunekit.tasks import Task, Unpacking, get_task

KNOWN_BY = 16
"""Samples of each part that its fingerprint is taken from: reading all would take too long."""
OF_IMAGES = ("image_size", "augment", "mean", "std", "max_corrupt")
"""Settings of labeled images, which nothing else obeys."""


@dataclass(frozen=True, eq=False)
class Samples:
    """A map-style data set whose samples are collated by torch's `default_collate` and taken apart by the task.

    What it draws at random for a training sample depends on seed, epoch and index alone, not on workers.

    Args:
        dataset: gives samples, such as (image, mask) or a mapping of tensors, all of the same shapes.
        unpacking: of the task that knows them (`Task.unpacking`).
        where: what the data is, for messages.
        indices: (N,) int64, which of its samples; None: all.
    """

    dataset: MapStyle
    unpacking: Unpacking
    where: str
    indices: Tensor | None = None
    corrupt: CorruptImages = field(default_factory=CorruptImages)

    def __len__(self) -> int:
        return len(self.dataset if self.indices is None else self.indices)

    def fetch(self, indices: Tensor, draw: Draw | None = None) -> tuple[Any, Any]:
        """A batch: inputs and targets.

        Raises:
            DataError: a sample cannot be read or collated with the others, or the task cannot unpack them.
        """
        samples, chosen = [], (indices if self.indices is None else self.indices[indices]).tolist()
        with drawing(draw) as begin:
            for index in chosen:
                begin(index)
                samples.append(self._sample(index))
        try:
            batch = default_collate(samples)
        except (RuntimeError, TypeError, KeyError) as error:
            raise DataError(
                f"{self.where}: samples {chosen[:4]}...: expected samples of the same shapes that torch's "
                f"default_collate makes a batch of, got {type(error).__name__}: {error}"
            ) from error
        return self.unpacking(batch, self.where)

    def _sample(self, index: int) -> Any:
        try:
            return self.dataset[index]
        except Exception as error:  # the user's own code may raise anything
            raise DataError(f"{self.where}: sample {index}: {type(error).__name__}: {error}") from error


def sample_splits(
    parts: Mapping[str, Any],
    task: Task | str,
    *,
    classes: Sequence[str] | None = None,
    settings: DataSettings | None = None,
    where: str = "data",
    content: bytes = b"",
) -> Splits:
    """Splits of a task's data sets.

    Args:
        parts: map-style data sets by the names `train`, `test` and perhaps `validation`, which is else drawn from
            `train` at random: `validation_share` of its samples, the same for the same `split_seed`.
        task: what they are for; itself or its name.
        classes: names of the classes; None: what the training data calls `classes`, if anything.
        settings: how they are split.
        where: what the data is, for messages.
        content: what the data is known by, besides a few samples of each part.

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
        if not hasattr(part, "__getitem__") or not hasattr(part, "__len__"):
            raise DataError(
                f"{where} {name}: expected a map-style data set, with __len__ and __getitem__, got "
                f"{type(part).__name__}"
            )
        if len(part) < (2 if name == "train" else 1):
            raise DataError(f"{where} {name}: expected samples, two at least to train on, got {len(part)}")
    names = getattr(parts["train"], "classes", ()) if classes is None else classes
    made = {name: Samples(part, task.unpacking, f"{where} {name}") for name, part in parts.items()}
    if "validation" not in made:
        rest, drawn = _drawn(len(parts["train"]), settings)
        made["validation"] = replace(made["train"], indices=drawn)
        made["train"] = replace(made["train"], indices=rest)
    known = [part.fetch(torch.linspace(0, len(part) - 1, min(KNOWN_BY, len(part))).long()) for part in made.values()]
    shape = tuple(gather(known[0][0])[0].shape[1:])
    how = f"{task.name} {settings.validation_share} {settings.split_seed} {[len(part) for part in made.values()]}"
    seen = [tensor.contiguous().numpy().tobytes() for batch in known for tensor in gather(batch)]
    marks = fingerprint([how.encode(), content, *seen])
    return Splits(made["train"], made["validation"], made["test"], tuple(map(str, names)), shape, marks, task)


def _drawn(total: int, settings: DataSettings) -> tuple[Tensor, Tensor]:
    """The rest, and what is drawn, both in their order; at least one sample in each."""
    count = min(max(round(total * settings.validation_share), 1), total - 1)
    drawn = np.zeros(total, dtype=bool)
    drawn[np.random.default_rng(settings.split_seed).permutation(total)[:count]] = True
    return torch.from_numpy(np.flatnonzero(~drawn)), torch.from_numpy(np.flatnonzero(drawn))
