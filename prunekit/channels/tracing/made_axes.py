"""Axes that the model's code makes on tensors computed from its inputs, such as the channels of a time embedding.

An axis of an input has the size that the input has. One that comes from a range of numbers, with which the input is
only multiplied, does not: of that axis the compact model may take some positions. Labels say which is which, and the
rules that move the labels of parameters move these as well.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from prunekit.channels.constraints import Crossed
from prunekit.channels.labels import Field, Labels, along
from prunekit.channels.tracing.label_flow import LabelFlow


class MadeAxes(LabelFlow):
    """A flow of labels of its own, beside that of the parameters: on tensors that have none of theirs."""

    def fields(self, tensor: Any) -> tuple[Field, ...]:
        """Return the fields of a tensor in this flow."""
        owner, found = getattr(tensor, "_prunekit_made", (None, ()))
        return found if owner is self.owner else ()

    def set(self, tensor: torch.Tensor, fields: Iterable[Field]) -> None:
        """Set the fields of a tensor in this flow."""
        kept = tuple([field for field in fields if field.labels.size > 1])
        tensor._prunekit_made = self.owner, kept  # type: ignore[attr-defined]

    def add(self, tensor: torch.Tensor) -> None:
        """Give every axis of a tensor labels."""
        shape = enumerate(tensor.shape)
        self.set(tensor, [Field(along(self.union.new(n), i, tensor.dim()), zero=False) for i, n in shape if n > 1])

    def made(self, tensor: torch.Tensor, axis: int) -> bool:
        """Return whether all positions of an axis were made by code."""
        return any(axis in field.span and bool(field.labels.all()) for field in self.fields(tensor))

    def lock_if_read(self, tensor: torch.Tensor, labels: Labels, reason: str) -> None:
        """Do nothing: a lock of these labels has no effect."""

    def cross_if_read(self, tensor: torch.Tensor, crossed: Sequence[Crossed]) -> None:
        """Do nothing, as above."""

    def crossed(self, tensor: torch.Tensor) -> Sequence[Crossed]:
        """Return no constraints."""
        return ()
