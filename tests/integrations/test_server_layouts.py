"""Layouts of servers: widths that llama.cpp and vLLM store in blocks, and what no layout can meet."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import prunekit as pk
from prunekit.errors import PlanError, PrunekitError, UsageError
from prunekit.settings.pruning import SERVERS, PruneSettings, prune_contradictions

pytest.importorskip("transformers")
from transformers import AutoModelForCausalLM, Gemma4ForCausalLM, Gemma4TextConfig, LlamaConfig, LlamaForCausalLM

IDS = torch.arange(3, 19).reshape(2, 8)


def llama(**others: Any) -> Any:
    torch.manual_seed(0)
    sizes = {
        "vocab_size": 64, "hidden_size": 192, "intermediate_size": 512, "num_hidden_layers": 2,
        "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 32, "max_position_embeddings": 32,
    }  # fmt: skip
    return LlamaForCausalLM(LlamaConfig(**{**sizes, **others}, tie_word_embeddings=True)).eval()


def pruned(model: Any, **given: Any) -> Any:
    return pk.prune(model, IDS, repair=False, outputs="logits", **given)


@pytest.mark.parametrize("layout", list(SERVERS))
def test_rows_of_all_matrices_are_stored_in_blocks(layout: Any, tmp_path: Path) -> None:
    result = pruned(llama(), params=0.7, layout=layout)
    rows = {name: weight.shape[-1] for name, weight in result.model.named_parameters() if weight.dim() == 2}
    block, _ = SERVERS[layout]
    assert not [name for name, row in rows.items() if row % block]
    assert result.plan.totals()["parameters"][1] <= 0.7 * result.plan.totals()["parameters"][0]
    assert result.model.config.head_dim == 32
    result.model.save_pretrained(tmp_path)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    with torch.no_grad():
        assert torch.equal(plain(IDS).logits, result.model(IDS).logits)


def test_larger_blocks_stay_where_the_budget_allows_them() -> None:
    wide = {"hidden_size": 96, "num_attention_heads": 3}
    config = pruned(llama(**wide, intermediate_size=4096), params=0.7, layout="llama.cpp").model.config
    assert config.intermediate_size < 4096
    assert config.intermediate_size % 256 == 0
    narrow = llama(**wide, intermediate_size=256)  # one block of 256: it could only stay whole
    assert pruned(narrow, params=0.5, layout="llama.cpp").model.config.intermediate_size % 256


def test_devices_share_heads_and_widths() -> None:
    config = pruned(llama(), params=0.7, layout="vllm", tensor_parallel=2).model.config
    assert (config.num_attention_heads % 2, config.num_key_value_heads, config.intermediate_size % 2) == (0, 2, 0)
    with pytest.raises(
        PlanError, match=r"tensor_parallel: 4 devices cannot share the 3 of .*q_proj.* 1, 2, 3 may stay"
    ):
        pruned(llama(), params=0.7, layout="vllm", tensor_parallel=4)


@pytest.mark.parametrize(
    ("given", "parts"),
    [
        ({"layout": "llama.cpp", "round_to": 24}, ("round_to", "multiple of 32", "'llama.cpp'", "got 24")),
        ({"layout": "vllm", "target": {"block": 24}}, ("target.block", "multiple of 16", "'vllm'", "got 24")),
        ({"layout": "llama.cpp", "tensor_parallel": 2}, ("tensor_parallel", "expected 1", "'llama.cpp'", "got 2")),
    ],
)
def test_what_contradicts_a_server_is_named_with_it(given: Any, parts: tuple[str, ...]) -> None:
    found = [f"{'.'.join(path)}: {text}" for path, text in prune_contradictions(given)]
    assert len(found) == 1
    assert all(part in found[0] for part in parts), found


def test_multiples_that_contradict_end_before_anything_runs() -> None:
    with pytest.raises(PrunekitError, match=r"round_to: expected a multiple of 32.*'llama\.cpp'.*got 24"):
        pruned(llama(), params=0.7, layout="llama.cpp", round_to=24)
    assert not [*prune_contradictions({"layout": "llama.cpp", "round_to": 64, "target": {"block": 8}})]


def test_a_budget_that_a_layout_cannot_meet_names_the_nearest_that_can() -> None:
    with pytest.raises(PlanError) as raised:
        pruned(llama(), params=0.02, layout="llama.cpp")
    assert re.search(
        r"contradicts layout='llama\.cpp', without which by layout='huggingface', the nearest", str(raised.value)
    )


def test_a_model_of_no_library_is_refused_by_name() -> None:
    with pytest.raises(UsageError, match="layout: 'vllm' is for a model of transformers"):
        pk.prune(torch.nn.Linear(4, 4), torch.randn(2, 4), params=0.5, layout="vllm")


def test_blocks_stay_in_the_layouts_of_servers() -> None:
    assert not PruneSettings(layout="vllm").blocks_may_go
    assert [path for path, _ in prune_contradictions({"layout": "vllm", "depth": True})] == [("depth",)]


@pytest.mark.parametrize("entry", ["intermediate_size", "num_key_value_heads", "num_attention_heads"])
def test_no_class_builds_one_narrower_layer_yet(entry: str) -> None:
    """The guide says so; where this fails, `huggingface` can say widths of single layers."""
    config = llama().config.to_dict()
    with pytest.raises(Exception, match="per-layer attribute"):
        LlamaForCausalLM(LlamaConfig.from_dict({**config, "per_layer_config": {0: {entry: config[entry] // 3}}}))


def test_a_model_whose_layers_have_entries_of_their_own_can_be_pruned() -> None:
    torch.manual_seed(0)
    config = Gemma4TextConfig(
        vocab_size=60, vocab_size_per_layer_input=60, hidden_size_per_layer_input=0, hidden_size=48,
        intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
        global_head_dim=16, layer_types=["sliding_attention", "full_attention"], max_position_embeddings=32,
        num_kv_shared_layers=0, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    result = pruned(Gemma4ForCausalLM(config).eval(), params=0.8, layout="equal", round_to=1)
    before, after = result.plan.totals()["parameters"]
    assert after <= 0.8 * before
