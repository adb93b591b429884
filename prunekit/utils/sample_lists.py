"""Lists of samples: inputs in which each sample is a tensor of its own, as images of different sizes are.

Samples are on the first axis of a tensor, or the entries of a list. Which lists of tensors hold one sample in each
entry, and which hold tensors that each have all samples on their first axis, as feature maps of several levels do, is
told by one rule, `holds_samples`. A tuple holds several arguments, and never samples.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from prunekit.utils.tensors import gather_parts, map_parts

IMAGE_AXES = 3
"""Axes of an image, (C, H, W)."""


def holds_samples(values: Any, samples: int | None = None) -> bool:
    """Return whether each entry of a list is a sample: an image, or what belongs to it, such as its boxes.

    The rule: entries are samples if they are mappings, tensors of three axes as images (C, H, W) are, or tensors whose
    first axes differ in size, which cannot be the samples then. Other lists hold tensors with all samples on their
    first axis, such as feature maps (B, C, H, W) of several levels. Where the number of samples is known from another
    input, a list of that length holds samples unless the first axes of its tensors have that size too, and a list of
    another length does not.
    """
    if not isinstance(values, list) or not values or (samples is not None and len(values) != samples):
        return False
    if all(isinstance(value, Mapping) for value in values):
        return True
    if not all(isinstance(value, Tensor) for value in values):
        return False
    lengths = {value.shape[:1] for value in values}
    if samples is not None and lengths != {torch.Size([samples])}:
        return True
    return len(lengths) > 1 or {value.dim() for value in values} == {IMAGE_AXES}


def sample_parts(inputs: Any) -> list[Any]:
    """Return all lists of samples, and all tensors that are in none, in their order."""
    return gather_parts(inputs, partial(holds_samples, samples=count_samples(inputs)))


def count_samples(inputs: Any) -> int | None:
    """Return the number of samples, by the first list of them or the first tensor with an axis; None without either."""
    parts = gather_parts(inputs, holds_samples)
    return next((len(part) for part in parts if isinstance(part, list) or part.dim()), None)


def has_sample_lists(inputs: Any) -> bool:
    """Return whether any samples are the entries of a list."""
    return any(isinstance(part, list) for part in sample_parts(inputs))


def map_samples(inputs: Any, tensors: Callable[[Tensor], Any], lists: Callable[[list[Any]], Any]) -> Any:
    """Return the same nesting with functions applied to all lists of samples, and to all tensors that are in none."""

    def changed(part: Any) -> Any:
        return lists(part) if isinstance(part, list) else tensors(part)

    return map_parts(inputs, changed, partial(holds_samples, samples=count_samples(inputs)))
