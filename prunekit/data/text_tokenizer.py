"""The tokenizer of a model, from its folder: a `tokenizer.json`, read by the package tokenizers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from prunekit.errors import DataError, PrunekitError, UsageError, cut_short, first_line, reraise_shortage
from prunekit.reading.text_files import read_json, read_text, shown

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
LINES = 1024
"""Lines that are tokenized at once."""
MOST_IDS = 2**31 - 2
"""The largest id, which is kept in 32 bits."""
Ids = NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class TextTokenizer:
    """A tokenizer with its special tokens.

    Attributes:
        tokenizer: of the package tokenizers.
        folder: where it is from.
    """

    tokenizer: Any
    folder: Path

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

    def stream(self, texts: Iterable[str]) -> Ids:
        """Return all tokens one after the other, (N,) int32; texts are separated by the end token, if there is one."""
        end, found = self._special("eos_token"), list[Ids]()
        for number, text in enumerate(texts):
            if number and end is not None:
                found.append(np.array([end], np.int32))
            for piece in _pieces(text):
                with self._running():
                    ids = self.tokenizer.encode(piece, add_special_tokens=False).ids
                found.append(np.array(ids, np.int32))
        return np.concatenate(found) if found else np.empty(0, np.int32)

    def lines(self, texts: Iterable[str], longest: int) -> list[Ids]:
        """Return the tokens of each text that has any, special ones around it, cut at a number of tokens."""
        rest, found = (text for text in texts if text.strip()), list[Ids]()
        with self._running():
            self.tokenizer.enable_truncation(longest)
        while some := list(islice(rest, LINES)):
            with self._running():
                encoded = self.tokenizer.encode_batch(some)
            found += [np.array(one.ids, np.int32) for one in encoded]
        return [row for row in found if len(row)]

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


def _pieces(text: str) -> Iterator[str]:
    """Yield a text in pieces that end with a line, before one that is not empty, as tokens may reach over spaces."""
    begin = 0
    while len(text) - begin > PIECE:
        end = text.find("\n", begin + PIECE) + 1
        while 0 < end < len(text) and text[end].isspace():
            end += 1
        if not end:
            break
        yield text[begin:end]
        begin = end
    yield text[begin:]


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
        tokenizer = Tokenizer.from_str(text)
        largest = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
    if largest > MOST_IDS:
        raise DataError(f"{shown(path)}: expected ids of tokens up to {MOST_IDS:,}, got {largest:,}")
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return TextTokenizer(tokenizer, folder)
