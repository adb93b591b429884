"""Tiny language models with a tokenizer of words, in folders, and generated text, for tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

SPECIAL = ("[UNK]", "[PAD]", "[CLS]", "[SEP]", "[MASK]")
WORDS = tuple(f"w{number}" for number in range(40))


def write_tokenizer(folder: Path, *, special: bool = False, more: int = 0) -> None:
    """Write a tokenizer of words, with `special` ones around each text, and so many more words than the models know."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    names = [*SPECIAL, *WORDS, *(f"more{number}" for number in range(more))]
    tokenizer = Tokenizer(models.WordLevel({name: at for at, name in enumerate(names)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(list(SPECIAL))
    if special:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
        )
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))


def llama(seed: int = 0, **changes: Any) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    known = {"vocab_size": len(SPECIAL) + len(WORDS), "tie_word_embeddings": True, **sizes, **heads, **changes}
    return LlamaForCausalLM(LlamaConfig(**known)).eval()


def bert(kind: str = "BertForMaskedLM", seed: int = 0, **changes: Any) -> nn.Module:
    import transformers

    torch.manual_seed(seed)
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    known = {"vocab_size": len(SPECIAL) + len(WORDS), "num_attention_heads": 4, "max_position_embeddings": 64}
    config = transformers.BertConfig(**known, **sizes, **changes)
    found: nn.Module = getattr(transformers, kind)(config)
    return found.eval()


def write_model(folder: Path, model: nn.Module, **tokenizer: Any) -> Path:
    model.save_pretrained(str(folder))  # type: ignore[operator]
    write_tokenizer(folder, **tokenizer)
    return folder


def text(words: int = 3000, seed: int = 0, line: int = 12) -> str:
    """Words of which each mostly tells the next."""
    random, found, at = np.random.default_rng(seed), list[str](), 0
    for number in range(words):
        at = (at * 7 + 3) % len(WORDS) if random.random() < 0.8 else int(random.integers(len(WORDS)))
        found.append(WORDS[at] + ("\n" if number % line == line - 1 else " "))
    return "".join(found)
