"""Popular packages of networks: vit-pytorch, segmentation-models-pytorch, MONAI, x-transformers, torchaudio and others.

Tiny configurations with random weights, called as the packages' own pages call them. A package that is not installed is
named in the row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import nn
from zoo_cases import Networks

SIZE = "their own"

Inputs = Callable[[int], tuple[Any, ...]]
Entry = tuple[Callable[[], nn.Module], Inputs]


def randn(*shape: int) -> Inputs:
    """One argument of that shape for each sample."""
    return lambda batch: (torch.randn(batch, *shape),)


def words(length: int = 12) -> Inputs:
    """Numbers of words."""
    return lambda batch: (torch.randint(50, (batch, length)),)


def timed(*shape: int) -> Inputs:
    """Something noisy, and a time step of each sample."""
    return lambda batch: (torch.randn(batch, *shape), torch.randint(10, (batch,)))


def lengths(length: int, width: int, counted: int) -> Inputs:
    """Sequences, and how long each is."""
    return lambda batch: (torch.randn(batch, length, width), torch.full((batch,), counted))


def _make(module: str, kind: str, settings: dict[str, Any]) -> nn.Module:
    """A class, or a function that makes a model, called with its settings."""
    found = import_module(module)
    for part in kind.split("."):
        found = getattr(found, part)
    model: nn.Module = found(**settings)  # type: ignore[operator]
    return model


def _entry(module: str, kind: str, inputs: Inputs, **settings: Any) -> Entry:
    return partial(_make, module, kind, settings), inputs


PLAIN: dict[str, Any] = {
    "image_size": 64, "patch_size": 16, "num_classes": 10, "dim": 64, "depth": 2, "heads": 4, "mlp_dim": 128,
}  # fmt: skip
VIDEO = {**PLAIN, "frames": 8, "image_patch_size": 16, "frame_patch_size": 2}
VIDEO.pop("patch_size")
SEQUENCE = {**PLAIN, "seq_len": 64}
SEQUENCE.pop("image_size")
STAGED = {"num_classes": 10, "dim": (16, 32, 48, 64), "depth": (1, 1, 1, 1)}
CONVOLVED = {
    "embedding_dim": 64, "n_conv_layers": 2, "kernel_size": 7, "stride": 2, "padding": 3, "pooling_kernel_size": 3,
    "pooling_stride": 2, "pooling_padding": 1, "num_layers": 2, "num_heads": 4, "mlp_ratio": 2.0, "num_classes": 10,
    "positional_embedding": "learnable",
}  # fmt: skip
WINDOWED = {
    "num_classes": 10, "dim_conv_stem": 16, "dim": 32, "dim_head": 16, "depth": (1, 1), "window_size": 7,
    "mbconv_expansion_rate": 2, "mbconv_shrinkage_rate": 0.25,
}  # fmt: skip
CROSSED = {
    "image_size": 64, "num_classes": 10, "depth": 1, "cross_attn_depth": 1, "cross_attn_heads": 4,
    "sm_dim": 48, "sm_patch_size": 8, "sm_enc_depth": 1, "sm_enc_heads": 4, "sm_enc_mlp_dim": 96,
    "lg_dim": 64, "lg_patch_size": 16, "lg_enc_depth": 1, "lg_enc_heads": 4, "lg_enc_mlp_dim": 96,
}  # fmt: skip
GLOBAL = {
    f"s{i}_{name}": value
    for i, dim in enumerate((16, 32, 48, 64), 1)
    for name, value in (
        ("emb_dim", dim), ("patch_size", 4 if i == 1 else 2), ("local_patch_size", 7), ("global_k", 7), ("depth", 1),
    )
}  # fmt: skip
CVT = {
    f"s{i}_{name}": value
    for i, (dim, heads) in enumerate(((32, 1), (48, 3), (64, 4)), 1)
    for name, value in (
        ("emb_dim", dim), ("emb_kernel", 7 if i == 1 else 3), ("emb_stride", 4 if i == 1 else 2), ("proj_kernel", 3),
        ("kv_proj_stride", 2), ("heads", heads), ("depth", 1), ("mlp_mult", 2),
    )
}  # fmt: skip


def _vit(module: str, kind: str = "ViT", inputs: Inputs | None = None, **settings: Any) -> Entry:
    return _entry(f"vit_pytorch.{module}", kind, inputs or randn(3, 64, 64), **settings)


def _vits() -> Iterator[tuple[str, Entry]]:
    """Those of vit-pytorch: by the module, as most have the same class."""
    plain = "vit vit_for_small_dataset learnable_memory_vit vit_5 vit_with_decorr vit_with_keel_post_ln"
    simple = (
        "simple_vit simple_vit_with_patch_dropout simple_vit_with_register_tokens simple_vit_with_qk_norm "
        "simple_vit_with_value_residual"
    )
    yield from ((name, _vit(name, **PLAIN)) for name in plain.split())
    yield from ((name, _vit(name, "SimpleViT", **PLAIN)) for name in simple.split())
    large, video, sequence = randn(3, 224, 224), randn(3, 8, 64, 64), randn(3, 64)
    yield "deepvit", _vit("deepvit", "DeepViT", **PLAIN)
    yield "rvt", _vit("rvt", "RvT", **PLAIN)
    yield "cait", _vit("cait", "CaiT", cls_depth=1, **PLAIN)
    yield "xcit", _vit("xcit", "XCiT", cls_depth=1, local_patch_kernel_size=3, **PLAIN)
    yield "parallel_vit", _vit("parallel_vit", num_parallel_branches=2, **PLAIN)
    yield "ats_vit", _vit("ats_vit", max_tokens_per_depth=(8, 4), **PLAIN)
    yield "vit_with_patch_merger", _vit("vit_with_patch_merger", patch_merge_layer=1, patch_merge_num_tokens=4, **PLAIN)
    yield "vit_with_patch_dropout", _vit("vit_with_patch_dropout", patch_dropout=0.1, **PLAIN)
    yield "jumbo_vit", _vit("jumbo_vit", "JumboViT", num_jumbo_cls=1, jumbo_cls_k=3, jumbo_ff_mult=2, **PLAIN)
    yield "simple_vit_with_fft", _vit("simple_vit_with_fft", "SimpleViT", freq_patch_size=16, **PLAIN)
    yield (
        "simple_vit_with_hyper_connections",
        _vit("simple_vit_with_hyper_connections", "SimpleViT", num_residual_streams=2, **PLAIN),
    )
    yield "simple_uvit", _vit("simple_uvit", "SimpleUViT", num_register_tokens=2, **PLAIN)
    yield "normalized_vit", _vit("normalized_vit", "nViT", **PLAIN)
    tokens = ((7, 4), (3, 2), (3, 2))
    t2t = {key: value for key, value in PLAIN.items() if key != "patch_size"}
    yield "t2t", _vit("t2t", "T2TViT", t2t_layers=tokens, **t2t)
    yield "cct", _vit("cct", "CCT", img_size=(64, 64), **CONVOLVED)
    yield "cross_vit", _vit("cross_vit", "CrossViT", **CROSSED)
    yield "pit", _vit("pit", "PiT", **{**PLAIN, "patch_size": 8, "depth": (1, 1)})
    levit = {"image_size": 64, "num_classes": 10, "stages": 2, "dim": (32, 64), "depth": 1, "heads": (2, 4)}
    yield "levit", _vit("levit", "LeViT", mlp_mult=2, **levit)
    yield "cvt", _vit("cvt", "CvT", num_classes=10, **CVT)
    yield "twins_svt", _vit("twins_svt", "TwinsSVT", large, num_classes=10, **GLOBAL)
    yield "regionvit", _vit("regionvit", "RegionViT", large, window_size=7, **STAGED)
    sep = {"dim": 16, "dim_head": 16, "heads": (1, 2, 4, 8), "depth": (1, 1, 1, 1)}
    yield "sep_vit", _vit("sep_vit", "SepViT", large, num_classes=10, window_size=7, **sep)
    yield "max_vit", _vit("max_vit", "MaxViT", large, **WINDOWED)
    yield "max_vit_with_registers", _vit("max_vit_with_registers", "MaxViT", large, **WINDOWED)
    nest = {"image_size": 64, "patch_size": 4, "dim": 32, "heads": 2, "num_hierarchies": 3, "block_repeats": (1, 1, 1)}
    yield "nest", _vit("nest", "NesT", num_classes=10, **nest)
    widths = [16, 16, 24, 24, 32, 32, 48, 48, 64, 64, 96]
    mobile = {"image_size": (256, 256), "dims": [32, 48, 64], "channels": widths, "num_classes": 10}
    yield "mobile_vit", _vit("mobile_vit", "MobileViT", randn(3, 256, 256), **mobile)
    yield "vit_1d", _vit("vit_1d", inputs=sequence, **SEQUENCE)
    yield "simple_vit_1d", _vit("simple_vit_1d", "SimpleViT", sequence, **SEQUENCE)
    yield "vit_3d", _vit("vit_3d", inputs=video, **VIDEO)
    yield "simple_vit_3d", _vit("simple_vit_3d", "SimpleViT", video, **VIDEO)
    yield (
        "cct_3d",
        _vit(
            "cct_3d", "CCT", video, img_size=64, num_frames=8, frame_kernel_size=3, **{**CONVOLVED, "embedding_dim": 48}
        ),
    )
    grid = {"ndim": 3, "input_shape": (8, 64, 64), "patch_size": (2, 16, 16), "num_classes": 10, "channels": 3}
    sizes = {"dim": 64, "depth": 2, "heads": 4, "mlp_dim": 128}
    yield "vit_nd", _vit("vit_nd", "ViTND", video, **grid, **sizes)
    yield "vit_nd_rotary", _vit("vit_nd_rotary", "ViTND", video, dim_head=24, **grid, **sizes)


DECODERS = "Unet UnetPlusPlus MAnet Linknet FPN PSPNet DeepLabV3 DeepLabV3Plus UPerNet Segformer"
ENCODERS = (
    "mobilenet_v2 efficientnet-b0 densenet121 resnext50_32x4d vgg11_bn timm-regnetx_002 mit_b0 se_resnet50 dpn68 "
    "inceptionv4 xception mobileone_s0"
)


def _segmenters() -> Iterator[tuple[str, Entry]]:
    """Those of segmentation-models-pytorch: each decoder on a ResNet, each kind of encoder below a U-Net."""
    pairs = [*((one, "resnet18") for one in DECODERS.split()), *(("Unet", one) for one in ENCODERS.split())]
    for decoder, encoder in pairs:
        settings = {"encoder_name": encoder, "encoder_weights": None, "classes": 3}
        yield f"{decoder} {encoder}", _entry("segmentation_models_pytorch", decoder, randn(3, 64, 64), **settings)


TWO: dict[str, Any] = {"spatial_dims": 2, "in_channels": 1, "out_channels": 2}
THREE: dict[str, Any] = {**TWO, "spatial_dims": 3}
LATENT: dict[str, Any] = {"spatial_dims": 2, "in_channels": 1, "out_channels": 1, "channels": (16, 32)}


def _medical() -> Iterator[tuple[str, Entry]]:
    """Those of MONAI, for pictures and for volumes."""
    flat, small, volume = randn(1, 64, 64), randn(1, 32, 32), randn(1, 32, 32, 32)
    nets = "monai.networks.nets"
    steps = {"channels": (8, 16, 32), "strides": (2, 2)}
    yield "UNet", _entry(nets, "UNet", flat, num_res_units=1, **TWO, **steps)
    yield "UNet 3d", _entry(nets, "UNet", volume, num_res_units=2, **THREE, **steps)
    yield "BasicUNet", _entry(nets, "BasicUNet", flat, features=(16, 16, 32, 32, 64, 16), **TWO)
    yield "BasicUNetPlusPlus", _entry(nets, "BasicUNetPlusPlus", flat, features=(16, 16, 32, 32, 64, 16), **TWO)
    yield "AttentionUnet", _entry(nets, "AttentionUnet", flat, **TWO, **steps)
    unetr = {"in_channels": 1, "out_channels": 2, "img_size": (32, 32, 32), "feature_size": 8}
    yield "UNETR", _entry(nets, "UNETR", volume, hidden_size=48, mlp_dim=96, num_heads=4, **unetr)
    yield "SwinUNETR", _entry(nets, "SwinUNETR", flat, feature_size=12, **TWO)
    yield "SegResNet", _entry(nets, "SegResNet", flat, init_filters=8, **TWO)
    yield "SegResNetDS", _entry(nets, "SegResNetDS", flat, init_filters=8, **TWO)
    yield "SegResNetVAE", _entry(nets, "SegResNetVAE", small, input_image_size=(32, 32), init_filters=8, **TWO)
    kernels = {"kernel_size": (3, 3, 3), "strides": (1, 2, 2), "upsample_kernel_size": (2, 2), "filters": (8, 16, 32)}
    yield "DynUNet", _entry(nets, "DynUNet", flat, **TWO, **kernels)
    yield "VNet", _entry(nets, "VNet", flat, **TWO)
    yield "HighResNet", _entry(nets, "HighResNet", small, **TWO)
    yield "DenseNet121", _entry(nets, "DenseNet121", flat, **{**TWO, "out_channels": 3})
    yield "SEResNet50", _entry(nets, "SEResNet50", randn(3, 64, 64), spatial_dims=2, in_channels=3, num_classes=3)
    mobile = {"model_name": "efficientnet-b0", "spatial_dims": 2, "in_channels": 1, "num_classes": 3}
    yield "EfficientNetBN", _entry(nets, "EfficientNetBN", flat, pretrained=False, **mobile)
    yield "resnet18 3d", _entry(nets, "resnet18", volume, spatial_dims=3, n_input_channels=1, num_classes=2)
    vit = {"in_channels": 1, "img_size": (32, 32), "patch_size": (8, 8), "hidden_size": 48, "mlp_dim": 96}
    more = {"num_layers": 2, "num_heads": 4, "classification": True, "spatial_dims": 2, "num_classes": 3}
    yield "ViT", _entry(nets, "ViT", small, **vit, **more)
    yield "AutoEncoder", _entry(nets, "AutoEncoder", small, strides=(2, 2), **{**LATENT, "channels": (8, 16)})
    shapes = {"in_shape": (1, 32, 32), "classes": 3, "channels": (8, 16), "strides": (2, 2)}
    yield "Classifier", _entry(nets, "Classifier", small, **shapes)
    flexible = {"in_channels": 1, "out_channels": 2, "backbone": "efficientnet-b0", "spatial_dims": 2}
    yield "FlexibleUNet", _entry(nets, "FlexibleUNet", flat, pretrained=False, **flexible)
    yield "MedNeXt", _entry(nets, "MedNeXt", flat, init_filters=8, **TWO)
    yield "AHNet", _entry(nets, "AHNet", flat, psp_block_num=0, **TWO)
    layers = {"attn_layers_dim": 32, "attn_layers_depth": 2, "attn_layers_heads": 4}
    yield (
        "DecoderOnlyTransformer",
        _entry(nets, "DecoderOnlyTransformer", words(), num_tokens=50, max_seq_len=16, **layers),
    )
    levels = {"num_res_blocks": 1, "norm_num_groups": 8}
    heads = {"attention_levels": (False, True), "num_head_channels": 16}
    yield "DiffusionModelUNet", _entry(nets, "DiffusionModelUNet", timed(1, 16, 16), **LATENT, **levels, **heads)
    plain = {"attention_levels": (False, False), "latent_channels": 3}
    yield "AutoencoderKL", _entry(nets, "AutoencoderKL", randn(1, 16, 16), **LATENT, **levels, **plain)
    parts = {"num_res_channels": (16, 32), "num_res_layers": 1, "num_embeddings": 16, "embedding_dim": 8}
    sampling = {
        "downsample_parameters": ((2, 4, 1, 1), (2, 4, 1, 1)), "upsample_parameters": ((2, 4, 1, 1, 0),) * 2,
    }  # fmt: skip
    yield "VQVAE", _entry(nets, "VQVAE", randn(1, 16, 16), **LATENT, **parts, **sampling)


def _wrapped(wrapper: str, layers: str, settings: dict[str, Any], more: dict[str, Any]) -> nn.Module:
    package = import_module("x_transformers")
    own = getattr(package, layers)(dim=64, depth=2, heads=4, attn_dim_head=16, **more)
    model: nn.Module = getattr(package, wrapper)(attn_layers=own, **settings)
    return model


def _languages() -> Iterator[tuple[str, Entry]]:
    """Those of x-transformers: its wrappers with the parts that its page lists."""
    text = {"num_tokens": 50, "max_seq_len": 32}
    options: dict[str, dict[str, Any]] = {
        "decoder": {},
        "rotary": {"rotary_pos_emb": True, "ff_glu": True, "use_rmsnorm": True},
        "grouped heads": {"attn_kv_heads": 2},
        "ALiBi": {"alibi_pos_bias": True},
        "T5's bias": {"rel_pos_bias": True},
    }
    for name, more in options.items():
        yield f"x-transformers {name}", (partial(_wrapped, "TransformerWrapper", "Decoder", text, more), words())
    yield "x-transformers encoder", (partial(_wrapped, "TransformerWrapper", "Encoder", text, {}), words())
    vision = {"image_size": 32, "patch_size": 8, "num_classes": 5}
    yield "x-transformers ViT", (partial(_wrapped, "ViTransformerWrapper", "Encoder", vision, {}), randn(3, 32, 32))
    numbers = {"dim_in": 8, "dim_out": 4, "max_seq_len": 32}
    continuous = partial(_wrapped, "ContinuousTransformerWrapper", "Encoder", numbers, {})
    yield "x-transformers continuous", (continuous, randn(12, 8))


def _sounds() -> Iterator[tuple[str, Entry]]:
    """Those of torchaudio."""
    audio = "torchaudio.models"
    conformer = {"input_dim": 32, "num_heads": 4, "ffn_dim": 64, "num_layers": 2, "depthwise_conv_kernel_size": 15}
    yield "Conformer", _entry(audio, "Conformer", lengths(20, 32, 20), **conformer)
    emformer = {"input_dim": 32, "num_heads": 4, "ffn_dim": 64, "num_layers": 2, "segment_length": 4}
    yield "Emformer", _entry(audio, "Emformer", lengths(13, 32, 12), right_context_length=1, **emformer)
    yield "DeepSpeech", _entry(audio, "DeepSpeech", randn(1, 30, 20), n_feature=20, n_hidden=32, n_class=10)
    masks = {"msk_num_feats": 16, "msk_num_hidden_feats": 32, "msk_num_layers": 2, "msk_num_stacks": 1}
    tasnet = {"num_sources": 2, "enc_kernel_size": 16, "enc_num_feats": 32, **masks}
    yield "ConvTasNet", _entry(audio, "ConvTasNet", randn(1, 800), **tasnet)
    mfcc = {"num_classes": 10, "input_type": "mfcc", "num_features": 13}
    yield "Wav2Letter", _entry(audio, "Wav2Letter", randn(13, 100), **mfcc)
    yield "HDemucs", _entry(audio, "HDemucs", randn(2, 8000), sources=["drums", "voice"], channels=8)
    squim = {"feat_dim": 32, "win_len": 32, "d_model": 32, "nhead": 4, "hidden_dim": 32, "num_blocks": 1}
    yield "SquimObjective", _entry(audio, "squim_objective_model", randn(4000), rnn_type="LSTM", chunk_size=11, **squim)
    encoder = {
        "encoder_embed_dim": 48, "encoder_projection_dropout": 0.0, "encoder_pos_conv_kernel": 16,
        "encoder_pos_conv_groups": 4, "encoder_num_layers": 2, "encoder_num_heads": 4,
        "encoder_attention_dropout": 0.0, "encoder_ff_interm_features": 96, "encoder_ff_interm_dropout": 0.0,
        "encoder_dropout": 0.0, "encoder_layer_drop": 0.0,
    }  # fmt: skip
    layers = [(32, 10, 5), (32, 3, 2), (32, 3, 2)]
    for name, mode, first, out in (("wav2vec 2", "layer_norm", True, None), ("HuBERT", "group_norm", False, 10)):
        extractor = {"extractor_mode": mode, "extractor_conv_layer_config": layers, "extractor_conv_bias": first}
        more = {"encoder_layer_norm_first": first, "aux_num_out": out}
        yield name, _entry(audio, "wav2vec2_model", randn(4000), **extractor, **encoder, **more)


def _others() -> Iterator[tuple[str, Entry]]:
    """Those of packages with one network or two."""
    diffusion = "denoising_diffusion_pytorch"
    heads = {"attn_heads": 2, "attn_dim_head": 16, "flash_attn": False}
    yield "diffusion Unet", _entry(diffusion, "Unet", timed(3, 32, 32), dim=16, dim_mults=(1, 2), **heads)
    yield "diffusion Unet1D", _entry(diffusion, "Unet1D", timed(4, 32), dim=16, dim_mults=(1, 2), channels=4)
    yield (
        "EfficientNet",
        _entry(
            "efficientnet_pytorch",
            "EfficientNet.from_name",
            randn(3, 64, 64),
            model_name="efficientnet-b0",
            num_classes=5,
        ),
    )
    yield "InceptionResnetV1", _entry("facenet_pytorch", "InceptionResnetV1", randn(3, 160, 160))
    tabnet = {"input_dim": 10, "output_dim": 2, "n_d": 16, "n_a": 16, "n_steps": 2}
    yield (
        "TabNet",
        _entry("pytorch_tabnet.tab_network", "TabNet", randn(10), group_attention_matrix=torch.eye(10), **tabnet),
    )


ENTRIES: dict[str, Entry] = {
    name: entry for group in (_vits, _segmenters, _medical, _languages, _sounds, _others) for name, entry in group()
}
ZOO = Networks(ENTRIES)
names, knows, build = ZOO.names, ZOO.knows, ZOO.build
