"""A decoder in a folder is pruned block by block, and what comes out is a model that transformers loads."""

from __future__ import annotations

import json
import shutil
from functools import partial
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import prunekit as pk
from prunekit.errors import DataError, ModelError, PlanError, PrunekitError, ResumeError, UsageError

transformers = pytest.importorskip("transformers")
SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "vocab_size": 40}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
CONFIGS = {
    "llama": lambda: transformers.LlamaConfig(**SIZES, **HEADS, tie_word_embeddings=True),
    "gpt2": lambda: transformers.GPT2Config(
        n_embd=32, n_layer=2, n_head=4, vocab_size=40, bos_token_id=0, eos_token_id=0
    ),
    "gemma3": lambda: transformers.Gemma3TextConfig(
        **{**SIZES, "num_hidden_layers": 6}, **HEADS, head_dim=16, sliding_window=4, max_position_embeddings=64
    ),
}
TOKENS = torch.randint(0, 40, (12, 12), generator=torch.Generator().manual_seed(0))


def written(folder: Path, name: str = "llama", dtype: torch.dtype = torch.float32) -> Any:
    """Write a decoder of random weights, in several files, and return it."""
    torch.manual_seed(0)
    model: Any = transformers.AutoModelForCausalLM.from_config(CONFIGS[name]()).train(False).to(dtype)
    model.save_pretrained(folder, max_shard_size="20KB")
    return model


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "dtype"), [("llama", torch.bfloat16), ("gpt2", torch.float32), ("gemma3", torch.float32)]
)
def test_the_result_loads_in_its_precision_and_is_within_the_budget(
    tmp_path: Path, name: str, dtype: torch.dtype
) -> None:
    dense = written(tmp_path / "dense", name, dtype)
    (tmp_path / "dense" / "tokenizer.json").write_text("{}")
    found = pk.prune_folder(tmp_path / "dense", TOKENS, params=0.8, out=tmp_path / "out")
    small, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert small.dtype == dtype
    assert found.parameters == (dense.num_parameters(), small.num_parameters())
    assert 0.6 < found.parameters[1] / found.parameters[0] <= 0.8
    assert all(row["difference"] < 1e-9 and row["after"] <= row["before"] for row in found.rows())
    assert (tmp_path / "out" / "tokenizer.json").is_file()
    assert not (tmp_path / "out" / "unfinished").exists()
    assert torch.equal(small.get_input_embeddings().weight, dense.get_input_embeddings().weight)
    for entry, (_, value) in found.config.items():
        assert getattr(small.config, entry) == value
    assert "block" in str(found)
    assert str(tmp_path) in repr(found)


@pytest.mark.slow
def test_channels_that_others_repeat_go_and_the_logits_stay(tmp_path: Path) -> None:
    dense = written(tmp_path / "dense")
    with torch.no_grad():
        for layer in dense.model.layers:
            for each in (layer.mlp.gate_proj, layer.mlp.up_proj):
                each.weight[32:] = each.weight[:32]
    dense.save_pretrained(tmp_path / "dense", max_shard_size="20KB")
    tokens = torch.randint(0, 40, (64, 12), generator=torch.Generator().manual_seed(1))
    found = pk.prune_folder(tmp_path / "dense", tokens, params=0.8, out=tmp_path / "out")
    assert dict(found.config)["intermediate_size"][1] < 48
    small = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    with torch.no_grad():
        wanted, got = dense(TOKENS).logits, small(TOKENS).logits
    assert (got - wanted).norm() < 0.02 * wanted.norm()


@pytest.mark.slow
@pytest.mark.parametrize("place", ["patch_statistics", "verify"])
def test_an_interrupted_call_goes_on_and_gives_the_same_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    written(tmp_path / "dense")
    prune = partial(pk.prune_folder, tmp_path / "dense", TOKENS, params=0.8)
    prune(out=tmp_path / "whole")
    calls = list[int]()
    module = import_module("prunekit.pruning.blocks.prune_folder")
    function = getattr(module, place)

    def failing(*given: Any, **by_name: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return function(*given, **by_name)

    monkeypatch.setattr(module, place, failing)
    with pytest.raises(KeyboardInterrupt):
        prune(out=tmp_path / "out")
    with pytest.raises(ResumeError, match="other arguments"):
        prune(out=tmp_path / "out", params=0.7)
    with pytest.raises(ResumeError, match="other arguments"):
        pk.prune_folder(tmp_path / "dense", TOKENS.view(24, 6), params=0.8, out=tmp_path / "out")
    prune(out=tmp_path / "out")
    assert len(calls) == 4  # the block that had been finished was not computed again
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
    with pytest.raises(UsageError, match="empty folder"):
        prune(out=tmp_path / "out")


def _without_a_shard(folder: Path) -> None:
    sorted(folder.glob("model-*"))[1].unlink()


def _with_a_lost_tensor(folder: Path) -> None:
    path = sorted(folder.glob("model-*"))[1]
    tensors = load_file(path)
    tensors.popitem()
    save_file(tensors, path, {"format": "pt"})


def _with_another_shape(folder: Path) -> None:
    path = sorted(folder.glob("model-*"))[1]
    save_file({name: tensor[:1].clone() for name, tensor in load_file(path).items()}, path, {"format": "pt"})


def _with_a_short_index(folder: Path) -> None:
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"].pop("model.norm.weight")
    path.write_text(json.dumps(index))


def _with_a_path_outside(folder: Path) -> None:
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["model.norm.weight"] = "../elsewhere.safetensors"
    path.write_text(json.dumps(index))


def _with_one_block(folder: Path) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "num_hidden_layers": 1}))


def _with_a_head_of_its_own(folder: Path) -> None:
    path = sorted(folder.glob("model-*"))[0]
    tensors = load_file(path)
    save_file({**tensors, "lm_head.weight": torch.ones(40, 32)}, path, {"format": "pt"})
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    index["weight_map"]["lm_head.weight"] = path.name
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_with_a_head_of_its_own, "lm_head.weight differ, and the configuration says"),
        (_without_a_shard, "model-00002-of-.*expected tensors"),
        (_with_a_lost_tensor, "model-00002-of-.*are not in it"),
        (_with_another_shape, "model-00002-of-.*expected the shape"),
        (_with_a_short_index, "in no file: model.norm.weight"),
        (_with_a_path_outside, "expected the names of files in this folder"),
        (_with_one_block, "at least two blocks.*prunekit.prune"),
    ],
)
def test_a_damaged_folder_is_an_error_that_names_the_file(tmp_path: Path, damage: Any, message: str) -> None:
    written(tmp_path / "dense")
    damage(tmp_path / "dense")
    with pytest.raises(ModelError, match=message):
        pk.prune_folder(tmp_path / "dense", TOKENS, params=0.8, out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_blocks_that_are_given_something_of_each_token_are_refused(tmp_path: Path) -> None:
    config = transformers.Gemma4TextConfig(
        **SIZES, **HEADS, head_dim=8, global_head_dim=8, hidden_size_per_layer_input=16, vocab_size_per_layer_input=40
    )
    transformers.Gemma4ForCausalLM(config).save_pretrained(tmp_path / "dense")
    with pytest.raises(ModelError, match="given nothing of each token"):
        pk.prune_folder(tmp_path / "dense", TOKENS, params=0.8, out=tmp_path / "out")


@pytest.mark.parametrize(
    ("tokens", "params", "kind", "message"),
    [
        ([[1, 2, 3]] * 8 + [[1, 2]], 0.8, DataError, "with padding"),
        ({"input_ids": TOKENS, "attention_mask": TOKENS > 3}, 0.8, DataError, "with padding"),
        (TOKENS + 30, 0.8, DataError, "below 40"),
        (TOKENS[:4], 0.8, DataError, "at least 8 windows"),
        (TOKENS.float(), 0.8, DataError, "float32"),
        (TOKENS, 1.5, UsageError, "params: expected the share"),
    ],
)
def test_tokens_and_budgets_that_cannot_be_are_errors(
    tmp_path: Path, tokens: Any, params: float, kind: type[PrunekitError], message: str
) -> None:
    written(tmp_path / "dense")
    with pytest.raises(kind, match=message):
        pk.prune_folder(tmp_path / "dense", tokens, params=params, out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_budget_that_embeddings_alone_exceed_names_the_least(tmp_path: Path) -> None:
    written(tmp_path / "dense")
    with pytest.raises(PlanError, match=r"params: expected at least 0\.\d+"):
        pk.prune_folder(tmp_path / "dense", TOKENS, params=0.01, out=tmp_path / "out")
    pk.prune_folder(tmp_path / "dense", TOKENS, params=0.9, out=tmp_path / "out")  # nothing was finished


def test_too_little_disk_is_said_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written(tmp_path / "dense")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1))
    with pytest.raises(UsageError, match="of free disk"):
        pk.prune_folder(tmp_path / "dense", TOKENS, params=0.8, out=tmp_path / "out")
    assert not (tmp_path / "out").exists()
