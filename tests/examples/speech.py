"""Speech to letters: wav2vec 2.0 (Baevski et al. 2020) of transformers, with connectionist temporal classification.

The recordings are sequences of tones, one for each letter, in noise.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from prunekit.tasks.task import Score, Task

if TYPE_CHECKING:
    from transformers import Wav2Vec2ForCTC

LETTERS, LONGEST, SAMPLES, RATE = 5, 6, 160, 4000
"""Letters, from 1 on (0 is the blank, and fills up targets); letters of a recording; samples of a letter and second."""


def model() -> Wav2Vec2ForCTC:
    """Return an untrained wav2vec 2.0 of 2 blocks, which returns scores (B, frames, letters + 1) in `.logits`."""
    from transformers import Wav2Vec2Config, Wav2Vec2ForCTC

    return Wav2Vec2ForCTC(
        Wav2Vec2Config(
            vocab_size=LETTERS + 1, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
            conv_dim=(32, 32, 32), conv_kernel=(10, 4, 4), conv_stride=(5, 4, 2), num_conv_pos_embeddings=8,
            num_conv_pos_embedding_groups=4, initializer_range=0.1, mask_time_prob=0.0, layerdrop=0.0,
            hidden_dropout=0.0, attention_dropout=0.0, activation_dropout=0.0, feat_proj_dropout=0.0, final_dropout=0.0,
        )
    )  # fmt: skip


def recordings(seed: int, count: int) -> TensorDataset:
    """Return recordings (samples,) float32 with letters (LONGEST,) int64, after the last of which zeros follow."""
    random, time = np.random.default_rng(seed), np.arange(SAMPLES) / RATE
    waves = 0.05 * random.standard_normal((count, SAMPLES * (LONGEST + 1)))
    letters = np.zeros((count, LONGEST), np.int64)
    for wave, word in zip(waves, letters, strict=True):
        word[: random.integers(3, LONGEST + 1)] = random.integers(1, LETTERS + 1)
        for place in range(1, np.count_nonzero(word)):  # no letter twice in a row
            word[place] = (word[place - 1] - 1 + random.integers(1, LETTERS)) % LETTERS + 1
        for place, letter in enumerate(word[word > 0]):
            start = int((place + random.uniform(0, 1)) * SAMPLES)
            wave[start : start + SAMPLES] += np.sin(2 * np.pi * 200 * letter * time)
    return TensorDataset(torch.from_numpy(waves.astype("f4")), torch.from_numpy(letters))


def data() -> tuple[TensorDataset, TensorDataset]:
    """Return training and test recordings."""
    return recordings(0, 512), recordings(1, 64)


def loss(output: Any, letters: Tensor) -> Tensor:
    """Return the loss of connectionist temporal classification (Graves et al. 2006), mean over letters."""
    scores = output.logits.float().log_softmax(2).transpose(0, 1)  # (frames, B, letters + 1)
    frames = torch.full((len(letters),), len(scores))
    return F.ctc_loss(scores, letters, frames, (letters > 0).sum(1), zero_infinity=True)


def counts(output: Any, letters: Tensor) -> Tensor:
    """Return the edits from what is heard to what was said, and the letters that were said, float64."""
    best = output.logits.argmax(2).cpu()
    heard = [row.unique_consecutive() for row in best]
    edits = [distance(row[row > 0].tolist(), word[word > 0].tolist()) for row, word in zip(heard, letters, strict=True)]
    return torch.tensor([sum(edits), int((letters > 0).sum())], dtype=torch.float64, device=letters.device)


def distance(first: list[int], second: list[int]) -> int:
    """Return the number of insertions, deletions and substitutions from one to the other (Levenshtein 1966)."""
    row = list(range(len(second) + 1))
    for i, one in enumerate(first, 1):
        before, row[0] = row[0], i
        for j, other in enumerate(second, 1):
            before, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, before + (one != other))
    return row[-1]


def task() -> Task:
    """Return the task: the loss; the percentage of letters that need no edit, 100 minus the letter error rate."""
    right = Score("letters", "letter accuracy", lambda sums: 100 * max(0.0, 1 - float(sums[0] / sums[1])))
    return Task("speech", loss, counts, (right,), samples="recordings")
