"""Samples that come one at a time, from data sets and generators, put together into batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset, default_collate

from prunekit.errors import DataError, reraise_shortage
from prunekit.tasks.texts import LABELS
from prunekit.utils.inputs import are_images, described, images_in, is_image, takes_list
from prunekit.utils.tensors import gather

IMAGES = 16
"""Images of a batch in which each is a tensor of its own: those of detectors are large."""


def is_sample_set(data: Any) -> bool:
    """Return whether data is a map-style data set of samples: torch's, or one with its protocol."""
    if isinstance(data, Dataset):
        return not isinstance(data, IterableDataset) and hasattr(data, "__len__")
    return hasattr(data, "__getitems__") and hasattr(data, "__len__")


def is_image_batch(model: nn.Module, batch: Any) -> bool:
    """Return whether a batch is images (C, H, W) and nothing else.

    A tuple of two is an image with one to compare with, where the model takes no list.
    """
    pair = isinstance(batch, tuple) and len(batch) == 2
    return are_images(model, batch) and (not pair or takes_list(model, batch[0]))


def samples_in_batches(
    model: nn.Module,
    data: Any,
    names: Set[str] | None,
    where: str,
    size: int,
    count: int | None,
    collate: Callable[[list[Any]], Any] = default_collate,
) -> Iterator[Any]:
    """Yield batches of a map-style data set."""
    total = len(data)
    chosen = torch.linspace(0, total - 1, min(total, count or total)).round().long().tolist() if total else []
    size = min(size, IMAGES) if takes_list(model) else size
    for start in range(0, len(chosen), size):
        samples = [_named(data[index], names, where) for index in chosen[start : start + size]]
        yield together(model, samples, where, collate)


def batches_among(model: nn.Module, data: Iterable[Any], where: str, size: int) -> Iterator[Any]:
    """Yield batches of an iterable; its items are batches, or samples, which are put together.

    An item is a sample if its input is an image (C, H, W), or, in an iterable data set, has one axis or none.
    """
    size = min(size, IMAGES) if takes_list(model) else size
    rest, flat = iter(data), isinstance(data, IterableDataset)
    for first in rest:
        if _is_sample(model, first, flat=flat):
            yield together(model, [first, *islice(rest, size - 1)], where)
        else:
            yield first


def _is_sample(model: nn.Module, item: Any, *, flat: bool) -> bool:
    if is_image_batch(model, item):
        return False
    first = item[0] if isinstance(item, (tuple, list)) and item else item
    if isinstance(first, Mapping):
        found = images_in(model, first)
        tensors = gather(first) if found is None else [found]
    else:
        tensors = [first] if isinstance(first, Tensor) else []
    images = any(is_image(model, tensor) for tensor in tensors)
    return images or (flat and bool(tensors) and all(tensor.dim() <= 1 for tensor in tensors))


def together(
    model: nn.Module, samples: list[Any], where: str, collate: Callable[[list[Any]], Any] = default_collate
) -> Any:
    """Return samples as one batch: stacked, or as lists of images and of what belongs to each."""
    images = [_image_of(model, sample) for sample in samples]
    listed = are_images(model, images)
    try:
        if not (listed and takes_list(model, images[0])):
            return collate(samples)
    except (RuntimeError, TypeError, KeyError) as error:
        reraise_shortage(error)
        if not listed:
            kind = type(samples[0]).__name__
            advice = (
                "give tensors, such as torchvision.transforms.v2.functional.pil_to_tensor(image) / 255"
                if any("PIL." in type(part).__module__ + "." for part in _parts(samples[0]))
                else "give a DataLoader with a collate_fn, for texts transformers.DataCollatorWithPadding"
            )
            raise DataError(
                f"{where}: expected samples of the same shapes, of which torch's default_collate makes a batch, got "
                f"{kind} such as {described(samples[0])}: {error}; {advice}"
            ) from error
    if isinstance(samples[0], Tensor):
        return (images,)
    if isinstance(samples[0], Mapping):
        return images, list(samples)
    return images, *([*column] for column in zip(*(sample[1:] for sample in samples), strict=True))


def _parts(sample: Any) -> Iterable[Any]:
    if isinstance(sample, Mapping):
        return sample.values()
    return sample if isinstance(sample, (tuple, list)) else [sample]


def _image_of(model: nn.Module, sample: Any) -> Any:
    if isinstance(sample, Mapping):
        return images_in(model, sample)
    return sample[0] if isinstance(sample, (tuple, list)) and sample else sample


def _named(sample: Any, names: Set[str] | None, where: str) -> Any:
    """Return the entries of a sample that have one of these names; all if it has none of them."""
    if names is None or not isinstance(sample, Mapping) or names.isdisjoint(sample):
        return sample
    found = {name: item for name, item in sample.items() if name in names}
    if found.keys() <= set(LABELS):  # the inputs have other names
        return sample
    plain = next((name for name, item in found.items() if isinstance(item, list)), None)
    if plain is not None:
        raise DataError(
            f"{where}: expected samples of tensors, got a list in {plain!r}; a datasets.Dataset gives tensors after "
            f'.with_format("torch")'
        )
    return found
