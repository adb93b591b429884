"""Widths that a configuration of transformers says: plain `from_pretrained` loads what was pruned, and computes it."""

from __future__ import annotations

import copy
import json
import pickle
import subprocess
import sys
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_language import llama
from torch import nn

import prunekit as pk
from prunekit.channels.labels.constraints import EqualWidths
from prunekit.errors import SettingsError, UsageError
from prunekit.models.hugging_face import ConfigSearch, shapes_of
from prunekit.planning.candidates import free_parts
from prunekit.planning.solver import make_plan
from prunekit.planning.stored_plan import LIBRARY_CONFIG
from prunekit.settings.pruning import BudgetSettings, PruneSettings
from prunekit.utils.tensors import gather

pytest.importorskip("transformers")
pytest.importorskip("accelerate")
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BertModel,
    DistilBertConfig,
    DistilBertForMaskedLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    RobertaConfig,
    RobertaForMaskedLM,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
    WhisperConfig,
    WhisperForConditionalGeneration,
)

from prunekit.integrations.transformers import from_pretrained, save_pretrained

SIZES: dict[str, Any] = {
    "vocab_size": 60, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 6,
    "max_position_embeddings": 32,
}  # fmt: skip
GROUPED = SIZES | {"num_key_value_heads": 3}
IDS = torch.arange(3, 19).reshape(2, 8)
TOKENS = {"input_ids": IDS, "attention_mask": torch.ones_like(IDS)}
BOTH = {"input_ids": IDS, "decoder_input_ids": IDS}
Case = tuple[Callable[[], Any], Mapping[str, Any], set[str]]

CASES: dict[str, Case] = {
    "llama": (
        lambda: LlamaForCausalLM(LlamaConfig(**GROUPED, tie_word_embeddings=True)), TOKENS,
        {"hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads"},
    ),
    "qwen2": (  # head_dim is read where it is given, and is not among its entries
        lambda: Qwen2ForCausalLM(Qwen2Config(**GROUPED)), TOKENS,
        {"head_dim", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads"},
    ),
    "qwen3": (
        lambda: Qwen3ForCausalLM(Qwen3Config(**GROUPED, head_dim=8)), TOKENS,
        {"hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads"},
    ),
    "gemma2": (  # its code multiplies embeddings by the root of the hidden size, so that stays
        lambda: Gemma2ForCausalLM(Gemma2Config(**GROUPED, head_dim=8)), TOKENS,
        {"intermediate_size", "num_attention_heads", "num_key_value_heads"},
    ),
    "phi3": (
        lambda: Phi3ForCausalLM(Phi3Config(**GROUPED, pad_token_id=0)), TOKENS,
        {"head_dim", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads"},
    ),
    "mixtral": (
        lambda: MixtralForCausalLM(MixtralConfig(**GROUPED, num_local_experts=4)), TOKENS,
        {"head_dim", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads",
         "num_local_experts"},
    ),
    "gpt2": (
        lambda: GPT2LMHeadModel(GPT2Config(vocab_size=60, n_positions=32, n_embd=48, n_layer=2, n_head=6)), TOKENS,
        {"n_inner", "n_embd", "n_head"},
    ),
    "bert": (
        lambda: BertForSequenceClassification(BertConfig(**SIZES)), TOKENS,
        {"hidden_size", "intermediate_size", "num_attention_heads"},
    ),
    "roberta": (
        lambda: RobertaForMaskedLM(RobertaConfig(**SIZES)), TOKENS,
        {"hidden_size", "intermediate_size", "num_attention_heads"},
    ),
    "distilbert": (
        lambda: DistilBertForMaskedLM(
            DistilBertConfig(vocab_size=60, max_position_embeddings=32, n_layers=2, n_heads=6, dim=48, hidden_dim=64)
        ), TOKENS, {"dim", "hidden_dim", "n_heads"},
    ),
    "t5": (  # one entry for encoder and decoder
        lambda: T5ForConditionalGeneration(
            T5Config(vocab_size=60, d_model=48, d_kv=8, d_ff=64, num_layers=2, num_heads=6)
        ), BOTH, {"d_ff", "d_kv", "num_heads"},
    ),
    "vit": (
        lambda: ViTForImageClassification(
            ViTConfig(hidden_size=48, num_hidden_layers=2, num_attention_heads=6, intermediate_size=64, image_size=16,
                      patch_size=8)
        ), {"pixel_values": torch.linspace(-1, 1, 2 * 3 * 16 * 16).reshape(2, 3, 16, 16)},
        {"head_dim", "hidden_size", "intermediate_size", "num_attention_heads"},
    ),
    "whisper": (
        lambda: WhisperForConditionalGeneration(
            WhisperConfig(vocab_size=60, num_mel_bins=8, encoder_layers=2, decoder_layers=2, encoder_attention_heads=6,
                          decoder_attention_heads=6, encoder_ffn_dim=64, decoder_ffn_dim=96, d_model=48,
                          max_source_positions=16, max_target_positions=32, pad_token_id=0, bos_token_id=1,
                          eos_token_id=2, decoder_start_token_id=1)
        ), {"input_features": torch.linspace(-1, 1, 2 * 8 * 32).reshape(2, 8, 32), "decoder_input_ids": IDS},
        {"d_model", "encoder_attention_heads", "decoder_attention_heads", "encoder_ffn_dim", "decoder_ffn_dim"},
    ),
}  # fmt: skip
QUICK = ("llama", "bert", "t5")


def built(name: str) -> tuple[Any, dict[str, Any], set[str]]:
    make, inputs, entries = CASES[name]
    torch.manual_seed(0)
    return make().eval(), dict(inputs), entries


def outputs(model: nn.Module, inputs: Mapping[str, Any]) -> torch.Tensor:
    with torch.no_grad():
        return gather(model(**inputs).logits)[0]


def in_double(model: nn.Module, inputs: Mapping[str, Any]) -> torch.Tensor:
    """Return the outputs in float64: other operators of the same sums differ by rounding."""
    wide = {name: value.double() if value.is_floating_point() else value for name, value in inputs.items()}
    return outputs(copy.deepcopy(model).double(), wide)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in CASES]
)
def test_plain_from_pretrained_loads_what_was_pruned(name: str, tmp_path: Path) -> None:
    model, inputs, entries = built(name)
    result = pk.prune(model, inputs, params=0.8, layout="huggingface", outputs="logits")
    said = result.plan.provenance[LIBRARY_CONFIG]["config"]
    assert said
    assert said.keys() <= entries
    result.model.save_pretrained(tmp_path)
    again, found = type(model).from_pretrained(tmp_path, output_loading_info=True)
    assert not any(found.values())
    assert sum(p.numel() for p in again.parameters()) <= 0.8 * sum(p.numel() for p in model.parameters())
    if name == "mixtral":  # its product of experts takes no float64
        torch.testing.assert_close(outputs(again.eval(), inputs), outputs(result.model, inputs), rtol=0, atol=1e-6)
    else:
        torch.testing.assert_close(in_double(again.eval(), inputs), in_double(result.model, inputs), rtol=0, atol=1e-9)
    with pk.masked(model, result.plan):
        torch.testing.assert_close(outputs(result.model, inputs), outputs(model, inputs), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_a_process_without_prunekit_loads_and_generates(tmp_path: Path) -> None:
    model, inputs, _ = built("llama")
    result = pk.prune(model, inputs, params=0.8, layout="huggingface", outputs="logits")
    folder = save_pretrained(result, tmp_path / "small")
    expected = result.model.generate(IDS[:1], max_new_tokens=6, do_sample=False, pad_token_id=0)
    code = (
        "import sys, torch\n"
        "sys.modules['prunekit'] = None\n"
        "from transformers import AutoModelForCausalLM\n"
        f"model = AutoModelForCausalLM.from_pretrained({str(folder)!r})\n"
        f"made = model.generate(torch.tensor({IDS[:1].tolist()}), max_new_tokens=6, do_sample=False, pad_token_id=0)\n"
        "print(made.tolist())\n"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(ran.stdout.splitlines()[-1]) == expected.tolist()
    torch.testing.assert_close(outputs(from_pretrained(folder), inputs), outputs(result.model, inputs))
    own = pk.load(folder, model=lambda: built("llama")[0])
    assert own.config.to_dict() == result.model.config.to_dict()


@pytest.mark.slow
def test_caches_have_the_heads_that_are_left() -> None:
    model, inputs, _ = built("llama")
    small: Any = pk.prune(model, inputs, params=0.65, layout="huggingface", outputs="logits").model
    assert small.config.num_key_value_heads < 3
    made = [
        small.generate(IDS[:1], max_new_tokens=5, do_sample=False, pad_token_id=0, **kind).tolist()
        for kind in ({}, {"use_cache": False}, {"cache_implementation": "static"})
    ]
    assert made[0] == made[1] == made[2]


class Embedding(nn.Module):
    """A BERT with a mean over tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = BertModel(BertConfig(**SIZES), add_pooling_layer=False)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        """Return (B, width)."""
        states = self.encoder(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        return (states * attention_mask[..., None]).sum(1) / attention_mask.sum(1, keepdim=True)


@pytest.mark.slow
def test_a_model_inside_another_is_saved_by_itself(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Embedding().eval()
    result = pk.prune(model, TOKENS, params=0.8, layout="huggingface")
    assert result.plan.provenance[LIBRARY_CONFIG]["module"] == "encoder"
    small: Any = result.model
    small.encoder.save_pretrained(tmp_path)
    again = BertModel.from_pretrained(tmp_path, add_pooling_layer=False).eval()
    with torch.no_grad():
        found, expected = (encoder.double()(**TOKENS).last_hidden_state for encoder in (again, small.encoder))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-9)


@pytest.mark.slow
def test_other_channels_stay_with_the_reason() -> None:
    model, inputs, _ = built("llama")
    plan = pk.plan(model, inputs, params=0.8, layout="huggingface", outputs="logits")
    equal = plan.channel_map.traced.equal_widths
    assert isinstance(equal, EqualWidths)
    assert [*equal.whole.values()] == [
        "a LlamaForCausalLM's configuration cannot say another width of positions in heads of "
        "model.layers.#.self_attn.v_proj"
    ]


@pytest.mark.slow
def test_after_training_the_config_is_that_of_the_final_plan(tmp_path: Path) -> None:
    model, inputs, _ = built("llama")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    pruner = pk.Pruner(model, optimizer, inputs, params=0.8, layout="huggingface", outputs="logits", steps=4)
    for _ in range(4):
        optimizer.zero_grad()
        model(**inputs, labels=IDS).loss.backward()
        optimizer.step()
        pruner.step()
    small: Any = pruner.finish()[0]
    small.save_pretrained(tmp_path)
    again = LlamaForCausalLM.from_pretrained(tmp_path).eval()
    torch.testing.assert_close(in_double(again, inputs), in_double(small.eval(), inputs), rtol=0, atol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("scope", ["uniform", "global", "per_mac", "capacity"])
def test_layers_that_repeat_get_equal_widths(scope: Any) -> None:
    torch.manual_seed(0)
    model = BertModel(BertConfig(**SIZES | {"num_hidden_layers": 4})).eval()
    plan = pk.plan(model, TOKENS, macs=0.63, scope=scope, layout="equal", criterion="random")
    found: dict[str, set[int]] = {}
    for name, (kept, _) in plan.widths().items():
        found.setdefault(".".join("#" if part.isdigit() else part for part in name.split(".")), set()).add(kept)
    assert {name: len(widths) for name, widths in found.items()} == dict.fromkeys(found, 1)
    assert plan.provenance["budgets"]["macs"]["left"] <= 0.63


def test_equal_widths_cost_what_they_are_counted_to() -> None:
    """Costs of parts that span layers are those of a plan with these widths, also of heads with their positions."""
    torch.manual_seed(0)
    chart = pk.trace(BertModel(BertConfig(**SIZES)).eval(), TOKENS)
    scores = np.random.default_rng(0).random(chart.n_labels)
    for asked in (0.9, 0.6, 0.4):
        settings = PruneSettings(BudgetSettings(macs=asked), scope="per_mac", layout="equal", depth=False)
        plan = make_plan(chart, scores, settings)
        left = plan.provenance["budgets"]["macs"]["left"]
        assert left == pytest.approx(chart.macs(plan.keep) / chart.macs(), abs=1e-9)
        assert left > 0.9 * asked
    parts = free_parts(chart, scores, PruneSettings(layout="equal"))
    assert [part.together for part in parts if part.together > 1] == [2] * len([p for p in parts if p.together > 1])


def test_a_configuration_is_found_by_shapes_alone() -> None:
    config = LlamaConfig(**GROUPED)
    narrow = {"intermediate_size": 40, "hidden_size": 24, "head_dim": 8}
    with torch.device("meta"):
        wanted = shapes_of(LlamaForCausalLM(LlamaConfig(**GROUPED | narrow)))
        search = ConfigSearch(LlamaForCausalLM(config), config)
    assert next(search.fitting(wanted)) == {"hidden_size": 24, "intermediate_size": 40}
    uneven = {**wanted, "model.layers.1.mlp.up_proj.weight": (39, 24)}
    assert [*search.fitting(uneven)] == []


def test_a_model_of_no_library_is_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    with pytest.raises(UsageError, match=r"layout: 'huggingface' is for a model of transformers.*got Sequential"):
        pk.prune(model, torch.randn(2, 4), macs=0.5, layout="huggingface")
    with pytest.raises(SettingsError, match="layout: expected one of 'free', 'equal', 'huggingface'"):
        pk.prune(model, torch.randn(2, 4), macs=0.5, layout="hugging_face")  # type: ignore[arg-type]


@pytest.mark.slow
def test_a_model_that_is_pruned_already_is_refused() -> None:
    model, inputs, _ = built("llama")
    small = pk.prune(model, inputs, params=0.8, outputs="logits").model
    with pytest.raises(UsageError, match="expected a LlamaForCausalLM of the widths in its configuration"):
        pk.prune(small, inputs, params=0.8, layout="huggingface", outputs="logits")


@pytest.mark.slow
def test_a_layer_that_is_ignored_keeps_all_like_it_whole() -> None:
    model, inputs, _ = built("llama")
    asked: dict[str, Any] = {"layout": "huggingface", "outputs": "logits", "params": 0.8}
    plan = pk.plan(model, inputs, ignore="model.layers.0.mlp.up_proj", **asked)
    said = plan.provenance[LIBRARY_CONFIG]["config"]
    assert said
    assert "intermediate_size" not in said
    with pytest.raises(UsageError, match="depth: expected false or 'auto', because layout is 'huggingface'"):
        pk.plan(model, inputs, depth=True, **asked)


@pytest.mark.filterwarnings("ignore")  # of peft, about the libraries that it uses
def test_adapters_are_to_be_merged_first() -> None:
    peft = pytest.importorskip("peft")
    config = peft.IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"])
    adapted = peft.get_peft_model(llama(), config).eval()
    with pytest.raises(UsageError, match=r"k_proj is one of peft.* model = model\.merge_and_unload\(\)"):
        pk.plan(adapted, {"input_ids": torch.zeros(1, 8, dtype=torch.long)}, params=0.8, layout="huggingface")


@pytest.mark.slow
def test_notes_and_a_warning_say_what_the_librarys_own_save_cannot(tmp_path: Path) -> None:
    ids = {"input_ids": torch.randint(0, 40, (2, 8))}
    text = "what its own save_pretrained writes, from_pretrained refuses"
    for layout, said in (("free", True), ("huggingface", False)):
        result = pk.prune(model := llama(), ids, params=0.7, outputs="logits", layout=layout)
        assert any(text in note for note in result.notes) == said
        again = pickle.loads(pickle.dumps(result.model))
        for small in (result.model, copy.deepcopy(result.model), pk.compact(model, result.plan), again):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                small.save_pretrained(tmp_path)  # type: ignore[operator]
            # pickled, it has the method of its class, which a process without prunekit has too
            assert any(text in str(one.message) for one in caught) == (said and small is not again)


@pytest.mark.slow
def test_it_is_noted_where_others_pay_for_what_a_configuration_cannot_say() -> None:
    """All widths of a BERT that is read whole, so that heads would have to be another share of them."""
    torch.manual_seed(0)
    model = BertModel(BertConfig(**SIZES | {"intermediate_size": 128}), add_pooling_layer=False).eval()
    (note,) = pk.prune(model, TOKENS, params=0.8, layout="huggingface").notes
    assert "no configuration says other widths of encoder.layer.#.attention.self.key" in note
    assert "encoder.layer.0.intermediate.dense keeps 50.0 %, where 80.0 % was asked for" in note
    assert "layout='equal' or 'free' would keep 75.0 % of each" in note


def test_widths_of_layers_are_multiples_of_sixteen() -> None:
    """Where an axis has eight of them, and no rounding is given; heads are any number."""
    chart = pk.trace(llama(hidden_size=128, intermediate_size=384), {"input_ids": torch.zeros(1, 4, dtype=torch.long)})
    scores = np.ones(chart.n_labels)
    for layout, round_to, step in (("huggingface", None, 16), ("equal", None, 16), ("huggingface", 4, 4)):
        parts = free_parts(chart, scores, PruneSettings(layout=layout, round_to=round_to))
        (counts,) = [part.counts // part.together for part in parts if part.labels.size // part.together == 384]
        assert np.gcd.reduce(counts[counts >= 16]) == step


def test_uniform_shares_count_heads_of_keys_and_their_queries_once() -> None:
    sizes = {"hidden_size": 72, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 8}
    chart = pk.trace(llama(num_hidden_layers=4, **sizes), {"input_ids": torch.zeros(1, 4, dtype=torch.long)})
    for layout, off in (
        ("free", 0.13),
        ("equal", 0.25),
    ):  # one layer loses 0.08 of all heads, all lose 0.33
        for share in (0.9, 0.8, 0.7, 0.5):
            wanted = PruneSettings(BudgetSettings(params=share), layout=layout, depth=False)
            plan = make_plan(chart, np.ones(chart.n_labels), wanted)
            rows = [f"model.layers.{n}.self_attn.q_proj.weight" for n in range(4)]
            heads = [plan.kept(name, 0).size // 8 for name in rows]
            width = plan.kept("model.layers.0.mlp.up_proj.weight", 0).size / 64
            assert max(heads) - min(heads) <= (3 if layout == "free" else 0)
            assert abs(np.mean(heads) / 9 - width) <= off, (layout, share)
