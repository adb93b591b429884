"""transformers: one model of every architecture named below, in a tiny configuration built here; nothing is downloaded.

Decoders run twice in one forward: over a prompt, and for one more token with the cache of keys and values.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from zoo_cases import Case

Inputs = Callable[[int], dict[str, Tensor]]
Build = Callable[[], nn.Module]

SIZE = "32"
WORDS = 99
LENGTH = 12
SIZES = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 256}


class Outputs(nn.Module):
    """A model called with named inputs, of whose outputs only some are wanted: no hidden states."""

    def __init__(self, model: nn.Module, wanted: tuple[str, ...]) -> None:
        super().__init__()
        self.model, self.wanted = model, wanted

    def forward(self, inputs: dict[str, Tensor]) -> tuple[Tensor, ...]:
        output = self.model(**inputs)
        return tuple(output[name] for name in self.wanted)


class WithCache(nn.Module):
    """A decoder that reads a prompt and then one more token, with what it remembers of the prompt."""

    def __init__(self, model: nn.Module, decoded: str) -> None:
        super().__init__()
        self.model, self.decoded = model, decoded

    def forward(self, inputs: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        tokens = inputs[self.decoded]
        prompt = self.model(**{**inputs, self.decoded: tokens[:, :-1]}, use_cache=True)
        cache = prompt.past_key_values
        step = self.model(**{**inputs, self.decoded: tokens[:, -1:]}, past_key_values=cache, use_cache=True)
        return prompt.logits, step.logits


@dataclass(frozen=True)
class Entry:
    """How a model is built, what goes in, and which outputs count."""

    model: str
    config: Callable[[], Any]
    inputs: Inputs
    outputs: tuple[str, ...] = ("logits",)
    decoded: str = ""
    """The input whose last token is a step of its own, with the cache; empty without a cache."""


def names() -> list[str]:
    """The architectures of the matrix."""
    return list(ENTRIES)


def knows(name: str) -> bool:
    """Whether it has a row in the matrix."""
    return name in ENTRIES


def build(name: str, side: int | None) -> Case:
    """A model with random weights; its images are of 32 pixels, whatever `side` says."""
    entry = ENTRIES[name]
    model = getattr(transformers, entry.model)(entry.config())
    wrapped = WithCache(model, entry.decoded) if entry.decoded else Outputs(model, entry.outputs)
    return Case(wrapped.eval(), lambda batch: (entry.inputs(batch),))


def _tokens(name: str = "input_ids") -> Inputs:
    return lambda batch: {name: torch.randint(5, WORDS, (batch, LENGTH))}


def _image(batch: int) -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(batch, 3, 32, 32)}


def _image_and_text(batch: int) -> dict[str, Tensor]:
    return {**_tokens()(batch), **_image(batch)}


def _speech(batch: int) -> dict[str, Tensor]:
    return {"input_features": torch.randn(batch, 16, 60), **_tokens("decoder_input_ids")(batch)}


def _pair(batch: int) -> dict[str, Tensor]:
    return {**_tokens()(batch), **_tokens("decoder_input_ids")(batch)}


def _encoder(config: str, **more: Any) -> Callable[[], Any]:
    return lambda: getattr(transformers, config)(**{**SIZES, **more})


def _decoder(config: str, **more: Any) -> Callable[[], Any]:
    """Four query heads on two key and value heads."""
    grouped = {"num_key_value_heads": 2, "head_dim": 16, "vocab_size": WORDS, "max_position_embeddings": 64}
    return _encoder(config, **{**grouped, "pad_token_id": 0, **more})


def _clip() -> Any:
    text = {
        **SIZES,
        "vocab_size": WORDS,
        "max_position_embeddings": LENGTH,
        "bos_token_id": 0,
        "eos_token_id": WORDS - 1,
    }
    vision = {**SIZES, "image_size": 32, "patch_size": 8}
    return transformers.CLIPConfig(text_config=text, vision_config=vision, projection_dim=48)


def _detr() -> Any:
    backbone = transformers.ResNetConfig(
        embedding_size=16, hidden_sizes=[16, 24, 32, 40], depths=[1, 1, 1, 1], out_features=["stage4"]
    )
    layers = {
        f"{side}_{key}": value
        for side in ("encoder", "decoder")
        for key, value in (("layers", 3), ("ffn_dim", 256), ("attention_heads", 4))
    }
    return transformers.DetrConfig(backbone_config=backbone, num_queries=6, d_model=64, **layers)


def _segformer() -> Any:
    return transformers.SegformerConfig(
        hidden_sizes=[16, 24, 32, 40], num_attention_heads=[1, 2, 4, 4], depths=[1, 1, 1, 1], decoder_hidden_size=32
    )


def _swin() -> Any:
    return transformers.SwinConfig(
        image_size=32, patch_size=2, embed_dim=16, depths=[2, 2], num_heads=[2, 4], window_size=4
    )


def _whisper() -> Any:
    layers = {
        f"{side}_{key}": value
        for side in ("encoder", "decoder")
        for key, value in (("layers", 3), ("ffn_dim", 256), ("attention_heads", 4))
    }
    special = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id"), 1)
    lengths = {"max_source_positions": 30, "max_target_positions": 64, "num_mel_bins": 16}
    return transformers.WhisperConfig(vocab_size=WORDS, d_model=64, **layers, **lengths, **special)


def _t5() -> Any:
    return transformers.T5Config(
        vocab_size=WORDS, d_model=64, d_kv=16, d_ff=256, num_layers=3, num_heads=4, decoder_start_token_id=0
    )


def _gpt2() -> Any:
    return transformers.GPT2Config(
        vocab_size=WORDS, n_positions=64, n_embd=64, n_layer=3, n_head=4, bos_token_id=0, eos_token_id=0
    )


PATCHES = {"image_size": 32, "patch_size": 8}
TEXT = {"vocab_size": WORDS, "max_position_embeddings": 64}
CONVNEXT = {"hidden_sizes": [32, 48, 64, 96], "depths": [1, 1, 2, 1]}
ENTRIES = {
    "vit": Entry("ViTForImageClassification", _encoder("ViTConfig", **PATCHES), _image),
    "deit": Entry("DeiTForImageClassification", _encoder("DeiTConfig", **PATCHES), _image),
    "swin": Entry("SwinForImageClassification", _swin, _image),
    "convnext": Entry("ConvNextForImageClassification", lambda: transformers.ConvNextConfig(**CONVNEXT), _image),
    "dinov2": Entry("Dinov2ForImageClassification", _encoder("Dinov2Config", **PATCHES), _image),
    "segformer": Entry("SegformerForSemanticSegmentation", _segformer, _image),
    "detr": Entry("DetrForObjectDetection", _detr, _image, ("logits", "pred_boxes")),
    "clip": Entry("CLIPModel", _clip, _image_and_text, ("logits_per_image", "logits_per_text")),
    "whisper": Entry("WhisperForConditionalGeneration", _whisper, _speech, decoded="decoder_input_ids"),
    "bert": Entry("BertForSequenceClassification", _encoder("BertConfig", **TEXT), _tokens()),
    "roberta": Entry("RobertaForMaskedLM", _encoder("RobertaConfig", **TEXT), _tokens()),
    "t5": Entry("T5ForConditionalGeneration", _t5, _pair, decoded="decoder_input_ids"),
    "gpt2": Entry("GPT2LMHeadModel", _gpt2, _tokens(), decoded="input_ids"),
    "llama": Entry("LlamaForCausalLM", _decoder("LlamaConfig"), _tokens(), decoded="input_ids"),
    "mistral": Entry("MistralForCausalLM", _decoder("MistralConfig", sliding_window=8), _tokens(), decoded="input_ids"),
    "qwen2": Entry("Qwen2ForCausalLM", _decoder("Qwen2Config"), _tokens(), decoded="input_ids"),
    "qwen3": Entry("Qwen3ForCausalLM", _decoder("Qwen3Config"), _tokens(), decoded="input_ids"),
    "gemma": Entry("GemmaForCausalLM", _decoder("GemmaConfig"), _tokens(), decoded="input_ids"),
    "gemma2": Entry("Gemma2ForCausalLM", _decoder("Gemma2Config", sliding_window=8), _tokens(), decoded="input_ids"),
    "gemma3": Entry(
        "Gemma3ForCausalLM", _decoder("Gemma3TextConfig", sliding_window=8), _tokens(), decoded="input_ids"
    ),
}
