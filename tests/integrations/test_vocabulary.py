"""Language models with fewer tokens: models, tokenizers, folders and budgets, equal to what the dense ones say."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import prunekit as pk
from prunekit.errors import ArtifactError, DataError, ModelError, PlanError, UsageError
from prunekit.models.vocabulary import noted_vocabulary

transformers = pytest.importorskip("transformers")
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers  # noqa: E402

from prunekit.integrations.transformers import from_pretrained, save_pretrained  # noqa: E402

ALL = [
    f"the {one} {verb} over a {other} near {place}, and {one}s never mind the weather; they {verb} again and again"
    for one, other in (("cat", "mat"), ("frog", "log"), ("goat", "boat"), ("bee", "tree"))
    for verb in ("jumps", "leaps", "sails", "hums")
    for place in ("rivers", "mountains", "harbours", "villages")
]
USED = [text for text in ALL if "goat" in text and "rivers" in text]
OTHER = ("a frog hums near villages", "zebra 12 über Straße!", "漢字 and \U0001f600", "  two  spaces\n\nlines")
SPECIAL = ["[UNK]", "[PAD]", "[CLS]", "[SEP]", "[MASK]"]


def template(tokenizer: Tokenizer) -> Any:
    ids = [(name, tokenizer.token_to_id(name)) for name in ("[CLS]", "[SEP]")]
    return processors.TemplateProcessing(single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B [SEP]", special_tokens=ids)


def byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=420, special_tokens=SPECIAL, initial_alphabet=alphabet)
    tokenizer.train_from_iterator(ALL, trainer)
    tokenizer.add_tokens(["never mind"])
    tokenizer.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), template(tokenizer)])
    return tokenizer


def with_byte_tokens() -> Tokenizer:
    """BPE as SentencePiece's: characters without a token are bytes, and each token is made by several merges."""
    words = sorted({"▁" + word for text in ALL for word in text.split()})
    parts = sorted({word[:end] for word in words for end in range(1, len(word) + 1)}, key=lambda one: (len(one), one))
    parts = sorted({*parts, *(character for word in words for character in word)}, key=lambda one: (len(one), one))
    names = ["<unk>", *(f"<0x{number:02X}>" for number in range(256)), *parts]
    known = {name: number for number, name in enumerate(names)}
    merges = [(one[:at], one[at:]) for one in parts for at in range(1, len(one)) if {one[:at], one[at:]} <= {*parts}]
    tokenizer = Tokenizer(models.BPE(known, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(SPECIAL[1:])
    tokenizer.enable_padding(pad_id=tokenizer.token_to_id("[PAD]"), pad_token="[PAD]")
    return tokenizer


def word_pieces() -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.train_from_iterator(ALL, trainers.WordPieceTrainer(vocab_size=200, special_tokens=SPECIAL))
    ends = [(name, tokenizer.token_to_id(name)) for name in ("[SEP]", "[CLS]")]
    tokenizer.post_processor = processors.BertProcessing(*ends)
    return tokenizer


def unigram() -> Tokenizer:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=150, special_tokens=SPECIAL, unk_token="[UNK]")
    tokenizer.train_from_iterator(ALL, trainer)
    tokenizer.post_processor = template(tokenizer)
    return tokenizer


TOKENIZERS = [byte_level, with_byte_tokens, word_pieces, unigram]


def llama(size: int, **changes: Any) -> nn.Module:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.LlamaConfig(vocab_size=size, num_hidden_layers=2, **sizes, **changes)
    return transformers.LlamaForCausalLM(config).eval()


def used_ids(tokenizer: Tokenizer, length: int = 24) -> torch.Tensor:
    ids = [one for text in USED for one in tokenizer.encode(text).ids]
    ids *= -(-8 * length // len(ids))
    return torch.tensor(ids[: len(ids) // length * length]).view(-1, length)


@pytest.mark.parametrize("make", TOKENIZERS)
def test_the_smaller_tokenizer_says_the_same_of_kept_tokens_and_writes_any_text(make: Callable[[], Tokenizer]) -> None:
    old = make()
    size = old.get_vocab_size()
    ids = [old.encode(text).ids for text in USED]
    vocabulary = pk.Vocabulary.used(llama(size), old, [torch.tensor(one) for one in ids])
    new = vocabulary.tokenizer(old)
    assert new.get_vocab_size() == len(vocabulary.kept) < 0.95 * size
    kept = {*vocabulary.kept.tolist()}
    same = [text for text in (*ALL, *OTHER) if {*old.encode(text).ids} <= kept]
    assert {*USED} <= {*same}
    for text in same:
        assert new.encode(text).ids == vocabulary.ids(torch.tensor(old.encode(text).ids)).tolist()
        assert new.encode(text).tokens == old.encode(text).tokens
    others = [text for text in (*ALL, *OTHER) if text not in same]
    assert others
    for text in others:
        assert len(new.encode(text).ids) >= len(old.encode(text).ids)
        assert new.encode(text).tokens.count("[UNK]") == old.encode(text).tokens.count("[UNK]")
        assert new.decode(new.encode(text).ids) == old.decode(old.encode(text).ids)
    pair = old.encode(USED[0], USED[1])
    assert new.encode(USED[0], USED[1]).ids == vocabulary.ids(torch.tensor(pair.ids)).tolist()


def t5(size: int) -> nn.Module:
    config = transformers.T5Config(
        vocab_size=size,
        d_model=16,
        d_kv=8,
        d_ff=32,
        num_layers=1,
        num_heads=2,
        decoder_start_token_id=1,
        pad_token_id=1,
    )
    return transformers.T5ForConditionalGeneration(config).eval()


SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}


class Wrapped(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.encoder = transformers.BertModel(
            transformers.BertConfig(vocab_size=size, **SIZES), add_pooling_layer=False
        )

    def forward(self, words: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        hidden = self.encoder(input_ids=words, attention_mask=attention_mask).last_hidden_state
        return (hidden * attention_mask[..., None]).mean(1)


MODELS: dict[str, Callable[[int], nn.Module]] = {
    "tied": lambda size: llama(size, tie_word_embeddings=True, eos_token_id=[7, 3], pad_token_id=5),
    "untied": llama,
    "gpt2": lambda size: transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=size, n_embd=16, n_layer=1, n_head=2, bos_token_id=2, eos_token_id=3)
    ),
    "bert": lambda size: transformers.BertForMaskedLM(transformers.BertConfig(vocab_size=size, **SIZES)),
    "roberta": lambda size: transformers.RobertaForMaskedLM(transformers.RobertaConfig(vocab_size=size, **SIZES)),
    "t5": t5,
    "wrapped": Wrapped,
}


@pytest.mark.parametrize("name", MODELS)
def test_a_model_without_the_other_tokens_computes_what_it_did(name: str) -> None:
    tokenizer = word_pieces()
    model = MODELS[name](tokenizer.get_vocab_size()).eval()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    ids = used_ids(tokenizer)
    vocabulary = pk.Vocabulary.used(model, tokenizer, ids)
    small = vocabulary.cut(model)
    given = {"decoder_input_ids": ids[:, :5]} if name == "t5" else {}
    given = {"words" if name == "wrapped" else "input_ids": ids, **given}
    mask = {"attention_mask": torch.ones_like(ids)}
    with torch.no_grad():
        old = model(**given, **mask)
        new = small(**{key: vocabulary.ids(value) for key, value in given.items()}, **mask)
    if name == "wrapped":
        torch.testing.assert_close(new, old, rtol=0, atol=1e-6)
    else:
        torch.testing.assert_close(new.logits, old.logits[..., vocabulary.kept], rtol=0, atol=1e-6)
    inner = small.encoder if name == "wrapped" else small
    assert inner.config.vocab_size == len(vocabulary.kept) == inner.get_input_embeddings().num_embeddings
    rows = sum(value.numel() for value in before.values()) - sum(value.numel() for value in small.state_dict().values())
    assert rows >= (len(before) > 0) * (vocabulary.size - len(vocabulary.kept)) * 16
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())  # it is not changed
    for key, value in (inner if name != "wrapped" else model.encoder).config.to_dict().items():
        if key in ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id") and value is not None:
            dense = getattr((model.encoder if name == "wrapped" else model).config, key)
            mapped = vocabulary.ids(torch.tensor(dense)).tolist()
            assert getattr(inner.config, key) == mapped, key


@pytest.fixture(scope="module")
def pruned() -> tuple[Any, Any, Any, torch.Tensor]:
    backend = byte_level()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="[PAD]", eos_token="[SEP]", unk_token="[UNK]"
    )
    model = llama(backend.get_vocab_size(), tie_word_embeddings=True, eos_token_id=backend.token_to_id("[SEP]"))
    ids = used_ids(backend)
    data = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    result = pk.prune(
        model, calibration=data, params=0.6, vocabulary="used", tokenizer=tokenizer, layout="huggingface",
        outputs="logits", repair=False,
    )  # fmt: skip
    return model, tokenizer, result, ids


def test_budgets_count_from_the_model_with_all_tokens(pruned: tuple[Any, Any, Any, torch.Tensor]) -> None:
    model, _, result, _ = pruned
    whole, left = (sum(one.numel() for one in each.parameters()) for each in (model, result.model))
    assert 0.5 * whole < left <= 0.6 * whole
    found = result.plan.provenance["budgets"]["params"]
    assert found["asked"] == 0.6
    assert found["left"] == pytest.approx(left / whole)
    assert result.plan.provenance["prune"]["budget"]["params"] == 0.6
    rows = {row["figure"]: row for row in result.rows()}
    assert (rows["parameters"]["dense"], rows["parameters"]["pruned"]) == (whole, left)
    assert len(result.vocabulary.kept) == result.model.config.vocab_size < result.vocabulary.size
    assert f"{len(result.vocabulary.kept)} of {result.vocabulary.size} tokens stay" in str(result)


def test_folders_are_read_with_and_without_prunekit(pruned: tuple[Any, Any, Any, torch.Tensor], tmp_path: Path) -> None:
    model, tokenizer, result, ids = pruned
    folder = save_pretrained(result, tmp_path / "small", processor=tokenizer)
    new = result.vocabulary.ids(ids)
    expected = result.model(new).logits
    again = transformers.AutoTokenizer.from_pretrained(folder)
    assert again(USED).input_ids == result.vocabulary.tokenizer(tokenizer)(USED).input_ids
    assert again.pad_token_id == result.vocabulary.ids(torch.tensor(tokenizer.pad_token_id))
    assert again.decode(again(OTHER[2]).input_ids, skip_special_tokens=True) == OTHER[2]
    plain = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    assert plain.generation_config.eos_token_id == again.eos_token_id
    for loaded in (
        from_pretrained(folder), plain, pk.load(folder, model=model), pk.load(folder, model=lambda: model),
        pk.load(folder, model=result.vocabulary.cut(model)),
    ):  # fmt: skip
        assert torch.equal(loaded(new).logits, expected)
    twice = save_pretrained(result, tmp_path / "again", processor=again)  # a tokenizer of the kept tokens stays
    assert (twice / "tokenizer.json").read_text() == (folder / "tokenizer.json").read_text()


def test_it_generates_the_tokens_that_the_dense_head_says_among_the_kept_ones() -> None:
    tokenizer = byte_level()
    model = llama(tokenizer.get_vocab_size(), eos_token_id=None)
    ids = used_ids(tokenizer)
    vocabulary = pk.Vocabulary.used(model, tokenizer, ids)
    small = vocabulary.cut(model)
    gone = sorted({*range(vocabulary.size)} - {*vocabulary.kept.tolist()})
    how = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    dense = model.generate(ids[:2, :6], suppress_tokens=gone, **how)
    assert torch.equal(small.generate(vocabulary.ids(ids[:2, :6]), **how), vocabulary.ids(dense))


def test_it_is_repaired_and_verified_as_any_model(tmp_path: Path) -> None:
    tokenizer = word_pieces()
    model = llama(tokenizer.get_vocab_size())
    ids = used_ids(tokenizer, 12)
    result = pk.prune(model, ids, calibration=ids, macs=0.7, params=0.9, vocabulary="used", tokenizer=tokenizer)
    assert result.masked is not None
    new = result.vocabulary.ids(ids)
    torch.testing.assert_close(result.model(new).logits, result.masked(new).logits, rtol=1e-4, atol=1e-4)
    given = pk.prune(model, ids, params=0.8, vocabulary=result.vocabulary)  # known, and by example
    assert given.vocabulary.kept.tolist() == result.vocabulary.kept.tolist()
    folder = pk.save(given, tmp_path / "free")
    assert torch.equal(pk.load(folder, model=model)(new).logits, given.model(new).logits)


@pytest.mark.parametrize(
    "note", [{"kept": [1, 0], "size": 3}, {"kept": [0, 3], "size": 3}, {"kept": [], "size": 3}, {"kept": "ab"},
             {"kept": [2**70], "size": 2**80}, {"kept": [0.0], "size": 3}, {"kept": [0], "size": "3"},
             {"kept": [0], "size": 2**62}, {"kept": [0], "size": 9.5}, [3]],
)  # fmt: skip
def test_a_damaged_note_is_refused(note: Any) -> None:
    with pytest.raises(ArtifactError, match="expected a size below"):
        noted_vocabulary(note)


def test_what_cannot_be_is_said_before_anything_runs() -> None:
    tokenizer = word_pieces()
    model, ids = llama(tokenizer.get_vocab_size()), used_ids(tokenizer)

    def prune(**given: Any) -> None:
        pk.prune(model, **{"calibration": ids, "vocabulary": "used", "tokenizer": tokenizer, "params": 0.5, **given})

    with pytest.raises(UsageError, match=r"'used' needs calibration=.*; got no calibration data"):
        prune(calibration=None, example=ids)
    with pytest.raises(UsageError, match=r"'used' needs calibration=.*; got no tokenizer"):
        prune(tokenizer=None)
    with pytest.raises(UsageError, match=r"expected 'used', or a prunekit.Vocabulary; got 'most'"):
        prune(vocabulary="most")
    with pytest.raises(UsageError, match=r"expected 'used', or a prunekit.Vocabulary; got None"):
        prune(vocabulary=None)
    with pytest.raises(UsageError, match="expected no speedup beside it"):
        prune(params=None, speedup=1.2)
    with pytest.raises(UsageError, match=r"tokenizer: expected one of transformers or .*; got a str"):
        prune(tokenizer="bert")
    with pytest.raises(PlanError, match=r"without the other tokens .* of params are left, within the budget"):
        prune(params=0.99)
    with pytest.raises(UsageError, match=r"has a token of id .*, and LlamaForCausalLM embeds 9"):
        pk.Vocabulary.used(llama(9), tokenizer, torch.tensor([1]))
    with pytest.raises(DataError, match=r"whole numbers below 9, .*, got 12"):
        pk.Vocabulary.used(llama(9), tokenizer, torch.tensor([12]))
    with pytest.raises(DataError, match="got none"):
        pk.Vocabulary.used(model, tokenizer, [])
    with pytest.raises(ModelError, match="that embeds tokens; got Linear"):
        pk.Vocabulary.used(nn.Linear(2, 2), tokenizer, ids)
    vocabulary = pk.Vocabulary.used(model, tokenizer, ids)
    with pytest.raises(DataError, match="are not kept; encode the text with the smaller tokenizer"):
        vocabulary.ids(torch.arange(vocabulary.size))
    with pytest.raises(ModelError, match=f"expected a model that embeds {vocabulary.size} tokens, got one of 9"):
        vocabulary.cut(llama(9))
