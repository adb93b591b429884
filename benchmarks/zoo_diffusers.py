"""diffusers: networks of image generation in tiny configurations with random weights, called with named inputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import diffusers
import torch
from torch import Tensor
from zoo_cases import Case

SIZE = "16"
SIDE, WORDS = 16, 6


@dataclass(frozen=True)
class Entry:
    """The class of a model in diffusers, its settings, and named inputs of as many samples as asked for."""

    model: str
    settings: dict[str, Any]
    inputs: Callable[[int], dict[str, Any]]


def names() -> list[str]:
    """The networks of the matrix."""
    return list(ENTRIES)


def knows(name: str) -> bool:
    """Whether it has a row in the matrix."""
    return name in ENTRIES


def build(name: str, side: int | None) -> Case:
    """A model with random weights; its latents are of 16 or 32 pixels, whatever `side` says."""
    entry = ENTRIES[name]
    return Case(getattr(diffusers, entry.model)(**entry.settings).eval(), entry.inputs)


def _noisy(channels: int, **more: Callable[[int], Any]) -> Callable[[int], dict[str, Any]]:
    """Latents at a time step, and what else a network is told, by name."""
    return partial(_told, "sample", channels, more)


def _hidden(channels: int, **more: Callable[[int], Any]) -> Callable[[int], dict[str, Any]]:
    return partial(_told, "hidden_states", channels, more)


def _told(first: str, channels: int, more: dict[str, Callable[[int], Any]], batch: int) -> dict[str, Any]:
    others = {name: make(batch) for name, make in more.items()}
    return {first: torch.randn(batch, channels, SIDE, SIDE), "timestep": torch.randint(1, 900, (batch,)), **others}


def _words(width: int) -> Callable[[int], Tensor]:
    return lambda batch: torch.randn(batch, WORDS, width)


def _image(batch: int) -> dict[str, Tensor]:
    return {"sample": torch.randn(batch, 3, 32, 32)}


def _flux(batch: int) -> dict[str, Tensor]:
    return {
        "hidden_states": torch.randn(batch, 16, 4),
        "encoder_hidden_states": torch.randn(batch, WORDS, 32),
        "pooled_projections": torch.randn(batch, 24),
        "timestep": torch.rand(batch),
        "img_ids": torch.randint(0, 4, (16, 3)).float(),
        "txt_ids": torch.zeros(WORDS, 3),
    }


BLOCKS = {"block_out_channels": (32, 64), "layers_per_block": 1, "norm_num_groups": 8}
PLAIN = {"sample_size": SIDE, "in_channels": 4, "out_channels": 4, **BLOCKS}
CROSS = {
    "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
    "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
    "cross_attention_dim": 24,
    "attention_head_dim": 8,
}
LATENT = {"sample_size": SIDE, "patch_size": 2, "in_channels": 4, "num_layers": 2, "attention_head_dim": 16,
          "num_attention_heads": 4}  # fmt: skip
CODES = {
    "down_block_types": ("DownEncoderBlock2D",) * 2,
    "up_block_types": ("UpDecoderBlock2D",) * 2,
    "latent_channels": 4,
    **BLOCKS,
}
ENTRIES = {
    "unet2d": Entry("UNet2DModel", {**PLAIN, "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
                    "up_block_types": ("AttnUpBlock2D", "UpBlock2D"), "attention_head_dim": 8}, _noisy(4)),
    "unet2d_scale_shift": Entry("UNet2DModel", {**PLAIN, "down_block_types": ("ResnetDownsampleBlock2D", "DownBlock2D"),
                                "up_block_types": ("UpBlock2D", "ResnetUpsampleBlock2D"), "attention_head_dim": 8,
                                "resnet_time_scale_shift": "scale_shift"}, _noisy(4)),
    "unet2d_condition": Entry("UNet2DConditionModel", {**PLAIN, **CROSS},
                              _noisy(4, encoder_hidden_states=_words(24))),
    "unet2d_condition_linear": Entry("UNet2DConditionModel", {**PLAIN, **CROSS, "use_linear_projection": True,
                                     "attention_head_dim": (4, 8)}, _noisy(4, encoder_hidden_states=_words(24))),
    "controlnet": Entry("ControlNetModel", {"in_channels": 4, **BLOCKS, **{
        key: value for key, value in CROSS.items() if key != "up_block_types"},
        "conditioning_embedding_out_channels": (8, 16)}, _noisy(
            4, encoder_hidden_states=_words(24), controlnet_cond=lambda batch: torch.randn(batch, 3, 32, 32))),
    "autoencoder_kl": Entry("AutoencoderKL", CODES, _image),
    "autoencoder_tiny": Entry("AutoencoderTiny", {"encoder_block_out_channels": (32, 32), "num_encoder_blocks": (1, 2),
                              "decoder_block_out_channels": (32, 32), "num_decoder_blocks": (2, 1)}, _image),
    "vq": Entry("VQModel", {**CODES, "num_vq_embeddings": 32}, _image),
    "dit": Entry("DiTTransformer2DModel", {**LATENT, "out_channels": 8, "num_embeds_ada_norm": 1000},
                 _hidden(4, class_labels=lambda batch: torch.randint(0, 9, (batch,)))),
    "pixart": Entry("PixArtTransformer2DModel", {**LATENT, "out_channels": 8, "cross_attention_dim": 64,
                    "caption_channels": 24, "use_additional_conditions": False},
                    _hidden(4, encoder_hidden_states=_words(24))),
    "sd3": Entry("SD3Transformer2DModel", {**LATENT, "joint_attention_dim": 32, "caption_projection_dim": 64,
                 "pooled_projection_dim": 24, "out_channels": 4},
                 _hidden(4, encoder_hidden_states=_words(32), pooled_projections=lambda n: torch.randn(n, 24))),
    "flux": Entry("FluxTransformer2DModel", {"in_channels": 4, "num_layers": 1, "num_single_layers": 2,
                  "attention_head_dim": 16, "num_attention_heads": 4, "joint_attention_dim": 32,
                  "pooled_projection_dim": 24, "axes_dims_rope": (4, 4, 8)}, _flux),
    "sana": Entry("SanaTransformer2DModel", {"in_channels": 4, "out_channels": 4, "num_attention_heads": 4,
                  "attention_head_dim": 16, "num_layers": 2, "num_cross_attention_heads": 4,
                  "cross_attention_head_dim": 16, "cross_attention_dim": 64, "caption_channels": 24,
                  "sample_size": SIDE, "patch_size": 1}, _hidden(4, encoder_hidden_states=_words(24))),
}  # fmt: skip
