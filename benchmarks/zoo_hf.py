"""transformers: architectures as users call them, in tiny configurations with random weights; nothing is downloaded.

A model is what its class makes of a config: it has its cache, returns its own dataclass, and is called with named
inputs, a mask beside the tokens where it takes one. Of decoders with two kinds of attention there are as many key and
value heads as their published configurations have.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor
from zoo_cases import Case

import prunekit

Inputs = Callable[[int], dict[str, Tensor]]

SIZE = "32"
WORDS, LENGTH, TOKENS = 99, 12, 8
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


@dataclass(frozen=True)
class Entry:
    """How a model is built, what goes in, and what is read of what comes out.

    Attributes:
        model: name of its class in transformers.
        config: the config, made when it is called.
        inputs: named inputs of as many samples as asked for.
        outputs: which outputs the user reads; None: all but state that is returned for the next call.
        generates: whether `generate` is checked.
    """

    model: str
    config: Callable[[], Any]
    inputs: Inputs
    outputs: tuple[str, ...] | None = None
    generates: bool = False


def names() -> list[str]:
    """The architectures of the matrix."""
    return list(ENTRIES)


def knows(name: str) -> bool:
    """Whether it has a row in the matrix."""
    return name in ENTRIES


def build(name: str, side: int | None) -> Case:
    """A model with random weights; its images are of 32 or 64 pixels, whatever `side` says."""
    entry = ENTRIES[name]
    model = getattr(transformers, entry.model)(entry.config()).eval()
    return Case(model, entry.inputs, entry.outputs, {"generates": generates} if entry.generates else {})


def generates(case: Case, pruned: Any, example: tuple[Any, ...]) -> str:
    """Whether the compact model generates the tokens that the masked one does, greedily."""
    prompt = {name: value for name, value in example[-1].items() if not name.startswith("decoder_")}
    settings = {"max_new_tokens": TOKENS, "min_new_tokens": TOKENS, "do_sample": False, "num_beams": 1}
    dense, compact = deepcopy(case.model).eval(), deepcopy(pruned.model).eval()
    with torch.no_grad(), prunekit.masked(dense, pruned.plan, restore=True) as masked:
        want = masked.generate(**prompt, **settings)
    got = compact.generate(**prompt, **settings)
    return "yes" if torch.equal(want, got) else f"{got[0, -TOKENS:].tolist()} for {want[0, -TOKENS:].tolist()}"


def text(batch: int) -> dict[str, Tensor]:
    """Tokens with a mask that leaves none out."""
    tokens = torch.randint(5, WORDS, (batch, LENGTH))
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}


def _image(side: int = 32) -> Inputs:
    return lambda batch: {"pixel_values": torch.randn(batch, 3, side, side)}


def _image_and_text(batch: int) -> dict[str, Tensor]:
    return {**text(batch), **_image()(batch)}


def _speech(batch: int) -> dict[str, Tensor]:
    return {"input_features": torch.randn(batch, 16, 60), "decoder_input_ids": torch.randint(5, WORDS, (batch, 6))}


def _pair(batch: int) -> dict[str, Tensor]:
    return {**text(batch), "decoder_input_ids": torch.randint(5, WORDS, (batch, 6))}


def _wave(batch: int) -> dict[str, Tensor]:
    return {"input_values": torch.randn(batch, 1600)}


def _config(name: str, *parts: dict[str, Any], **more: Any) -> Callable[[], Any]:
    """A config of that class, from dictionaries of which later ones go before earlier ones."""
    merged = {key: value for part in (*parts, more) for key, value in part.items()}
    return lambda: getattr(transformers, name)(**merged)


BASE = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 256}
TEXT = {**BASE, "vocab_size": WORDS, "max_position_embeddings": 64}
DECODER = {**TEXT, **SPECIAL}
GROUPED = {**DECODER, "num_key_value_heads": 2, "head_dim": 16}
EXPERTS = {**GROUPED, "num_hidden_layers": 2, "moe_intermediate_size": 64, "num_experts_per_tok": 2}
N = {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 64, "vocab_size": WORDS, **SPECIAL}
SIDES = {
    f"{side}_{key}": value
    for side in ("encoder", "decoder")
    for key, value in (("layers", 2), ("ffn_dim", 256), ("attention_heads", 4))
}
PAIR = {**SIDES, "d_model": 64, "vocab_size": WORDS, "max_position_embeddings": 64, **SPECIAL,
        "decoder_start_token_id": 1, "forced_eos_token_id": None}  # fmt: skip
PATCHES = {**BASE, "image_size": 32, "patch_size": 8}
LATENT = {"kv_lora_rank": 32, "q_lora_rank": 48, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16,
          "n_routed_experts": 8, "n_shared_experts": 1, "first_k_dense_replace": 1, "num_key_value_heads": 4,
          "head_dim": 8}  # fmt: skip
SPEECH = {**BASE, "vocab_size": WORDS, "conv_dim": (32, 32, 32), "conv_kernel": (10, 3, 3), "conv_stride": (5, 2, 2),
          "num_feat_extract_layers": 3, "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4,
          "mask_time_prob": 0.0, "layerdrop": 0.0, "apply_spec_augment": False}  # fmt: skip
STAGES = {"hidden_sizes": [16, 24, 32, 40], "depths": [1, 1, 1, 1]}
PYRAMID = {**STAGES, "num_attention_heads": [1, 2, 4, 4], "decoder_hidden_size": 32}
CONVNEXT = {"hidden_sizes": [32, 48, 64, 96], "depths": [1, 1, 2, 1]}
WINDOWS = {"image_size": 32, "patch_size": 2, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4}
SEQ2SEQ = ("logits",)


def _backbone() -> Any:
    return transformers.ResNetConfig(embedding_size=16, **STAGES, out_features=["stage4"])


def _detr() -> Any:
    queries = {"num_queries": 6, "d_model": 64, "num_labels": 9}
    return transformers.DetrConfig(backbone_config=_backbone(), **SIDES, **queries)


def _two_towers(config: str, text_more: dict[str, Any] | None = None, **more: Any) -> Callable[[], Any]:
    """A config of a text and an image tower."""
    words = {**TEXT, "max_position_embeddings": LENGTH, **SPECIAL, "eos_token_id": WORDS - 1, **(text_more or {})}
    return lambda: getattr(transformers, config)(text_config=words, vision_config=dict(PATCHES), **more)


def _llava() -> Any:
    vision = transformers.CLIPVisionConfig(**PATCHES)
    words = transformers.LlamaConfig(**GROUPED)
    return transformers.LlavaConfig(
        vision_config=vision, text_config=words, image_token_index=3, vision_feature_layer=-1, image_seq_length=16
    )


def _image_in_text(batch: int) -> dict[str, Tensor]:
    tokens = torch.cat([torch.full((batch, 16), 3), text(batch)["input_ids"]], 1)
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), **_image()(batch)}


def _upernet() -> Any:
    backbone = transformers.ConvNextConfig(**CONVNEXT, out_features=["stage1", "stage2", "stage3", "stage4"])
    return transformers.UperNetConfig(
        backbone_config=backbone, hidden_size=32, auxiliary_in_channels=64, auxiliary_channels=16
    )


def _encoder(model: str, config: str, *parts: dict[str, Any], **more: Any) -> Entry:
    """An encoder of text, with a head that scores."""
    return Entry(model, _config(config, TEXT, *parts, **more), text)


def _decoder(model: str, config: str, *parts: dict[str, Any], **more: Any) -> Entry:
    """A decoder that generates."""
    return Entry(model, _config(config, *(parts or (DECODER,)), **more), text, generates=True)


def _vision(model: str, config: str, *parts: dict[str, Any], side: int = 32, **more: Any) -> Entry:
    """A network for images, with a head that scores."""
    return Entry(model, _config(config, *parts, **more), _image(side))


def _translator(model: str, config: str, *parts: dict[str, Any], **more: Any) -> Entry:
    """An encoder of text and a decoder that generates; who translates does not read what the encoder says."""
    return Entry(model, _config(config, *(parts or (PAIR,)), **more), _pair, SEQ2SEQ, generates=True)


ENTRIES = {
    # Images
    "vit": _vision("ViTForImageClassification", "ViTConfig", PATCHES),
    "deit": _vision("DeiTForImageClassification", "DeiTConfig", PATCHES),
    "beit": _vision("BeitForImageClassification", "BeitConfig", PATCHES, use_relative_position_bias=True),
    "dinov2": _vision("Dinov2ForImageClassification", "Dinov2Config", PATCHES),
    "swin": _vision("SwinForImageClassification", "SwinConfig", WINDOWS),
    "swinv2": _vision("Swinv2ForImageClassification", "Swinv2Config", WINDOWS),
    "convnext": _vision("ConvNextForImageClassification", "ConvNextConfig", CONVNEXT),
    "resnet": _vision("ResNetForImageClassification", "ResNetConfig", STAGES, embedding_size=16, side=64),
    "mobilevit": _vision("MobileViTForImageClassification", "MobileViTConfig", image_size=64, hidden_sizes=[32, 48, 64],
                         neck_hidden_sizes=[8, 16, 24, 32, 48, 64, 96], num_attention_heads=4, side=64),
    "segformer": _vision("SegformerForSemanticSegmentation", "SegformerConfig", PYRAMID, side=64),
    "glpn": _vision("GLPNForDepthEstimation", "GLPNConfig", PYRAMID, side=64),
    "pvt": _vision("PvtForImageClassification", "PvtConfig", image_size=64, hidden_sizes=[16, 32, 48, 64],
                   depths=[1, 1, 1, 1], num_attention_heads=[1, 2, 4, 4], side=64),
    "upernet": Entry("UperNetForSemanticSegmentation", _upernet, _image(64)),
    "detr": Entry("DetrForObjectDetection", _detr, _image(64), ("logits", "pred_boxes")),
    "yolos": Entry("YolosForObjectDetection", _config("YolosConfig", PATCHES, image_size=[32, 32],
                   num_detection_tokens=6), _image(), ("logits", "pred_boxes")),
    "dpt": _vision("DPTForDepthEstimation", "DPTConfig", PATCHES, num_hidden_layers=4,
                   backbone_out_indices=[0, 1, 2, 3], fusion_hidden_size=32, neck_hidden_sizes=[16, 24, 32, 48]),
    # Images and text
    "clip": Entry("CLIPModel", _two_towers("CLIPConfig", projection_dim=48), _image_and_text,
                  ("logits_per_image", "logits_per_text")),
    "siglip": Entry("SiglipModel", _two_towers("SiglipConfig", {"projection_size": 64}),
                    lambda batch: {key: value for key, value in _image_and_text(batch).items() if "mask" not in key},
                    ("logits_per_image", "logits_per_text")),
    "blip": Entry("BlipForImageTextRetrieval", _two_towers("BlipConfig", {"encoder_hidden_size": 64},
                  projection_dim=48, image_text_hidden_size=32), _image_and_text, ("itm_score",)),
    "vilt": Entry("ViltForQuestionAnswering", _config("ViltConfig", TEXT, PATCHES, num_labels=7), _image_and_text),
    "llava": Entry("LlavaForConditionalGeneration", _llava, _image_in_text, ("logits",), generates=True),
    # Speech
    "wav2vec2": Entry("Wav2Vec2ForCTC", _config("Wav2Vec2Config", SPEECH), _wave),
    "hubert": Entry("HubertForCTC", _config("HubertConfig", SPEECH), _wave),
    "wavlm": Entry("WavLMForCTC", _config("WavLMConfig", SPEECH, num_buckets=16), _wave),
    "whisper": Entry("WhisperForConditionalGeneration", _config(
        "WhisperConfig", PAIR, max_source_positions=30, max_target_positions=64, num_mel_bins=16,
        begin_suppress_tokens=None), _speech, SEQ2SEQ, generates=True),
    "audio_spectrogram": Entry("ASTForAudioClassification", _config(
        "ASTConfig", BASE, patch_size=8, frequency_stride=8, time_stride=8, max_length=32, num_mel_bins=16),
        lambda batch: {"input_values": torch.randn(batch, 32, 16)}),
    # Text: encoders
    "bert": _encoder("BertForSequenceClassification", "BertConfig"),
    "roberta": _encoder("RobertaForMaskedLM", "RobertaConfig"),
    "distilbert": _encoder("DistilBertForSequenceClassification", "DistilBertConfig", dim=64, hidden_dim=256, n_heads=4,
                           n_layers=3),
    "albert": _encoder("AlbertForSequenceClassification", "AlbertConfig", embedding_size=32),
    "electra": _encoder("ElectraForSequenceClassification", "ElectraConfig", embedding_size=32),
    "deberta_v2": _encoder("DebertaV2ForSequenceClassification", "DebertaV2Config", relative_attention=True,
                           position_buckets=16, pos_att_type=["c2p", "p2c"], share_att_key=True,
                           norm_rel_ebd="layer_norm", type_vocab_size=0),
    "mobilebert": _encoder("MobileBertForSequenceClassification", "MobileBertConfig", embedding_size=32,
                           intra_bottleneck_size=32, true_hidden_size=32),
    "xlnet": Entry("XLNetForSequenceClassification", _config(
        "XLNetConfig", vocab_size=WORDS, d_model=64, n_layer=3, n_head=4, d_inner=256, **SPECIAL), text, ("logits",)),
    "funnel": Entry("FunnelForSequenceClassification", _config(
        "FunnelConfig", vocab_size=WORDS, d_model=64, n_head=4, d_head=16, d_inner=256, block_sizes=[1, 1],
        num_decoder_layers=1), text),
    "squeezebert": _encoder("SqueezeBertForSequenceClassification", "SqueezeBertConfig", embedding_size=64),
    "modernbert": _encoder("ModernBertForSequenceClassification", "ModernBertConfig", SPECIAL, local_attention=8,
                           cls_token_id=1, sep_token_id=2),
    "perceiver": Entry("PerceiverForSequenceClassification", _config(
        "PerceiverConfig", vocab_size=WORDS, max_position_embeddings=64, num_latents=8, d_latents=64, d_model=48,
        num_blocks=1, num_self_attends_per_block=2, num_self_attention_heads=4, num_cross_attention_heads=4,
        qk_channels=64, v_channels=64), lambda batch: {"inputs": text(batch)["input_ids"]}),
    # Text: encoders with decoders
    "t5": _translator("T5ForConditionalGeneration", "T5Config", vocab_size=WORDS, d_model=64, d_kv=16, d_ff=256,
                      num_layers=2, num_heads=4, decoder_start_token_id=0),
    "bart": _translator("BartForConditionalGeneration", "BartConfig"),
    "mbart": _translator("MBartForConditionalGeneration", "MBartConfig"),
    "marian": _translator("MarianMTModel", "MarianConfig"),
    "pegasus": _translator("PegasusForConditionalGeneration", "PegasusConfig"),
    # Text: decoders
    "gpt2": _decoder("GPT2LMHeadModel", "GPT2Config", N),
    "gpt_bigcode": _decoder("GPTBigCodeForCausalLM", "GPTBigCodeConfig", N),
    "gpt_neox": _decoder("GPTNeoXForCausalLM", "GPTNeoXConfig"),
    "gptj": _decoder("GPTJForCausalLM", "GPTJConfig", N, rotary_dim=8),
    "opt": _decoder("OPTForCausalLM", "OPTConfig", DECODER, ffn_dim=256, word_embed_proj_dim=64),
    "bloom": _decoder("BloomForCausalLM", "BloomConfig", hidden_size=64, n_layer=3, n_head=4, vocab_size=WORDS,
                      **SPECIAL),
    "falcon": _decoder("FalconForCausalLM", "FalconConfig"),
    "falcon_grouped": _decoder("FalconForCausalLM", "FalconConfig", DECODER, new_decoder_architecture=True,
                               num_kv_heads=2),
    "llama": _decoder("LlamaForCausalLM", "LlamaConfig", GROUPED),
    "mistral": _decoder("MistralForCausalLM", "MistralConfig", GROUPED, sliding_window=8),
    "qwen2": _decoder("Qwen2ForCausalLM", "Qwen2Config", GROUPED),
    "qwen3": _decoder("Qwen3ForCausalLM", "Qwen3Config", GROUPED),
    "gemma": _decoder("GemmaForCausalLM", "GemmaConfig", GROUPED),
    "gemma2": _decoder("Gemma2ForCausalLM", "Gemma2Config", GROUPED, sliding_window=8, query_pre_attn_scalar=16),
    "gemma3": _decoder("Gemma3ForCausalLM", "Gemma3TextConfig", GROUPED, sliding_window=8, query_pre_attn_scalar=16),
    "phi": _decoder("PhiForCausalLM", "PhiConfig", DECODER, partial_rotary_factor=0.5),
    "phi3": _decoder("Phi3ForCausalLM", "Phi3Config", GROUPED),
    "stablelm": _decoder("StableLmForCausalLM", "StableLmConfig", GROUPED),
    "granite": _decoder("GraniteForCausalLM", "GraniteConfig", GROUPED),
    "olmo2": _decoder("Olmo2ForCausalLM", "Olmo2Config", GROUPED),
    "cohere": _decoder("CohereForCausalLM", "CohereConfig", GROUPED),
    "smollm3": _decoder("SmolLM3ForCausalLM", "SmolLM3Config", GROUPED),
    "glm4": _decoder("Glm4ForCausalLM", "Glm4Config", GROUPED),
    # Mixtures of experts
    "mixtral": _decoder("MixtralForCausalLM", "MixtralConfig", EXPERTS, num_local_experts=8, intermediate_size=64),
    "qwen2_moe": _decoder("Qwen2MoeForCausalLM", "Qwen2MoeConfig", EXPERTS, num_experts=8,
                          shared_expert_intermediate_size=128),
    "qwen3_moe": _decoder("Qwen3MoeForCausalLM", "Qwen3MoeConfig", EXPERTS, num_experts=8),
    "deepseek_v2": _decoder("DeepseekV2ForCausalLM", "DeepseekV2Config", EXPERTS, LATENT),
    "deepseek_v3": _decoder("DeepseekV3ForCausalLM", "DeepseekV3Config", EXPERTS, LATENT, n_group=2, topk_group=1),
    "olmoe": _decoder("OlmoeForCausalLM", "OlmoeConfig", EXPERTS, num_experts=8, intermediate_size=64),
    "granitemoe": _decoder("GraniteMoeForCausalLM", "GraniteMoeConfig", EXPERTS, num_local_experts=8,
                           intermediate_size=64),
    "gpt_oss": _decoder("GptOssForCausalLM", "GptOssConfig", EXPERTS, num_local_experts=8, sliding_window=8,
                        intermediate_size=64),
    # State spaces
    "mamba": _decoder("MambaForCausalLM", "MambaConfig", vocab_size=WORDS, hidden_size=64, num_hidden_layers=3,
                      state_size=4, **SPECIAL),
    "mamba2": _decoder("Mamba2ForCausalLM", "Mamba2Config", vocab_size=WORDS, hidden_size=64, num_hidden_layers=2,
                       state_size=8, num_heads=8, head_dim=16, n_groups=2, chunk_size=4, **SPECIAL),
}  # fmt: skip
