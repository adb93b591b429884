"""Texts as data: files and columns of text, tokenized, cut into windows or taken line by line, and split by blocks."""

from __future__ import annotations

import hashlib
import sys
import tempfile
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from prunekit.data.library_datasets import open_texts
from prunekit.data.splits import Splits, require_shares
from prunekit.data.user_data import sample_splits
from prunekit.errors import DataError, PrunekitError, UsageError, cut_short, first_line, reraise_shortage
from prunekit.reading.text_files import read_json, read_json_lines, read_text, shown, text_blocks
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
Ids = NDArray[Any]  # int32, or uint16 for a vocabulary that fits


def text_splits(settings: DataSettings, task: Task) -> Splits:
    """Return texts as the samples of a task, split into blocks: what comes first is trained on, the end is tested.

    Neighboring texts are alike, so that a random split would tell too good a score. A data set of Hugging Face's
    library keeps its own parts.
    """
    require_shares(settings)
    where, tokenizer = str(settings.root or settings.name), open_tokenizer(settings.tokenizer)
    made, parts = _parts(settings, task, tokenizer, where)
    content = [f"{task.texts} {settings.window} {tokenizer.vocabulary}", *(one.digest for one in made.values())]
    spelled = partial(tokenizer.spelled, parts["test"]) if task.texts == "windows" else None
    if settings.stride is not None:
        parts["test"], content = _strided(parts["test"], settings, task), [f"stride {settings.stride}", *content]
    task = replace(task, collate=PaddedTexts(tokenizer.padding))
    found = sample_splits(parts, task, settings=settings, where=where, content=" ".join(content).encode())
    return replace(found, vocabulary=tokenizer.vocabulary, spelled=spelled)


def training_text(settings: DataSettings, task: Task) -> Iterator[str]:
    """Yield the text of the samples for training, which are those for calibration too, a part at a time."""
    tokenizer = open_tokenizer(settings.tokenizer)
    _, parts = _parts(settings, task, tokenizer, str(settings.root or settings.name))
    yield from (text for _, text in tokenizer.written(parts["train"]))


def _parts(
    settings: DataSettings, task: Task, tokenizer: TextTokenizer, where: str
) -> tuple[dict[str, TextSamples], dict[str, TextSamples]]:
    """Return the samples as they are stored, and those of each of the three parts."""
    made = {name: _samples(texts, tokenizer, settings, task) for name, texts in _documents(settings, task).items()}
    unit = "lines" if task.texts == "lines" else f"windows of {settings.window or WINDOW} tokens"
    return made, _blocks(made, settings, f"{where}: {unit}")


def _strided(test: TextSamples, settings: DataSettings, task: Task) -> TextSamples:
    """Return whole windows of the same text that begin every `stride` tokens, see `TextSamples.context`."""
    size, stride = settings.window or WINDOW, settings.stride or 0
    if task.texts != "windows" or stride > size:
        expected = f"at most {size}, the window" if task.texts == "windows" else "nothing, as it is for causal_lm"
        raise UsageError(f"data.stride: expected {expected}, got {stride} with task {task.name!r}")
    ids = np.asarray(test.rows).reshape(-1)
    rows = np.lib.stride_tricks.sliding_window_view(ids, size)[::stride]
    return replace(test, rows=rows, context=size - stride, first=0)


def _documents(settings: DataSettings, task: Task) -> dict[str, Iterator[Iterable[str]]]:
    """Return the texts of each part that is separate already, each in blocks; all of a file are in `train`."""
    if settings.source == "huggingface":
        return {name: ([text] for text in texts) for name, texts in open_texts(settings).items()}
    assert settings.root is not None
    root = settings.root
    files = sorted(path for path in root.rglob("*") if path.suffix in SUFFIXES) if root.is_dir() else [root]
    if not files:
        raise DataError(f"{root}: expected a file of text, or a folder with {' or '.join(SUFFIXES)} files, found none")
    return {"train": (text for file in files for text in read_texts(file, lines=task.texts == "lines"))}


def read_texts(file: Path, *, lines: bool) -> Iterator[Iterable[str]]:
    """Yield the texts of a file in blocks: its whole content, or each line; of a .jsonl the `text` of each line."""
    if file.suffix == ".jsonl":
        for number, found in read_json_lines(file, 'an object with a "text" on each line', DataError):
            text = found.get("text") if isinstance(found, dict) else None
            if not isinstance(text, str):
                got = f"the keys {cut_short(ascii([*found]))}" if isinstance(found, dict) else type(found).__name__
                raise DataError(f'{shown(file)}:{number}: expected an object with a "text", got {got}')
            if text.strip():
                yield [text]
        return
    blocks = text_blocks(file, "a .txt file in UTF-8, or a .jsonl whose lines have a text", DataError)
    if lines:
        yield from ([line] for piece in _pieces(blocks) for line in piece.splitlines())
    else:
        yield blocks


@dataclass(frozen=True, eq=False)
class RowsOfIds:
    """Token ids of samples of several lengths, one after the other."""

    ids: Ids  # of all samples
    ends: NDArray[np.int64]  # where each begins, and where the last one ends

    def __len__(self) -> int:
        return len(self.ends) - 1

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return replace(self, ends=self.ends[index.start : index.stop + 1])
        return self.ids[self.ends[index] : self.ends[index + 1]]


@dataclass(frozen=True, eq=False)
class TextSamples:
    """Texts as samples of token ids: a map-style data set, of which parts are taken as `samples[3:8]`."""

    rows: Ids | RowsOfIds  # token ids of each sample
    first: int = 0  # number of the first one among all, from which masks are drawn
    masking: Masking | None = None  # masks tokens; None: none are masked
    with_mask: bool = False  # whether samples have an `attention_mask`, as their lengths differ
    tokens: int = 0  # number of tokens that they were cut from
    context: int = 0  # number of tokens at the beginning of all but the very first that the one before has counted
    around: tuple[Sequence[int], Sequence[int]] = ((), ())  # ids that stand before and after those of each sample

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = torch.from_numpy(self._ids(index, np.int64))
        if self.masking is not None:
            return self.masking(ids, self.first + range(len(self))[index])
        if self.context:
            labels = ids.clone()
            labels[: self.context if self.first + range(len(self))[index] else 0] = IGNORED
            return {"input_ids": ids, "labels": labels}
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)} if self.with_mask else {"input_ids": ids}

    def part(self, begin: int, end: int) -> TextSamples:
        """Return the samples from number `begin` to before `end`."""
        return replace(self, rows=self.rows[begin:end], first=self.first + begin)

    def _ids(self, index: int, kind: type[np.integer[Any]]) -> Ids:
        begin, end = self.around
        return np.concatenate([begin, self.rows[index], end], dtype=kind, casting="unsafe")

    @property
    def digest(self) -> str:
        """SHA-256 of all ids, hexadecimal."""
        found = hashlib.sha256()
        for index in range(len(self)):
            row = self._ids(index, np.int32)
            found.update(np.int64(len(row)).tobytes() + row.tobytes())
        return found.hexdigest()


@dataclass(frozen=True)
class Masking:
    """The masking of Devlin et al. 2019 (BERT): 15 % of the tokens are predicted, one at least.

    Of these 80 % are replaced by the mask, 10 % by a random token, and 10 % stay. It is the same for the same seed and
    sample, in every epoch.
    """

    mask: int  # id of the mask
    vocabulary: int  # number of tokens, of which random ones are drawn
    seed: int  # of the draws
    # begin, end: ids that stand before and after what may be masked
    begin: int = 0
    end: int = 0

    def __call__(self, ids: Tensor, number: int) -> dict[str, Tensor]:
        """Return the `input_ids` and `labels` (T,) of a sample with ids (T,) int64."""
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


def _samples(
    texts: Iterable[Iterable[str]], tokenizer: TextTokenizer, settings: DataSettings, task: Task
) -> TextSamples:
    size = settings.window or WINDOW
    if task.texts == "lines":
        rows = tokenizer.lines(map("".join, texts), size)
        return TextSamples(rows, with_mask=True, tokens=len(rows.ids))
    masking, around = None, TextSamples.around
    if task.texts == "masked":
        around = begin, end = tokenizer.around
        masking = Masking(tokenizer.mask(), tokenizer.vocabulary, settings.split_seed, len(begin), len(end))
    inner = size - sum(map(len, around))
    if inner < 1:
        raise UsageError(f"data.window: expected more than the {size - inner} tokens around each text, got {size}")
    ids = tokenizer.stream(texts)
    windows = ids[: len(ids) // inner * inner].reshape(-1, inner)  # what is left at the end is too short
    return TextSamples(windows, masking=masking, tokens=len(ids), around=around)


def _blocks(made: Mapping[str, TextSamples], settings: DataSettings, where: str) -> dict[str, TextSamples]:
    """Return the three parts: as they are, or blocks of the part that is there for training."""
    rest, parts = made["train"], {name: part for name, part in made.items() if name != "train"}
    shares = {"test": settings.test_share, "validation": settings.validation_share}
    needed = sum(FEWEST[name] for name in PARTS if name not in parts)
    if len(rest) < needed:
        size = rest.tokens // needed
        cure = f", or set data.window={size}" if size > 1 and not where.endswith(": lines") else ""
        raise DataError(
            f"{where}: expected at least {needed}, of which training needs two, got {len(rest)} of {rest.tokens:,} "
            f"tokens; give {'more ' if rest.tokens else ''}text{cure}"
        )
    total, end = len(rest), len(rest)
    for name in ("test", "validation"):
        if name not in parts:
            count = max(FEWEST[name], round(total * shares[name]))
            count = min(count, end - sum(FEWEST[other] for other in PARTS if other != name and other not in parts))
            parts[name], end = rest.part(end - count, end), end - count
    return {"train": rest.part(0, end), **parts}


FILE = "tokenizer.json"
CONFIGS = ("tokenizer_config.json", "special_tokens_map.json")
USUAL = {
    "mask_token": ("[MASK]", "<mask>"),
    "pad_token": ("[PAD]", "<pad>", "<|endoftext|>"),
    "eos_token": ("</s>", "<|endoftext|>", "[SEP]"),
}
"""Tokens that are looked for where a folder names none."""
PIECE = 1 << 20
"""Characters of a long text that are tokenized at once."""
LONGEST = 2 * PIECE
"""Characters of a piece, at most."""
LINES = 1024
"""Lines that are tokenized at once."""
MOST_IDS = 2**31 - 2
"""The largest id, which is kept in 32 bits."""


@dataclass(frozen=True, eq=False)
class TextTokenizer:
    """A tokenizer with its special tokens."""

    tokenizer: Any  # of the package tokenizers
    folder: Path  # where it is from

    @cached_property
    def vocabulary(self) -> int:
        """Number of ids: one more than the largest."""
        return 1 + max(self.tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)

    @cached_property
    def _named(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name in reversed(CONFIGS):
            if (path := self.folder / name).is_file():
                values = read_json(path, "the special tokens of a tokenizer", DataError, finite=False)
                if not isinstance(values, dict):
                    raise DataError(f"{shown(path)}: expected a mapping of tokens, got {type(values).__name__}")
                found |= {key: value for key, value in values.items() if value is not None}
        return found

    def _special(self, kind: str) -> int | None:
        named = self._named.get(kind)
        content = named.get("content") if isinstance(named, dict) else named
        if named is not None and not isinstance(content, str):
            raise DataError(
                f"{shown(self.folder)}: {kind}: expected the text of a token, or its `content`, got "
                f"{cut_short(ascii(named))}"
            )
        names = USUAL[kind] if content is None else (content,)
        return next((found for name in names if (found := self.tokenizer.token_to_id(name)) is not None), None)

    @property
    def padding(self) -> int:
        """Id at the end of shorter texts; as a mask marks it, any will do."""
        return next((one for kind in ("pad_token", "eos_token") if (one := self._special(kind)) is not None), 0)

    def mask(self) -> int:
        """Return the id of the mask."""
        if (found := self._special("mask_token")) is None:
            raise UsageError(
                f"{self.folder}: expected a tokenizer with a mask_token, as task 'masked_lm' needs, found none; a "
                "model that predicts the next token is for task causal_lm"
            )
        return found

    @cached_property
    def around(self) -> tuple[list[int], list[int]]:
        """Ids that are put before and after a text."""
        with self._running():
            inner = len(self.tokenizer.encode("a", add_special_tokens=False).ids)
            found = self.tokenizer.encode("a", add_special_tokens=True)
        special = found.special_tokens_mask
        begin = next((at for at, one in enumerate(special) if not one), 0)
        return found.ids[:begin], found.ids[begin + inner :]

    def stream(self, texts: Iterable[Iterable[str]], enough: int | None = None) -> Ids:
        """Return all tokens one after the other, (N,), those of texts in blocks separated by the end token, if any.

        Texts are read no further than to where `enough` tokens are there.
        """
        return self._kept(self._streamed(texts, sys.maxsize if enough is None else enough))

    def _streamed(self, texts: Iterable[Iterable[str]], enough: int) -> Iterator[list[int]]:
        end = self._special("eos_token")
        for number, text in enumerate(texts):
            if number and end is not None:
                yield [end]
            for piece in _pieces(text):
                with self._running():  # without places in the text, which take half of the memory
                    (found,) = self.tokenizer.encode_batch_fast([piece], add_special_tokens=False)
                yield found.ids
                enough -= len(found.ids)
                if enough <= 0:
                    return

    def lines(self, texts: Iterable[str], longest: int) -> RowsOfIds:
        """Return the tokens of each text that has any, special ones around it, cut at a number of tokens."""
        rest, sizes = (text for text in texts if text.strip()), array("q", [0])

        def rows() -> Iterator[list[int]]:
            while some := list(islice(rest, LINES)):
                with self._running():
                    encoded = self.tokenizer.encode_batch(some)
                found = [one.ids for one in encoded if one.ids]
                sizes.extend(map(len, found))
                yield [*chain.from_iterable(found)]

        with self._running():
            self.tokenizer.enable_truncation(longest)
        ids = self._kept(rows())
        return RowsOfIds(ids, np.cumsum(sizes, dtype=np.int64))

    def _kept(self, parts: Iterable[list[int]]) -> Ids:
        """Return ids in a mapped file without a name, which is gone as soon as nothing reads it."""
        kind = np.dtype(np.uint16 if self.vocabulary <= 2**16 else np.int32)
        with ExitStack() as stack:
            with _room():
                file = stack.enter_context(tempfile.TemporaryFile())
            for part in parts:
                with self._running():
                    found = np.array(part, kind)
                with _room():
                    file.write(found.tobytes())
            with _room():
                file.flush()
            count = file.tell() // kind.itemsize
            return np.memmap(file, kind, "r", shape=(count,)).view(np.ndarray) if count else np.empty(0, kind)

    def spelled(self, samples: TextSamples) -> tuple[int, int]:
        """Return the number of tokens of samples, and of bytes in UTF-8 of the text that they spell."""
        found = [(tokens, len(text.encode("utf-8", "replace"))) for tokens, text in self.written(samples)]
        return sum(tokens for tokens, _ in found), sum(size for _, size in found)

    def written(self, samples: TextSamples) -> Iterator[tuple[int, str]]:
        """Yield the number of tokens and the text of some samples at a time."""
        for begin in range(0, len(samples), LINES):
            ids = np.concatenate([samples.rows[at] for at in range(begin, min(begin + LINES, len(samples)))])
            with self._running():
                text = self.tokenizer.decode(ids.tolist(), skip_special_tokens=True)
            yield len(ids), text

    def _running(self) -> AbstractContextManager[None]:
        return _errors_of(self.folder / FILE)


@contextmanager
def _errors_of(path: Path) -> Iterator[None]:
    """Turn errors of the package tokenizers, at a damaged tokenizer, into a `DataError`."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit, GeneratorExit, PrunekitError):
        raise
    except BaseException as error:  # it raises plain exceptions, and where it panics what is no `Exception`
        reraise_shortage(error)
        reason = cut_short(first_line(error))
        raise DataError(
            f"{shown(path)}: expected a tokenizer as the package tokenizers writes it, but: {reason}"
        ) from error


@contextmanager
def _room() -> Iterator[None]:
    """Turn errors of the file of tokens into a `DataError`."""
    try:
        yield
    except OSError as error:
        raise DataError(
            f"tokens of texts lie in a file in {tempfile.gettempdir()}, two or four bytes each, but: {error.strerror}; "
            "set TMPDIR to a folder with more room"
        ) from error


def _pieces(blocks: Iterable[str]) -> Iterator[str]:
    """Yield a text in pieces that end with a line, before one that is not empty, as tokens may reach over spaces.

    Lines of more than `LONGEST` characters are cut at a space, if they have any.
    """
    text, begin = "", 0
    for block in blocks:
        text, begin = text[begin:] + block, 0
        while end := _end(text, begin):
            yield text[begin:end]
            begin = end
    yield text[begin:]


def _end(text: str, begin: int) -> int:
    """Return where a piece ends that begins somewhere in a text; 0 if more of the text has to be known."""
    end = text.find("\n", begin + PIECE) + 1
    while 0 < end < len(text) and text[end].isspace():
        end += 1
    if 0 < end < len(text) and end - begin <= LONGEST:
        return end
    if len(text) - begin <= LONGEST:
        return 0
    space = text.rfind(" ", begin + 1, begin + LONGEST)
    return begin + LONGEST if space < 0 else space


def open_tokenizer(folder: Path | None) -> TextTokenizer:
    """Read the tokenizer of a folder."""
    if folder is None:
        raise UsageError(
            f"data.tokenizer: texts need a tokenizer, got none: give the folder that has its {FILE}; a model that is "
            "named by its folder, with zoo hf, brings its own"
        )
    path = folder / FILE
    if not path.is_file():
        raise DataError(
            f"data.tokenizer: {path.absolute()} does not exist: expected a folder with a {FILE}, as `save_pretrained` "
            "of a fast tokenizer of transformers writes it"
        )
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise DataError(f"texts need the package tokenizers ({error}); pip install prunekit[hf]") from error
    text = read_text(path, "a tokenizer as the package tokenizers writes it", DataError)
    with _errors_of(path):
        found = TextTokenizer(Tokenizer.from_str(text), folder)
        largest = found.vocabulary - 1
    if largest > MOST_IDS:
        raise DataError(f"{shown(path)}: expected ids of tokens up to {MOST_IDS:,}, got {largest:,}")
    found.tokenizer.no_truncation()
    found.tokenizer.no_padding()
    return found
