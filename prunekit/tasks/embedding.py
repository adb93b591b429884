"""Embeddings of texts and images: a pruned model shall give those of the dense one, and no labels are needed."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import default_collate

from prunekit.errors import DataError, ModelError, UsageError
from prunekit.tasks.task import Score, Task, register_task
from prunekit.tasks.texts import EXTRAS, LABELS, PaddedTexts
from prunekit.utils.context import training_mode
from prunekit.utils.inputs import MASK, call, described, inputs_as_example, to_device

Samples = list[Any]
"""For each sample of a batch a tensor, or tensors by name: what the dense model is given."""
PAIRED = 1024
"""Samples, the first ones, whose pairs are compared for the rank correlation: half a million pairs."""
NAMES = ("sentence_embedding", "text_embeds", "image_embeds", "last_hidden_state")
"""Entries of outputs of sentence-transformers and transformers that are embeddings, the most telling first."""


def embeddings(output: Any, mask: Tensor | None = None) -> Tensor:
    """Return the embedding of each sample, (B, D) float32.

    The output is (B, D), or a state for each token (B, T, D), or has one of these as one of `NAMES`. States are
    averaged over the tokens where the mask (B, T) is not zero.
    """
    found = output
    if isinstance(output, (tuple, list)):
        found = output[0]
    elif not isinstance(output, Tensor):
        each = (output.get(name) if isinstance(output, Mapping) else getattr(output, name, None) for name in NAMES)
        found = next((value for value in each if isinstance(value, Tensor)), None)
    if not isinstance(found, Tensor) or found.ndim not in (2, 3) or not found.is_floating_point():
        raise ModelError(
            f"expected embeddings (B, D), or states of tokens (B, T, D), as a tensor or as one of {', '.join(NAMES)}, "
            f"got {described(output)}"
        )
    if found.ndim == 2:
        return found.float()
    fits = mask is not None and mask.shape == found.shape[:2]
    counted = (mask != 0).to(found.device) if fits and mask is not None else found.new_ones(found.shape[:2]).bool()
    total = (found.float() * counted[..., None]).sum(1)  # (B, D)
    return total / counted.sum(1, keepdim=True).clamp_min(1)


def with_samples(batch: Any) -> tuple[Any, Samples]:
    """Return the inputs of a batch, without labels, and the samples, of which the dense model makes targets."""
    if isinstance(batch, Mapping):
        known = {name: item for name, item in batch.items() if name not in LABELS and name not in EXTRAS}
        inputs = {name: item for name, item in known.items() if isinstance(item, Tensor)}
        if not inputs or len({len(item) for item in inputs.values()}) != 1:
            raise DataError("expected tensors by name, with as many samples each")
        count = len(next(iter(inputs.values())))
        return inputs, [{name: item[at] for name, item in inputs.items()} for at in range(count)]
    first = batch[0] if isinstance(batch, (tuple, list)) and batch else batch
    if not isinstance(first, Tensor):
        raise DataError("expected a tensor, or tensors by name")
    return first, list(first)


def _mask(samples: Samples) -> Tensor | None:
    """Return the mask of tokens that count, (B, T); None if samples have none."""
    masked = isinstance(samples[0], Mapping) and MASK in samples[0]
    return torch.stack([sample[MASK] for sample in samples]) if masked else None


@dataclass(frozen=True, eq=False)
class DenseEmbeddings:
    """The embeddings of the dense model, which are the targets. The model stays as it is."""

    dense: nn.Module  # the model, on the device where it runs

    def __call__(self, samples: Samples) -> Tensor:
        """Return the embeddings of samples, (B, D) float32 on the model's device, without gradients."""
        place = next((one.device for one in self.dense.parameters()), torch.device("cpu"))
        inputs = to_device(default_collate(samples), place)
        with training_mode(self.dense, False), torch.no_grad():
            return embeddings(call(self.dense, inputs_as_example(self.dense, inputs)), _mask(samples))

    def loss(self, output: Any, samples: Samples) -> Tensor:
        """Return one less the mean cosine to the dense model's embeddings."""
        found = embeddings(output, _mask(samples))
        return 1 - F.cosine_similarity(found, self(samples).to(found.device), dim=1).mean()


class EmbeddingMetric:
    """The cosines of all samples, and the pairs of the first ones."""

    def __init__(self, dense: DenseEmbeddings) -> None:
        self._dense = dense
        self._cosines, self._count = 0.0, 0
        self._first: tuple[list[Tensor], list[Tensor]] = [], []

    def update(self, output: Any, samples: Samples) -> None:
        """Add a batch."""
        pair = embeddings(output, _mask(samples)).cpu(), self._dense(samples).cpu()
        self._cosines += float(F.cosine_similarity(*pair, dim=1).double().sum())
        for kept, found in zip(self._first, pair, strict=True):
            kept.extend(islice(found, max(0, PAIRED - self._count)))
        self._count += len(samples)

    def compute(self) -> dict[str, float]:
        """Return both scores, in percent."""
        found, wanted = (torch.stack(kept) for kept in self._first)
        return {
            "cosine": 100 * max(0.0, self._cosines / self._count),
            "spearman": 100 * rank_correlation(found, wanted),
        }


def rank_correlation(found: Tensor, wanted: Tensor) -> float:
    """Return Spearman's correlation of the cosines of all pairs of embeddings (N, D); 0 if negative or unknown."""
    import pandas as pd

    rows, columns = torch.triu_indices(len(found), len(found), 1)
    similar = [(each := F.normalize(values.double(), dim=1)) @ each.T for values in (found, wanted)]
    ranks = [pd.Series(cosines[rows, columns].numpy()).rank() for cosines in similar]
    known = float(ranks[0].corr(ranks[1])) if len(rows) > 1 else 0.0
    return max(0.0, known) if known == known else 0.0


def _unbound(*_: Any) -> Any:
    raise UsageError(
        "task 'embedding': its targets are the embeddings of the dense model, which is not known here: give "
        'prunekit.tasks.task.get_task("embedding").bound(dense), with a copy if the model is pruned in place'
    )


def _bound(task: Task, dense: nn.Module) -> Task:
    known = DenseEmbeddings(dense)
    return replace(task, loss=known.loss, metric=partial(EmbeddingMetric, known))


EMBEDDING = register_task(
    "embedding", data="token ids by name, or images; no labels", measures="cosine to the dense model; cosine, ranks"
)(
    Task(
        "embedding",
        _unbound,
        None,
        (
            Score("cosine", "cosine to the dense model", itemgetter("cosine")),
            Score("spearman", "rank correlation of similarities", itemgetter("spearman")),
        ),
        with_samples,
        samples="texts",
        collate=PaddedTexts(),
        metric=_unbound,
        texts="lines",
        binding=_bound,
        from_dense=True,
    )
)
"""Texts without labels; one less the cosine to the dense model's embeddings; mean cosine, and Spearman's correlation of
the similarities of pairs of texts."""
