"""Sentence embeddings: BERT of transformers with a mean over tokens, trained on pairs (Reimers & Gurevych 2019)."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

from prunekit.tasks.task import Score, Task

TOPICS, WORDS, LONGEST = 8, 12, 10
"""Topics, words of each (0 fills up sentences), and words of the longest sentence."""


class SentenceEncoder(nn.Module):
    """A transformer whose tokens are averaged, without those that fill up a sentence."""

    def __init__(self, width: int = 32, blocks: int = 2) -> None:
        super().__init__()
        from transformers import BertConfig, BertModel

        config = BertConfig(
            vocab_size=TOPICS * WORDS + 1, hidden_size=width, num_hidden_layers=blocks, num_attention_heads=4,
            intermediate_size=2 * width, max_position_embeddings=LONGEST, hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )  # fmt: skip
        self.encoder = BertModel(config, add_pooling_layer=False)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Return embeddings (..., width) of token ids (..., T), such as those of pairs (B, 2, T)."""
        ids, mask = input_ids.flatten(0, -2), attention_mask.flatten(0, -2)
        states = self.encoder(input_ids=ids, attention_mask=mask).last_hidden_state
        mean = (states * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
        found: Tensor = mean.unflatten(0, input_ids.shape[:-1])
        return found


class Pairs(Dataset[dict[str, Tensor]]):
    """Pairs of sentences with the share of the first one's words that are of the second one's topic."""

    def __init__(self, seed: int, count: int) -> None:
        random = np.random.default_rng(seed)
        self.ids, self.alike = np.zeros((count, 2, LONGEST), np.int64), random.uniform(0, 1, count).astype("f4")
        for pair, alike in zip(self.ids, self.alike, strict=True):
            one, other = random.choice(TOPICS, 2, replace=False)
            lengths = random.integers(4, LONGEST + 1, 2)
            topics = np.where(random.uniform(0, 1, lengths[0]) < alike, one, other)
            pair[0, : lengths[0]] = 1 + topics * WORDS + random.integers(0, WORDS, lengths[0])
            pair[1, : lengths[1]] = 1 + one * WORDS + random.integers(0, WORDS, lengths[1])

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = torch.from_numpy(self.ids[index])
        return {"input_ids": ids, "attention_mask": (ids > 0).long(), "alike": torch.tensor(self.alike[index])}


def model() -> SentenceEncoder:
    """Return an untrained encoder."""
    return SentenceEncoder()


def data() -> tuple[Pairs, Pairs]:
    """Return training and test pairs."""
    return Pairs(0, 512), Pairs(1, 128)


def cosine(pairs: Tensor) -> Tensor:
    """Return the cosine similarity of pairs of embeddings (B, 2, width)."""
    return F.cosine_similarity(pairs[:, 0], pairs[:, 1], dim=1)


def loss(pairs: Tensor, alike: Tensor) -> Tensor:
    """Return the mean squared error of the similarity."""
    return F.mse_loss(cosine(pairs), alike)


def counts(pairs: Tensor, alike: Tensor) -> Tensor:
    """Return the sums that a correlation is computed from, float64."""
    x, y = cosine(pairs).double(), alike.double()
    return torch.stack([torch.ones_like(x), x, y, x * x, y * y, x * y]).sum(1)


def pearson(sums: Tensor) -> float:
    """Return Pearson's correlation in percent, 0 where there is none, or a negative one."""
    _, x, y, xx, yy, xy = (sums / sums[0]).tolist()
    spread = max(0.0, xx - x * x) * max(0.0, yy - y * y)
    return float(100 * max(0.0, xy - x * y) / spread**0.5) if spread else 0.0


def unpack(batch: Any) -> tuple[dict[str, Tensor], Tensor]:
    """Return token ids and masks (B, 2, T) by name, and how alike the two are, (B,)."""
    return {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}, batch["alike"]


def task() -> Task:
    """Return the task: the error of the similarity; its correlation with the wanted one, as on STS benchmarks."""
    return Task("sentences", loss, counts, (Score("pearson", "correlation", pearson),), unpack, samples="pairs")
