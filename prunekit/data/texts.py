"""Texts as data: files and columns of text, cut into windows of tokens or taken line by line, split by blocks."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from numpy.typing import NDArray
from torch import Tensor

from prunekit.data.library_datasets import open_texts
from prunekit.data.sources import Splits
from prunekit.data.text_tokenizer import TextTokenizer, open_tokenizer
from prunekit.data.user_data import sample_splits
from prunekit.errors import DataError, UsageError, cut_short
from prunekit.reading.text_files import read_json_lines, read_text, shown
from prunekit.settings.inputs import DataSettings
from prunekit.tasks.task import Task
from prunekit.tasks.texts import IGNORED, PaddedTexts

WINDOW = 128
"""Tokens of a sample, unless settings say otherwise."""
SUFFIXES = (".txt", ".jsonl")
PARTS = ("train", "validation", "test")
FEWEST = {"train": 2, "validation": 1, "test": 1}
"""Samples that each part has at least."""
MASKED, REPLACED, KEPT = 0.15, 0.8, 0.9
"""Share of tokens that are predicted; of these the share that is masked, and that with the one of random tokens."""
Ids = NDArray[np.int32]


def text_splits(settings: DataSettings, task: Task) -> Splits:
    """Return texts as the samples of a task, split into blocks: what comes first is trained on, the end is tested.

    Neighboring texts are alike, so that a random split would tell too good a score. A data set of Hugging Face's
    library keeps its own parts.
    """
    if settings.test_share + settings.validation_share >= 1:
        raise UsageError(
            f"data: expected test_share + validation_share < 1, got {settings.test_share} + {settings.validation_share}"
        )
    where, tokenizer = str(settings.root or settings.name), open_tokenizer(settings.tokenizer)
    known = _documents(settings, task)
    made = {name: _samples(texts, tokenizer, settings, task) for name, texts in known.items()}
    parts = _blocks(made, settings, f"{where}: {_unit(task, settings)}")
    content = [f"{task.texts} {settings.window} {tokenizer.vocabulary}", *(one.digest for one in made.values())]
    task = replace(task, collate=PaddedTexts(tokenizer.padding))
    found = sample_splits(parts, task, settings=settings, where=where, content=" ".join(content).encode())
    return replace(found, vocabulary=tokenizer.vocabulary)


def _unit(task: Task, settings: DataSettings) -> str:
    return "lines" if task.texts == "lines" else f"windows of {settings.window or WINDOW} tokens"


def _documents(settings: DataSettings, task: Task) -> dict[str, Iterable[str]]:
    """Return the texts of each part that is separate already; all of a file are in `train`."""
    if settings.source == "huggingface":
        return dict(open_texts(settings))
    assert settings.root is not None
    root = settings.root
    files = sorted(path for path in root.rglob("*") if path.suffix in SUFFIXES) if root.is_dir() else [root]
    if not files:
        raise DataError(f"{root}: expected a file of text, or a folder with {' or '.join(SUFFIXES)} files, found none")
    return {"train": [text for file in files for text in read_texts(file, lines=task.texts == "lines")]}


def read_texts(file: Path, *, lines: bool) -> list[str]:
    """Return the texts of a file: its whole content, or each line; of a .jsonl the `text` of each line."""
    most = psutil.virtual_memory().available
    if file.suffix == ".jsonl":
        rows = read_json_lines(file, 'an object with a "text" on each line', DataError, most=most)
        return [_text_of(file, number, found) for number, found in rows]
    content = read_text(file, "a .txt file in UTF-8, or a .jsonl whose lines have a text", DataError, most=most)
    return [line for line in content.splitlines() if line.strip()] if lines else [content]


def _text_of(file: Path, number: int, found: Any) -> str:
    text = found.get("text") if isinstance(found, dict) else None
    if not isinstance(text, str):
        got = f"the keys {cut_short(ascii([*found]))}" if isinstance(found, dict) else type(found).__name__
        raise DataError(f'{shown(file)}:{number}: expected an object with a "text", got {got}')
    return text


@dataclass(frozen=True, eq=False)
class TextSamples:
    """Texts as samples of token ids: a map-style data set, of which parts are taken as `samples[3:8]`.

    Attributes:
        rows: token ids of each sample.
        first: number of the first one among all, from which masks are drawn.
        masking: masks tokens; None: none are masked.
        with_mask: whether samples have an `attention_mask`, as their lengths differ.
        tokens: number of tokens that they were cut from.
    """

    rows: Sequence[Ids]
    first: int = 0
    masking: Masking | None = None
    with_mask: bool = False
    tokens: int = 0

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = torch.from_numpy(self.rows[index].astype(np.int64))
        if self.masking is not None:
            return self.masking(ids, self.first + range(len(self))[index])
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)} if self.with_mask else {"input_ids": ids}

    def part(self, begin: int, end: int) -> TextSamples:
        """Return the samples from number `begin` to before `end`."""
        return replace(self, rows=self.rows[begin:end], first=self.first + begin)

    @property
    def digest(self) -> str:
        """SHA-256 of all ids, hexadecimal."""
        found = hashlib.sha256()
        for row in self.rows:
            found.update(np.int64(len(row)).tobytes() + np.ascontiguousarray(row).tobytes())
        return found.hexdigest()


@dataclass(frozen=True)
class Masking:
    """The masking of Devlin et al. 2019 (BERT): 15 % of the tokens are predicted, one at least.

    Of these 80 % are replaced by the mask, 10 % by a random token, and 10 % stay. It is the same for the same seed and
    sample, in every epoch.

    Attributes:
        mask: id of the mask.
        vocabulary: number of tokens, of which random ones are drawn.
        seed: of the draws.
        begin, end: ids that stand before and after what may be masked.
    """

    mask: int
    vocabulary: int
    seed: int
    begin: int = 0
    end: int = 0

    def __call__(self, ids: Tensor, number: int) -> dict[str, Tensor]:
        """Return the `input_ids` and `labels` (T,) of a sample.

        Args:
            ids: (T,) int64.
        """
        random, last = np.random.default_rng((self.seed, number)), len(ids) - self.end
        inner = last - self.begin
        chosen = random.random(inner) < MASKED
        chosen[random.integers(inner)] |= not chosen.any()
        how, other = random.random(inner), random.integers(self.vocabulary, size=inner)
        labels, given = torch.full_like(ids, IGNORED), ids.clone()
        places = self.begin + torch.from_numpy(np.flatnonzero(chosen))
        labels[places] = ids[places]
        given[self.begin + torch.from_numpy(np.flatnonzero(chosen & (how < REPLACED)))] = self.mask
        drawn = chosen & (how >= REPLACED) & (how < KEPT)
        given[self.begin + torch.from_numpy(np.flatnonzero(drawn))] = torch.from_numpy(other[drawn])
        return {"input_ids": given, "labels": labels}


def _samples(texts: Iterable[str], tokenizer: TextTokenizer, settings: DataSettings, task: Task) -> TextSamples:
    size = settings.window or WINDOW
    if task.texts == "lines":
        rows = tokenizer.lines(texts, size)
        return TextSamples(rows, with_mask=True, tokens=sum(map(len, rows)))
    if task.texts == "windows":
        ids = tokenizer.stream(texts)
        return TextSamples(list(_windows(ids, size)), tokens=len(ids))
    begin, end = tokenizer.around
    masking = Masking(tokenizer.mask(), tokenizer.vocabulary, settings.split_seed, len(begin), len(end))
    inner = size - len(begin) - len(end)
    if inner < 1:
        raise UsageError(f"data.window: expected more than the {size - inner} tokens around each text, got {size}")
    ids = tokenizer.stream(texts)
    rows = [np.concatenate([begin, row, end]).astype(np.int32) for row in _windows(ids, inner)]
    return TextSamples(rows, masking=masking, tokens=len(ids))


def _windows(ids: Ids, size: int) -> Iterator[Ids]:
    """Yield whole windows; what is left at the end is too short."""
    return iter(ids[: len(ids) // size * size].reshape(-1, size))


def _blocks(made: Mapping[str, TextSamples], settings: DataSettings, where: str) -> dict[str, Any]:
    """Return the three parts: as they are, or blocks of the part that is there for training."""
    rest, parts = made["train"], {name: part for name, part in made.items() if name != "train"}
    shares = {"test": settings.test_share, "validation": settings.validation_share}
    needed = sum(FEWEST[name] for name in PARTS if name not in parts)
    if len(rest) < needed:
        raise DataError(
            f"{where}: expected at least {needed}, of which training needs two, got {len(rest)} of {rest.tokens:,} "
            "tokens; give more text" + ("" if where.endswith(": lines") else ", or set a smaller data.window")
        )
    total, end = len(rest), len(rest)
    for name in ("test", "validation"):
        if name not in parts:
            count = max(FEWEST[name], round(total * shares[name]))
            count = min(count, end - sum(FEWEST[other] for other in PARTS if other != name and other not in parts))
            parts[name], end = rest.part(end - count, end), end - count
    return {"train": rest.part(0, end), **parts}
