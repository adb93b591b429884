"""What a user's own files hold for tasks other than classifying images: real data, made into tasks that train fast."""

from __future__ import annotations

import importlib
import inspect
import re
import zlib
from collections import OrderedDict
from importlib import resources
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from prunekit.tasks.task import Score, Task
from prunekit.utils.tensors import map_tensors

IGNORED, SIDE, TOKENS, WORDS = 255, 16, 16, 1024
LONGEST = TOKENS - 1
"""Transformers make other calls on a batch without any padding."""
ABOUT = {
    "numbers": ("cmath", "decimal", "fractions", "math", "random", "statistics"),
    "network": ("ftplib", "http.client", "http.cookiejar", "imaplib", "poplib", "smtplib", "socket", "urllib.request"),
}


class Rows(Dataset[Any]):
    """Samples that are the rows of tensors, nested as these are."""

    def __init__(self, tensors: Any, classes: tuple[str, ...], count: int) -> None:
        self.tensors, self.classes, self.count = tensors, classes, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        return map_tensors(self.tensors, lambda tensor: tensor[index])


def zeros_and_ones() -> tuple[Rows, Rows]:
    """Handwritten zeros and ones, each somewhere on a slope of gray with noise; which pixels are ink, and whose.

    Ink is what has more than half of the full intensity (9 to 16 of 16); the soft edge of a stroke, 4 to 8, is ignored.
    """
    with resources.as_file(resources.files("prunekit.data") / "digits.npz") as path, np.load(path) as archive:
        chosen = archive["labels"] < 2
        digits, labels = archive["images"][chosen].astype(np.float32), archive["labels"][chosen]
    draw = np.random.default_rng(0)
    images = np.linspace(0, 6, SIDE, dtype=np.float32) * draw.uniform(-1, 1, (len(digits), SIDE, 1)).astype(np.float32)
    images += draw.normal(3, 1, images.shape).astype(np.float32)
    masks = np.zeros(images.shape, np.int64)
    for image, mask, digit, label in zip(images, masks, digits, labels, strict=True):
        row, column = draw.integers(0, SIDE - 8, 2)
        window = (slice(row, row + 8), slice(column, column + 8))
        image[window] = np.maximum(image[window], digit)
        mask[window] = np.where(digit > 8, 1 + label, np.where(digit > 3, IGNORED, 0))
    pair = (torch.from_numpy(images / 16)[:, None], torch.from_numpy(masks))
    classes, count = ("ground", "zero", "one"), 280
    rest = map_tensors(pair, lambda tensor: tensor[count:])
    return Rows(pair, classes, count), Rows(rest, classes, len(digits) - count)


class Segmenter(nn.Module):
    """Two convolutions down, two up, and an auxiliary head, returned by name as torchvision's models do."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Sequential(*_block(1, 16), *_block(16, 32, stride=2))
        self.up = nn.Sequential(*_block(32, 32), nn.Upsample(scale_factor=2), *_block(32, 16))
        self.out, self.aux = nn.Conv2d(16, 3, 1), nn.Conv2d(32, 3, 1)

    def forward(self, images: Tensor) -> OrderedDict[str, Tensor]:
        deep = self.down(images)
        found = OrderedDict(out=self.out(self.up(deep)))
        if self.training:
            found["aux"] = nn.functional.interpolate(self.aux(deep), images.shape[-2:])
        return found


def _block(before: int, after: int, stride: int = 1) -> list[nn.Module]:
    return [nn.Conv2d(before, after, 3, stride, 1, bias=False), nn.BatchNorm2d(after), nn.ReLU()]


def docstrings() -> tuple[Rows, Rows]:
    """Pieces of Python's own docstrings: are they of modules about numbers, or about networks?

    Words are hashed to token ids. All pieces of one docstring are in one part; every fourth docstring is for testing.
    """
    parts: tuple[list[tuple[list[int], int]], ...] = ([], [])
    for label, modules in enumerate(ABOUT.values()):
        found = sorted({text for name in modules for text in _documented(importlib.import_module(name))})
        for number, text in enumerate(found):
            words = re.findall(r"[a-z]+", text.lower())
            ids = [2 + zlib.crc32(word.encode()) % (WORDS - 2) for word in words]
            pieces = [ids[start : start + LONGEST] for start in range(0, len(ids), LONGEST)]
            parts[number % 4 == 0].extend((piece, label) for piece in pieces if len(piece) >= 6)
    train, test = (_tokenized(part) for part in parts)
    return Rows(train, tuple(ABOUT), len(train["labels"])), Rows(test, tuple(ABOUT), len(test["labels"]))


def _documented(module: Any) -> list[str]:
    own = [thing for thing in vars(module).values() if getattr(thing, "__module__", None) == module.__name__]
    own += [member for thing in own if inspect.isclass(thing) for member in vars(thing).values()]
    return [text for thing in own if callable(thing) and (text := inspect.getdoc(thing))]


def _tokenized(pieces: list[tuple[list[int], int]]) -> dict[str, Tensor]:
    ids = torch.zeros(len(pieces), TOKENS, dtype=torch.int64)
    for row, (piece, _) in zip(ids, pieces, strict=True):
        row[: len(piece)] = torch.tensor(piece)
    labels = torch.tensor([label for _, label in pieces])
    return {"labels": labels, "attention_mask": (ids > 0).long(), "input_ids": ids}


def bert() -> nn.Module:
    """A BERT of two layers, from its configuration alone."""
    from transformers import BertConfig, BertForSequenceClassification

    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    return BertForSequenceClassification(BertConfig(vocab_size=WORDS, max_position_embeddings=TOKENS, **sizes))


def heights() -> tuple[Rows, Rows]:
    """The digits again, as numbers to predict: the share of ink in the upper half of each."""
    with resources.as_file(resources.files("prunekit.data") / "digits.npz") as path, np.load(path) as archive:
        images = torch.from_numpy(archive["images"].astype(np.float32))[:, None] / 16
    upper = images[:, 0, :4].sum((1, 2)) / images[:, 0].sum((1, 2))
    rest = (images[500:700], upper[500:700])
    return Rows((images[:500], upper[:500]), (), 500), Rows(rest, (), 200)


def regression() -> Task:
    """Numbers: the squared error, and the share of the variance that is explained, 0 at least, in percent."""

    def counts(output: Tensor, wanted: Tensor) -> Tensor:
        error = (output[:, 0] - wanted).double().square().sum()
        return torch.stack(
            [error, wanted.double().square().sum(), wanted.double().sum(), wanted.new_tensor(len(wanted))]
        )

    def explained(sums: Tensor) -> float:
        error, squares, total, count = sums.tolist()
        return 100 * max(0.0, 1 - error / max(squares - total**2 / count, 1e-12))

    return Task(
        "regression",
        lambda output, wanted: nn.functional.mse_loss(output[:, 0], wanted),
        counts,
        (Score("r2", "explained variance", explained),),
    )


def regressor() -> nn.Module:
    return nn.Sequential(*_block(1, 16), *_block(16, 16, stride=2), nn.Flatten(), nn.Linear(256, 1))
