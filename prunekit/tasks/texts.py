"""Texts in batches: what of a mapping is input and what labels, and how texts of several lengths are put together."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import default_collate

from prunekit.errors import DataError
from prunekit.utils.inputs import MASK

LABELS = ("labels", "label")
"""Names of the targets in batches of texts."""
IGNORED = -100
"""The label of tokens that do not count, as in PyTorch's cross entropy and in transformers."""
EXTRAS = frozenset({"special_tokens_mask", "offset_mapping", "overflow_to_sample_mapping", "length"})
"""What tokenizers return besides inputs of models."""
IDS = "input_ids"


def named_inputs(batch: Any) -> dict[str, Tensor]:
    """Return the tensors of a batch by the names of the model's arguments, without labels.

    Labels are no inputs: given them, models of transformers would compute a loss of their own.
    """
    ids = batch.get(IDS) if isinstance(batch, Mapping) else None
    if not isinstance(ids, Tensor) or ids.ndim != 2 or ids.is_floating_point():
        raise DataError("expected a mapping with input_ids (B, T) of whole numbers, and more by name")
    return {
        name: tensor
        for name, tensor in batch.items()
        if isinstance(tensor, Tensor) and name not in LABELS and name not in EXTRAS
    }


def token_labels(batch: Mapping[str, Any]) -> Tensor | None:
    """Return the label of each token, (B, T) int64, -100 where none counts; None if the batch has no labels."""
    found = next((batch[name] for name in LABELS if name in batch), None)
    if found is None:
        return None
    if not isinstance(found, Tensor) or found.ndim != 2 or found.is_floating_point():
        raise DataError("expected labels (B, T) of whole numbers, -100 where a token does not count")
    return found.long()


def counted_tokens(batch: Mapping[str, Any]) -> Tensor | None:
    """Return which tokens are none of padding, (B, T) bool; None without a mask that has a value for each."""
    mask = batch.get(MASK)
    fits = isinstance(mask, Tensor) and mask.shape == batch[IDS].shape
    return mask != 0 if fits and mask is not None else None


def counted_rows(inputs: Any, targets: Any, rows: int, ignored: int = IGNORED) -> Tensor | None:
    """Return which rows of class scores count, (rows,) bool, as the cross entropy does; None if all do.

    Labels of -100, or what a task has in its place, do not count; without a label for each row, nor do positions that
    the `attention_mask` leaves out.
    """
    if isinstance(targets, Tensor) and not targets.is_floating_point() and targets.numel() == rows:
        counted = targets.flatten() != ignored
    else:
        named = inputs[-1] if isinstance(inputs, tuple) and inputs else inputs
        mask = named.get(MASK) if isinstance(named, Mapping) else None
        if not isinstance(mask, Tensor) or mask.numel() != rows:
            return None
        counted = mask.flatten() != 0
    return counted


@dataclass(frozen=True)
class PaddedTexts:
    """The collation of texts of several lengths, padded at their ends to the longest of the batch.

    What belongs to tokens is padded: masks with 0, labels with -100, ids with `token`, everything else with 0. Where
    lengths differ and there is no `attention_mask`, one is made. Samples without `input_ids` are collated as a
    DataLoader does.

    Example:
        >>> import torch
        >>> from prunekit.tasks.texts import PaddedTexts
        >>> batch = PaddedTexts()([{"input_ids": torch.tensor([5, 6, 7])}, {"input_ids": torch.tensor([8])}])
        >>> batch["input_ids"].tolist(), batch["attention_mask"].tolist()
        ([[5, 6, 7], [8, 0, 0]], [[1, 1, 1], [1, 0, 0]])
    """

    token: int = 0  # id of the padding; as a mask marks it, any id will do

    def __call__(self, samples: list[Any]) -> Any:
        """Return samples as one batch."""
        if not all(isinstance(sample, Mapping) and IDS in sample for sample in samples):
            return default_collate(samples)
        rows: list[dict[str, Any]] = []
        for sample in samples:
            rows.append(dict(sample))
            for name, item in sample.items():
                if isinstance(item, Sequence) and len(item) > 0 and all(isinstance(value, int) for value in item):
                    rows[-1][name] = torch.as_tensor(item)
        lengths = {len(row[IDS]) for row in rows}
        if len(lengths) > 1 and all(MASK not in row for row in rows):
            for row in rows:
                row[MASK] = torch.ones_like(row[IDS])
        return {name: self._column(name, [row[name] for row in rows]) for name in rows[0]}

    def _column(self, name: str, values: list[Any]) -> Any:
        tensors = all(isinstance(value, Tensor) and value.ndim == 1 for value in values)
        if not tensors or len({len(value) for value in values}) == 1:
            return default_collate(values)
        fill = IGNORED if name in LABELS else self.token if name == IDS else 0
        longest = max(map(len, values))
        return torch.stack([F.pad(value, (0, longest - len(value)), value=fill) for value in values])
