"""Tokens of a language model that are kept, and what that changes: ids, embedding and head, configuration, tokenizer.

A tokenizer is read and made anew as the text of its `tokenizer.json`, by its own class.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from prunekit.errors import ArtifactError, DataError, ModelError, UsageError
from prunekit.hooks.model_copy import named_tensors, with_tensors
from prunekit.models.hugging_face import changed_config, library_model, quiet_library, set_config
from prunekit.utils.context import seeded
from prunekit.utils.display import listed
from prunekit.utils.inputs import DECODER, arguments_by_name
from prunekit.utils.tensors import gather

NOTE = "vocabulary"
"""Key in a plan's provenance: the ids that are kept, and the number of ids that there were."""
KINDS = ("BPE", "WordPiece", "Unigram", "WordLevel")
"""Models of tokenizers that can have fewer tokens."""
MOST = 2**24
"""Ids of tokens are below this."""
TOKENS = ("input_ids", DECODER)
"""Arguments of models of transformers that are ids of tokens."""
PADDING = ("padding_idx", "pad_token_id")
"""Attributes of modules that are the id of padding."""
IDS = re.compile(r"_token_ids?$|_token_index$|suppress_tokens$")
"""Ends of the names of entries of configurations that are ids of tokens."""
BYTE = re.compile(r"<0x[0-9A-F]{2}>")
"""Tokens that stand for a byte of a character which has no token."""


@dataclass(frozen=True, eq=False)
class Vocabulary:
    """Tokens of a language model that are kept, numbered anew in the same order; the others are removed.

    `prunekit.prune(..., vocabulary="used", tokenizer=...)` does it in one call; this is for several budgets, loops of
    your own, and text beside the calibration data.

    Attributes:
        kept: (n,) int64, ids of the kept tokens in the dense model, ascending.
        size: number of ids of the dense model: the rows of its embedding.

    Example:
        >>> import prunekit as pk, torch
        >>> from tokenizers import Tokenizer, models
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> tokenizer = Tokenizer(models.WordLevel({"[UNK]": 0, "cat": 1, "dog": 2, "sat": 3}, unk_token="[UNK]"))
        >>> model = GPT2LMHeadModel(GPT2Config(vocab_size=4, n_embd=8, n_layer=1, n_head=2, eos_token_id=0))
        >>> vocabulary = pk.Vocabulary.used(model, tokenizer, torch.tensor([1, 3]))
        >>> vocabulary.kept, vocabulary.ids(torch.tensor([3, 1])), vocabulary.cut(model).lm_head.out_features
        (tensor([0, 1, 3]), tensor([2, 1]), 3)
        >>> vocabulary.tokenizer(tokenizer).encode("sat").ids
        [2]
    """

    kept: Tensor
    size: int

    @classmethod
    def used(cls, model: nn.Module, tokenizer: Any, ids: Any) -> Vocabulary:
        """Return the tokens that occur, and those without which they could not be made, or a text not be written.

        The latter are special and other added tokens, those that the model's configurations name, what tokens are
        merged of, and bytes, or characters where a tokenizer has no bytes to fall back on.

        Args:
            model: a language model of transformers, or one with exactly one inside.
            tokenizer: of transformers or its library tokenizers, with a model of BPE, WordPiece, Unigram or WordLevel.
            ids: tokens that occur, a tensor (...) or several in lists or tuples; negative ones are no tokens.

        Raises:
            UsageError: the tokenizer is of another kind, or has ids that the model lacks.
            DataError: there are no ids, or some are no whole numbers or not in the model; a `UsageError`.
            ModelError: the model has no embedding over tokens whose number its configuration says.
        """
        inner, rows = _embedding(model)
        found = {one for tensor in gather(ids) for one in torch.unique(tensor).tolist() if one >= 0}
        if not found or not all(type(one) is int and one < rows for one in found):
            raise DataError(
                f"vocabulary: expected the ids of a text's tokens, whole numbers below {rows}, the rows of the model's "
                f"embedding, got {max(found, default='none')}; tokenize with the model's own tokenizer"
            )
        named = [value if isinstance(value, list) else [value] for part in _named_ids(inner) for value in part.values()]
        kept = _needed(_read(tokenizer), found | {one for ids in named for one in ids if 0 <= one < rows})
        if max(kept) >= rows:
            raise UsageError(
                f"tokenizer: it has a token of id {max(kept)}, and {type(inner).__name__} embeds {rows}; give the "
                "model's own, or call model.resize_token_embeddings(len(tokenizer)) first"
            )
        return cls(torch.tensor(sorted(kept)), rows)

    @cached_property
    def _new(self) -> Tensor:
        new = torch.full((self.size,), -1)
        new[self.kept] = torch.arange(len(self.kept))
        return new

    def ids(self, ids: Tensor) -> Tensor:
        """Return tokens under their new ids, in the same shape and dtype; negative ones stay as they are.

        Raises:
            DataError: some are not kept; a `UsageError`.
        """
        found = torch.where(ids < 0, ids, self._new.to(ids.device)[ids.clamp(0, self.size - 1).long()].to(ids.dtype))
        gone = (ids >= self.size) | ((ids >= 0) & (found < 0))
        if gone.any():
            raise DataError(
                f"vocabulary: the tokens {listed(sorted(map(str, set(ids[gone].tolist()))), 5)} are not kept; encode "
                "the text with the smaller tokenizer, vocabulary.tokenizer(tokenizer)"
            )
        return found

    def example(self, model: nn.Module, example: tuple[Any, ...]) -> Any:
        """Return what a model is called with under the new ids, by name where arguments have one, without labels."""
        tokens = {name: self.ids(ids) for name, ids in tokens_in(model, example).items()}
        given = {name: one for name, one in arguments_by_name(model, example).items() if name != "labels"} | tokens
        return given if all(isinstance(name, str) for name in given) else tuple(given.values())

    def cut(self, model: nn.Module) -> nn.Module:
        """Return a model without the rows of other tokens in embedding and head, which shares all other tensors.

        Its configurations, that of generation too, say the number of tokens and the new ids.

        Raises:
            ModelError: the model has no embedding over tokens, or one of another number of them.
        """
        if (rows := _embedding(model)[1]) != self.size:
            raise ModelError(f"vocabulary: expected a model that embeds {self.size} tokens, got one of {rows}")
        small = with_tensors(model, {name: tensor.detach() for name, tensor in named_tensors(model)})
        inner, _ = _embedding(small)
        config, generation = ({name: self._entry(one) for name, one in part.items()} for part in _named_ids(inner))
        set_config(inner, changed_config(inner.config, config))
        if generation:
            inner.generation_config = copy.deepcopy(inner.generation_config)
            vars(inner.generation_config).update(generation)
        for module in inner.modules():
            vars(module).update({key: self._entry(vars(module)[key]) for key in PADDING if vars(module).get(key)})
        with quiet_library(), seeded(0), torch.no_grad():
            inner.resize_token_embeddings(len(self.kept), mean_resizing=False)
            made = dict(named_tensors(small))
            for name, old in named_tensors(model):
                axis = next((axis for axis, size in enumerate(old.shape) if size != made[name].shape[axis]), None)
                if axis is not None:
                    made[name].copy_(old.index_select(axis, self.kept.to(old.device)))
        return small

    def tokenizer(self, tokenizer: Any) -> Any:
        """Return a tokenizer of the kept tokens, of the same class, under their new ids.

        A text whose tokens are all kept becomes the same tokens; any other becomes smaller ones.

        Raises:
            UsageError: it is of another kind, or not the one that the vocabulary was made with.
        """
        state = _renumbered(_read(tokenizer), {old: new for new, old in enumerate(self.kept.tolist())})
        backend = getattr(tokenizer, "backend_tokenizer", tokenizer)
        made = type(backend).from_str(json.dumps(state))
        if made.get_vocab(with_added_tokens=True) != _tokens(state)[1]:
            raise UsageError("tokenizer: expected one whose added tokens come after all others, got another order")
        if backend is tokenizer:
            return made
        small = copy.deepcopy(tokenizer)
        small._tokenizer = made
        return small

    def _entry(self, value: Any) -> Any:
        """Return ids in an entry of a configuration as they are now; numbers that are no ids stay."""
        if isinstance(value, list):
            return [self._entry(one) for one in value]
        return int(self._new[value]) if type(value) is int and 0 <= value < self.size else value


def tokens_in(model: nn.Module, example: tuple[Any, ...]) -> dict[str | int, Tensor]:
    """Return the arguments of an example that are ids of tokens: by their names, else the first of integers."""
    given = arguments_by_name(model, example).items()
    whole = {key: one for key, one in given if isinstance(one, Tensor) and one.dtype in (torch.int32, torch.int64)}
    return {key: whole[key] for key in TOKENS if key in whole} or dict([*whole.items()][:1])


def noted_vocabulary(note: Any) -> Vocabulary | None:
    """Return the vocabulary that a plan or folder notes; None where it notes none."""
    if note is None:
        return None
    match note:
        case {"kept": [*kept], "size": int(size)} if 0 < size < MOST and kept and all(type(one) is int for one in kept):
            if kept == sorted({*kept}) and kept[0] >= 0 and kept[-1] < size:
                return Vocabulary(torch.tensor(kept), size)
    raise ArtifactError(
        f"{NOTE}: expected a size below {MOST:,} and ascending ids of tokens below it, got {note!r:.99}"
    )


def without_removed(model: nn.Module, note: Any) -> nn.Module:
    """Return a dense model without the tokens that a folder notes as removed, if there are any and it has them."""
    found = noted_vocabulary(note)
    return model if found is None or _embedding(model)[1] == len(found.kept) else found.cut(model)


def _embedding(model: nn.Module) -> tuple[Any, int]:
    """Return the model of transformers in a model, and the number of rows of its embedding over tokens."""
    inner: Any = (library_model(model) or ("", model))[1]
    layer: Any = None
    with suppress(Exception):  # models without one raise what they like
        layer = inner.get_input_embeddings()
    if not isinstance(layer, nn.Embedding):
        raise ModelError(
            "vocabulary: expected a language model of transformers, or one with exactly one inside, that embeds "
            f"tokens; got {type(model).__name__}"
        )
    return inner, layer.num_embeddings


def _named_ids(model: Any) -> Iterator[dict[str, Any]]:
    """Yield the entries that are ids, or lists of them, of a model's configuration and of that for generation."""
    generation = getattr(model, "generation_config", None)
    for left in (model.config.to_dict(), {} if generation is None else dict(vars(generation))):
        found, parts = dict[str, Any](), [("", left)]
        for at, entries in parts:
            parts += [(f"{at}{k}.", one) for k, one in entries.items() if isinstance(one, dict) and "model_type" in one]
            ids = {f"{at}{key}": one for key, one in entries.items() if IDS.search(key)}
            found |= {key: one for key, one in ids.items() if type(one) is int or (one and isinstance(one, list))}
        yield found


def _read(tokenizer: Any) -> dict[str, Any]:
    """Return what the file of a tokenizer says."""
    backend = getattr(tokenizer, "backend_tokenizer", tokenizer)
    found: dict[str, Any] = json.loads(backend.to_str()) if hasattr(backend, "to_str") else {}
    kind = found["model"]["type"] if found else f"a {type(tokenizer).__name__}"
    if kind not in KINDS:
        expected = f"expected one of transformers or its library tokenizers, with a model of {', '.join(KINDS)}"
        raise UsageError(f"tokenizer: {expected}; got {kind}")
    return found


def _tokens(state: Mapping[str, Any]) -> tuple[dict[str, int], dict[str, int]]:
    """Return the ids of the tokens of a tokenizer's model by their texts, and those with the added ones."""
    vocab = state["model"]["vocab"]
    own = dict(vocab) if isinstance(vocab, dict) else {text: at for at, (text, _) in enumerate(vocab)}
    return own, own | {one["content"]: one["id"] for one in state["added_tokens"]}


def _merges(model: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Yield the parts of each merge of a tokenizer, and what they become."""
    prefix = model.get("continuing_subword_prefix") or ""
    return ((left, right, left + right[len(prefix) :]) for left, right in model.get("merges", ()))


def _places(state: Mapping[str, Any]) -> Iterator[tuple[Any, Any]]:
    """Yield where a tokenizer's file has ids beside those of its model: containers with a key, each an id or a list."""
    yield from ((one, "id") for one in state["added_tokens"])
    yield from ((state[name], "pad_id") for name in ("padding",) if state[name])
    yield from ((state["model"], "unk_id") for _ in range(state["model"].get("unk_id") is not None))
    steps = [state["post_processor"] or {}]
    for step in steps:
        steps += step.get("processors", ())
        yield from ((one, "ids") for one in step.get("special_tokens", {}).values())
        yield from ((step[end], 1) for end in ("sep", "cls") if end in step)


def _needed(state: Mapping[str, Any], ids: set[int]) -> set[int]:
    """Return ids with those of the tokens without which they could not be made, or a text not be written."""
    model, (own, _) = state["model"], _tokens(state)
    found = ids | {one for at, key in _places(state) for one in (at[key] if isinstance(at[key], list) else [at[key]])}
    found |= {own[model["unk_token"]]} if model.get("unk_token") in own else set()
    if model["type"] == "Unigram":  # the score of unknown characters is counted from the lowest one
        found.add(min(range(len(own)), key=lambda at: model["vocab"][at][1]))
    written = [text for text in own if BYTE.fullmatch(text)]
    if not (model.get("byte_fallback") and len(written) == 256) and model["type"] != "WordLevel":
        prefix, suffix = (model.get(key) or "" for key in ("continuing_subword_prefix", "end_of_word_suffix"))
        written = [text for text in own if 1 in (len(text), len(text.removeprefix(prefix).removesuffix(suffix)))]
    found |= {own[text] for text in written}
    parts: dict[str, list[str]] = {}
    for left, right, made in _merges(model):
        parts.setdefault(made, []).extend((left, right))
    left_over = [text for text, one in own.items() if one in found]
    for text in left_over:
        new = [part for part in dict.fromkeys(parts.get(text, ())) if own[part] not in found]
        found |= {own[part] for part in new}
        left_over += new
    return found


def _renumbered(state: dict[str, Any], new: Mapping[int, int]) -> dict[str, Any]:
    """Return the file of a tokenizer with fewer tokens, given their new ids by the old ones."""
    model, (own, _) = state["model"], _tokens(state)
    model["vocab"] = (
        {text: new[one] for text, one in own.items() if one in new}
        if isinstance(model["vocab"], dict)
        else [entry for at, entry in enumerate(model["vocab"]) if at in new]
    )
    if model["type"] == "BPE":
        kept = model["vocab"].keys()
        model["merges"] = [[left, right] for left, right, made in _merges(model) if {left, right, made} <= kept]
    try:
        for at, key in _places(state):
            at[key] = [new[one] for one in at[key]] if isinstance(at[key], list) else new[at[key]]
    except KeyError as error:
        raise UsageError(
            f"tokenizer: it needs the token {error}, which is not kept; give the one that the vocabulary was made with"
        ) from None
    return state
