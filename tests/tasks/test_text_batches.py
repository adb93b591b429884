"""Texts in the forms of transformers and datasets: what is collected is that of the same texts one by one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tiny_language import WORDS, bert, llama, write_tokenizer
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import prunekit as pk
from prunekit.statistics.channel_stats import ChannelStats

SENTENCES = [" ".join(WORDS[(at * 5 + step * 3) % len(WORDS)] for step in range(3 + at % 5)) for at in range(10)]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    from transformers import PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("tokens")
    write_tokenizer(folder)
    named = {"pad_token": "[PAD]", "mask_token": "[MASK]", "unk_token": "[UNK]"}
    return PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), **named)


@pytest.fixture(scope="module")
def rows(tokenizer: Any) -> list[dict[str, list[int]]]:
    found = tokenizer(SENTENCES, return_token_type_ids=False)
    return [{name: found[name][at] for name in ("input_ids", "attention_mask")} for at in range(len(SENTENCES))]


def encoding(tokenizer: Any, rows: list[Any]) -> Any:
    return tokenizer(SENTENCES, padding=True, return_tensors="pt", return_token_type_ids=False)


def dataset(tokenizer: Any, rows: list[Any]) -> Any:
    datasets = pytest.importorskip("datasets", reason="the extra hf-data is not installed")
    columns = {name: [row[name] for row in rows] for name in rows[0]} | {"text": SENTENCES}
    return datasets.Dataset.from_dict(columns).with_format("torch")


def padded(tokenizer: Any, rows: list[Any]) -> Any:
    from transformers import DataCollatorWithPadding

    return DataLoader(rows, batch_size=3, collate_fn=DataCollatorWithPadding(tokenizer))  # type: ignore[arg-type]


def padded_left(tokenizer: Any, rows: list[Any]) -> Any:
    tokenizer.padding_side = "left"
    try:
        return list(padded(tokenizer, rows))
    finally:
        tokenizer.padding_side = "right"


def labeled(tokenizer: Any, rows: list[Any]) -> Any:
    from transformers import DataCollatorForLanguageModeling

    return DataLoader(rows, batch_size=4, collate_fn=DataCollatorForLanguageModeling(tokenizer, mlm=False))  # type: ignore[arg-type]


def one_by_one(rows: list[Any]) -> list[dict[str, torch.Tensor]]:
    return [{name: torch.tensor([ids]) for name, ids in row.items()} for row in rows]


def same(found: ChannelStats, wanted: ChannelStats) -> None:
    assert list(found) == list(wanted)
    for key, layer in wanted.items():
        if key.module.endswith(("rotary_emb", "position_embeddings")):  # which all samples share
            continue
        assert np.array_equal(found[key].count, layer.count), key
        assert np.allclose(found[key].mean, layer.mean, atol=1e-5), key
        assert np.allclose(found[key].squared_deviations, layer.squared_deviations, rtol=1e-3, atol=1e-5), key
        assert np.allclose(found[key].max, layer.max, atol=1e-5), key


FORMS = [encoding, dataset, padded, padded_left, labeled]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("task", [None, "causal_lm"])
def test_a_decoder_sees_each_text_alone(form: Callable[..., Any], task: str | None, tokenizer: Any, rows: Any) -> None:
    model = llama()
    wanted = pk.calibrate(model, one_by_one(rows), task=task)
    same(pk.calibrate(model, form(tokenizer, rows), task=task), wanted)


@pytest.mark.parametrize("form", [encoding, dataset, padded])
def test_an_encoder_sees_each_text_alone(form: Callable[..., Any], tokenizer: Any, rows: Any) -> None:
    model: nn.Module = bert("BertModel")
    wanted = pk.calibrate(model, one_by_one(rows))
    same(pk.calibrate(model, form(tokenizer, rows), task="embedding"), wanted)


def test_masked_tokens_are_seen_as_they_were_masked(tokenizer: Any, rows: Any) -> None:
    from transformers import DataCollatorForLanguageModeling

    torch.manual_seed(0)
    collate = DataCollatorForLanguageModeling(tokenizer, mlm=True, mlm_probability=0.4)
    batches = list(DataLoader(rows, batch_size=4, collate_fn=collate))  # type: ignore[arg-type]
    names = ("input_ids", "attention_mask", "labels")
    alone = [
        {name: batch[name][at : at + 1, : int(batch["attention_mask"][at].sum())] for name in names}
        for batch in batches
        for at in range(len(batch["input_ids"]))
    ]
    model = bert()
    same(pk.calibrate(model, batches, task="masked_lm"), pk.calibrate(model, alone, task="masked_lm"))
    fill = {"input_ids": 1, "attention_mask": 0, "labels": -100}
    wider = [{name: F.pad(batch[name], (0, 3), value=fill[name]) for name in names} for batch in batches]
    found, wanted = (pk.collect_gradients(model, given, task="masked_lm").terms for given in (wider, batches))
    assert found.keys() == wanted.keys()
    assert all(np.allclose(found[axis], wanted[axis], atol=1e-6) for axis in wanted)


@pytest.mark.slow
@pytest.mark.parametrize("form", [dataset, padded_left, labeled])
def test_every_form_prunes_and_repairs(form: Callable[..., Any], tokenizer: Any, rows: Any) -> None:
    model = llama()
    result = pk.prune(model, calibration=form(tokenizer, rows), macs=0.8, task="causal_lm")
    left, whole = (sum(weight.numel() for weight in each.parameters()) for each in (result.model, model))
    assert left < 0.85 * whole
    with torch.no_grad():
        assert result.model(**one_by_one(rows)[0]).logits.shape[-1] == 45


def test_a_task_pads_what_its_samples_need(tokenizer: Any, rows: Any) -> None:
    """Samples of a data set that come as tensors of several lengths, with labels."""
    samples = [{"input_ids": torch.tensor(row["input_ids"]), "labels": torch.tensor(row["input_ids"])} for row in rows]

    class Samples(torch.utils.data.Dataset[Any]):
        def __len__(self) -> int:
            return len(samples)

        def __getitem__(self, index: int) -> Any:
            return samples[index]

    model = llama()
    same(pk.calibrate(model, Samples(), task="causal_lm"), pk.calibrate(model, one_by_one(rows)))
