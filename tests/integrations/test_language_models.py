"""Language models as they are used: half precision, caches, compiled decoding, left padding, experts, and LoRA."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from equivalence import assert_only_rounded
from torch import Tensor, nn

import prunekit as pk
from prunekit.errors import DataError, UsageError
from prunekit.planning.stored_plan import LIBRARY_CONFIG
from prunekit.training.execution import gradient_checkpointing

pytest.importorskip("transformers")
pytest.importorskip("accelerate")
from transformers import (
    BertConfig,
    BertForMaskedLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    StaticCache,
    T5Config,
    T5ForConditionalGeneration,
)

PAGE = Path(pk.__file__).parent / "guide" / "how_to" / "language.md"
SIZES: dict[str, Any] = {
    "vocab_size": 60, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 6,
    "max_position_embeddings": 32, "initializer_range": 0.15,
}  # fmt: skip
GROUPED = SIZES | {"num_key_value_heads": 3}
EXPERTS = {"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2}
MODELS: dict[str, Callable[[], Any]] = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**GROUPED)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**GROUPED, head_dim=8)),
    "gemma2": lambda: Gemma2ForCausalLM(Gemma2Config(**GROUPED, head_dim=8)),
    "mixtral": lambda: MixtralForCausalLM(MixtralConfig(**GROUPED, num_local_experts=4)),
    "qwen3_moe": lambda: Qwen3MoeForCausalLM(Qwen3MoeConfig(**GROUPED, **EXPERTS, head_dim=8)),
    "gpt2": lambda: GPT2LMHeadModel(GPT2Config(vocab_size=60, n_positions=32, n_embd=48, n_layer=2, n_head=6)),
    "bert": lambda: BertForMaskedLM(BertConfig(**SIZES)),
    "t5": lambda: T5ForConditionalGeneration(
        T5Config(vocab_size=60, d_model=48, d_kv=8, d_ff=64, num_layers=2, num_heads=6)
    ),
}
IDS = torch.randint(3, 60, (16, 12), generator=torch.Generator().manual_seed(0))
TEXT = {"input_ids": IDS, "attention_mask": torch.ones_like(IDS)}
GREEDY: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
UNEVEN = {f"model.layers.{at}.self_attn.{name}_proj": share for at, share in ((0, 1.0), (1, 2 / 3)) for name in "kv"}
"""Two of three key-value heads in the second layer alone."""


def built(name: str) -> Any:
    torch.manual_seed(0)
    return MODELS[name]().eval()


def loaded(name: str, folder: Path, dtype: torch.dtype) -> Any:
    model = built(name)
    model.save_pretrained(folder)
    return type(model).from_pretrained(folder, dtype=dtype).eval()


def inputs_of(name: str) -> dict[str, Tensor]:
    return TEXT | ({"decoder_input_ids": IDS} if name == "t5" else {})


def dtypes(model: nn.Module) -> dict[str, torch.dtype]:
    return {name: tensor.dtype for name, tensor in model.named_parameters()}


def logits(model: Any, inputs: dict[str, Tensor]) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(**inputs).logits
    return found


def slowly(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "dtype", "how", "layout"),
    [
        ("llama", torch.bfloat16, "cast", "huggingface"),
        ("llama", torch.float16, "loaded", "free"),
        ("bert", torch.float16, "cast", "huggingface"),
        slowly("t5", torch.float16, "loaded", "free"),  # keeps some of its weights in float32
        slowly("t5", torch.float16, "loaded", "huggingface"),
        slowly("llama", torch.float16, "loaded", "huggingface"),
        slowly("gemma2", torch.bfloat16, "loaded", "huggingface"),  # keeps a rounded scale in a buffer
        slowly("gemma2", torch.float16, "cast", "huggingface"),
        slowly("gpt2", torch.bfloat16, "cast", "huggingface"),
        slowly("mixtral", torch.bfloat16, "loaded", "huggingface"),
        slowly("qwen3_moe", torch.float16, "cast", "free"),
    ],
)
def test_half_precision_is_pruned_as_it_is(
    name: str, dtype: torch.dtype, how: str, layout: Any, tmp_path: Path
) -> None:
    model = loaded(name, tmp_path / "dense", dtype) if how == "loaded" else built(name).to(dtype)
    asked: dict[str, Any] = {"params": 0.8, "layout": layout, "outputs": "logits"}
    result = pk.prune(model, calibration=inputs_of(name), **asked)
    assert result.max_relative_difference < 1e-9  # in float64
    assert dtypes(result.model) == dtypes(model)
    assert (set(dtypes(model).values()) == {dtype}) is (name != "t5")
    if name != "t5":  # which looks at its values in float16 alone, and so keeps its stream
        reference = loaded(name, tmp_path / "full", torch.float32) if how == "loaded" else built(name)
        full = pk.plan(reference, calibration=inputs_of(name), **asked)
        assert np.mean(full.keep == result.plan.keep) > 0.95
    pk.save(result, tmp_path / "small")
    again = pk.load(tmp_path / "small", model=lambda: built(name))
    assert dtypes(again) == dtypes(model)
    torch.testing.assert_close(again.state_dict(), result.model.state_dict(), rtol=0, atol=0)
    if layout == "huggingface":
        result.model.save_pretrained(tmp_path / "plain")  # type: ignore[operator]
        assert dtypes(type(model).from_pretrained(tmp_path / "plain")) == dtypes(model)


@pytest.mark.slow
def test_norms_in_float32_stay_so() -> None:
    model = built("bert").to(torch.bfloat16)
    for module in model.modules():
        if isinstance(module, nn.LayerNorm):
            module.float()
    result = pk.prune(model, calibration=TEXT, params=0.8)
    assert result.max_relative_difference < 1e-9
    assert dtypes(result.model) == dtypes(model)
    assert {*dtypes(model).values()} == {torch.bfloat16, torch.float32}


def pruned(name: str, layout: Any) -> Any:
    ratios = UNEVEN if layout == "free" and name != "gpt2" else None
    asked: dict[str, Any] = {"params": 0.65, "criterion": "l2", "layout": layout, "outputs": "logits"}
    return pk.prune(built(name), TEXT, ratios=ratios, **asked)


def key_heads(model: Any) -> list[int]:
    return [layer.self_attn.k_proj.out_features // 8 for layer in model.model.layers]


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["free", "equal", "huggingface"])
@pytest.mark.parametrize("name", ["llama", *map(slowly, ("qwen3", "gemma2", "mixtral", "gpt2"))])
def test_caches_hold_what_is_left(name: str, layout: str) -> None:
    small: Any = pruned(name, layout).model
    if name == "llama":
        assert len({*key_heads(small)}) == (2 if layout == "free" else 1)
        assert max(key_heads(small)) < 3 or layout == "free"
    expected = small.generate(IDS[:2], use_cache=False, **GREEDY)
    for kind in ({}, {"cache_implementation": "static"}, {"num_beams": 1, "cache_implementation": "dynamic"}):
        assert torch.equal(small.generate(IDS[:2], **kind, **GREEDY), expected)


@pytest.mark.filterwarnings("ignore")
def test_a_quantized_cache_is_that_of_the_masked_model() -> None:
    """Keys and values are quantized in groups within a head, so those of the heads that stay are the same."""
    pytest.importorskip("optimum.quanto", reason="transformers quantizes caches by optimum-quanto")
    model = built("llama")
    plan = pk.plan(model, TEXT, params=0.9, outputs="logits", ratios=UNEVEN)
    small: Any = pk.compact(model, plan)
    kind: dict[str, Any] = {"backend": "quanto", "nbits": 4, "residual_length": 4, "q_group_size": 8}
    found = small.generate(IDS[:2], cache_implementation="quantized", cache_config=kind, **GREEDY)
    with pk.masked(model, plan):
        expected = model.generate(IDS[:2], cache_implementation="quantized", cache_config=kind, **GREEDY)
    assert torch.equal(found, expected)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="transformers offloads caches on streams of a GPU")
def test_an_offloaded_cache_holds_what_is_left() -> None:
    small: Any = pruned("llama", "free").model.cuda()
    ids = IDS[:2].cuda()
    expected = small.generate(ids, use_cache=False, **GREEDY)
    assert torch.equal(small.generate(ids, cache_implementation="offloaded", **GREEDY), expected)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["aot_eager", slowly("inductor")])
@pytest.mark.parametrize("name", ["llama", slowly("mixtral")])
@pytest.mark.filterwarnings("ignore")  # of the compiler
def test_compiled_decoding_is_that_of_eager(name: str, backend: str) -> None:
    small: Any = pruned(name, "free").model
    expected = small.generate(IDS[:2], **GREEDY)
    torch.compiler.reset()
    step = torch.compile(small.forward, backend=backend, fullgraph=True)
    cache, made, ids = StaticCache(config=small.config, max_cache_len=32), IDS[:2], IDS[:2]
    with torch.no_grad():
        while made.shape[1] < expected.shape[1]:
            run = small if ids is made else step  # the prompt in eager, as `generate` does
            places = torch.arange(made.shape[1] - ids.shape[1], made.shape[1])[None].expand(2, -1)
            ids = run(ids, past_key_values=cache, position_ids=places).logits[:, -1].argmax(-1, keepdim=True)
            made = torch.cat([made, ids], 1)
    torch.compiler.reset()
    assert torch.equal(made, expected)


LENGTHS = (5, 5, 7, 7, 9, 9, 12, 12) * 2
SENTENCES = [IDS[at, :length] for at, length in enumerate(LENGTHS)]


def padded(side: str) -> dict[str, Tensor]:
    """Sentences with padding on a side, and positions that begin with them, as `generate` gives them."""
    ids, mask = torch.zeros_like(IDS), torch.zeros_like(IDS)
    for at, text in enumerate(SENTENCES):
        place = slice(12 - len(text), 12) if side == "left" else slice(len(text))
        ids[at, place], mask[at, place] = text, 1
    return {"input_ids": ids, "attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp(min=0)}


def unpadded() -> list[dict[str, Tensor]]:
    found = []
    for at in range(0, len(SENTENCES), 2):
        ids = torch.stack(SENTENCES[at : at + 2])
        places = torch.arange(ids.shape[1])[None].repeat(2, 1)
        found.append({"input_ids": ids, "attention_mask": torch.ones_like(ids), "position_ids": places})
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bert", *map(slowly, ("llama", "gpt2"))])  # grouped_mm takes no float64
def test_padding_on_either_side_counts_for_nothing(name: str) -> None:
    results = [
        pk.prune(built(name).double(), calibration=data, params=0.8, outputs="logits")
        for data in (unpadded(), padded("right"), padded("left"))
    ]
    first = results[0]
    assert first.repair is not None
    for other in results[1:]:
        assert other.repair is not None
        assert np.array_equal(other.plan.keep, first.plan.keep)
        assert other.repair.before == pytest.approx(first.repair.before, rel=1e-9)
        for got, want in zip(other.model.parameters(), first.model.parameters(), strict=True):
            torch.testing.assert_close(got, want, rtol=0, atol=1e-9 * float(want.detach().abs().max()))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", *map(slowly, ("qwen3", "gpt2", "mixtral"))])
def test_prompts_with_padding_on_the_left_go_on_as_each_alone(name: str) -> None:
    small: Any = pruned(name, "free").model
    chosen, data, asked = [0, 3, 5, 6], padded("left"), GREEDY | {"min_new_tokens": 6}
    found = small.generate(data["input_ids"][chosen], attention_mask=data["attention_mask"][chosen], **asked)[:, 12:]
    alone = [small.generate(SENTENCES[at][None], **asked)[0, LENGTHS[at] :] for at in chosen]
    assert torch.equal(found, torch.stack(alone))


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["free", "huggingface"])
@pytest.mark.parametrize("name", ["qwen3_moe", slowly("mixtral")])
def test_experts_become_fewer_and_narrower(name: str, layout: Any, tmp_path: Path) -> None:
    model = built(name)
    result = pk.prune(model, TEXT, params=0.5, criterion="l2", layout=layout, outputs="logits")
    assert result.max_relative_difference < 1e-9
    small: Any = result.model
    for layer in small.model.layers:
        experts, inner, width = layer.mlp.experts.down_proj.shape[0], *layer.mlp.experts.down_proj.shape[1:]
        assert layer.mlp.experts.gate_up_proj.shape == (experts, 2 * width, inner)
        assert layer.mlp.gate.weight.shape == (experts, inner)
        assert layer.mlp.gate.top_k <= experts < 4
        assert width < model.model.layers[0].mlp.experts.down_proj.shape[2]
    expected = logits(small, TEXT)
    with pk.masked(model, result.plan):
        torch.testing.assert_close(logits(model, TEXT), expected, rtol=1e-4, atol=1e-5)
    for implementation in ("eager", "batched_mm", "grouped_mm"):
        small.set_experts_implementation(implementation)
        torch.testing.assert_close(logits(small, TEXT), expected, rtol=1e-4, atol=1e-5)
    if layout == "huggingface":
        said = result.plan.provenance[LIBRARY_CONFIG]["config"]
        assert {"num_local_experts", "num_experts"} & said.keys()
        small.save_pretrained(tmp_path)
        again = type(model).from_pretrained(tmp_path).eval()
        torch.testing.assert_close(logits(again, TEXT), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_elimination_ranks_the_widths_of_experts() -> None:
    model, held = built("mixtral"), {"input_ids": IDS.flip(0, 1)}
    want = logits(model, held)
    errors = {}
    for criterion in ("elimination", "l2"):
        result = pk.prune(built("mixtral"), calibration=TEXT, params=0.5, criterion=criterion, outputs="logits")
        assert result.max_relative_difference < 1e-9
        small: Any = result.model
        errors[criterion] = float((logits(small, held) - want).square().mean())
        if criterion == "elimination":
            assert not [note for note in result.notes if "are not ranked" in note]
            assert small.model.embed_tokens.weight.shape[1] >= 32  # it went to 8 where only the stream was ranked
            assert all(layer.mlp.experts.down_proj.shape[2] <= 48 for layer in small.model.layers)
            torch.testing.assert_close(logits(result.masked, held), logits(small, held), rtol=1e-4, atol=1e-5)
    assert errors["elimination"] < 0.8 * errors["l2"]


class Mixture(nn.Module):
    """A mixture of experts that are modules of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.out = nn.Linear(16, 4, bias=False), nn.Linear(16, 4)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(16, 24), nn.GELU(), nn.Linear(24, 16)) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        """Return (N, 4)."""
        shares, chosen = self.gate(x).softmax(-1).topk(2, -1)
        total = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            row, place = torch.where(chosen == number)
            total.index_add_(0, row, expert(x[row]) * shares[row, place, None])
        return self.out(x + total)  # type: ignore[no-any-return]


def test_experts_in_modules_have_widths_of_their_own() -> None:
    torch.manual_seed(0)
    result = pk.prune(Mixture().eval(), calibration=torch.randn(64, 16), params=0.7)
    assert result.max_relative_difference < 1e-9
    widths = [expert[0].out_features for expert in result.model.experts]  # type: ignore[union-attr, index]
    assert len({*widths}) > 1
    assert sum(widths) < 0.8 * 24 * len(widths)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of peft, about the libraries that it uses
def test_the_guide_trains_lora_on_the_pruned_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("peft")
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.S)
    names: dict[str, Any] = {}
    for block in blocks[: 1 + next(at for at, text in enumerate(blocks) if "peft" in text)]:
        exec(compile(block, str(PAGE), "exec"), names)
    merged, text = names["merged"], names["text"]
    assert not any("lora" in name for name, _ in merged.named_parameters())
    torch.testing.assert_close(logits(merged, text), names["adapted"], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(logits(names["plain"], text), logits(merged, text), rtol=0, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", *map(slowly, ("mixtral", "gpt2", "bert"))])
@pytest.mark.filterwarnings("ignore:`gradient_checkpointing")  # names until version 6 of transformers
def test_gradient_checkpointing_keeps_gradients_under_masks(name: str) -> None:
    model = built(name).double().train()
    if name == "mixtral":
        model.set_experts_implementation("eager")  # grouped_mm takes no float64
    plan = pk.plan(model, TEXT, params=0.7, criterion="l2", outputs="logits")
    found = []
    for _ in range(2):
        model.zero_grad()
        with pk.masked(model, plan):
            torch.manual_seed(0)
            model(**TEXT, labels=IDS).loss.backward()
        found.append({name: tensor.grad.clone() for name, tensor in model.named_parameters()})
        model.gradient_checkpointing_enable()
    assert_only_rounded(found[1], found[0])  # what is computed again may be summed in another order


def test_training_with_checkpointing_leaves_nothing_behind() -> None:
    model = built("llama").train()
    with gradient_checkpointing(nn.Sequential(model)):
        assert model.is_activation_checkpointing
    assert not model.is_activation_checkpointing
    assert not any(module._forward_hooks for module in model.modules())
    refused = pytest.raises(UsageError, match=r"expected a model with one of the methods .*, got Linear")
    with refused, gradient_checkpointing(nn.Linear(2, 2)):
        pass


def test_token_numbers_beyond_the_vocabulary_are_an_error_that_names_what_would_do() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(vocab_size=20, n_embd=8, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0)
    model, tokens = transformers.GPT2LMHeadModel(config), torch.full((8, 4), 23)
    with pytest.raises(DataError, match=r"token numbers below 20, the model's vocabulary, got 23.* 24 at least"):
        pk.prune(model, calibration={"input_ids": tokens}, params=0.8)
