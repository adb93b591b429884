"""Outputs of ultralytics' heads: what is read of them, and what the heads keep between two calls."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

FEATURES = "feats"
KEPT = ("shape", "shapes", "anchors", "strides", "valid_mask")
"""Attributes of heads that follow from the image size, and are computed again where it changes."""


def predictions(output: Any) -> Any:
    """Return what is read of a model's output: all but the feature maps that its head passes on.

    Users read the decoded predictions, and losses the raw ones, in the train mode alone or beside the decoded ones. Of
    the feature maps, losses read the heights and widths only, so their channels may be pruned.
    """
    if isinstance(output, Mapping):
        return {key: predictions(value) for key, value in output.items() if key != FEATURES}
    return [predictions(value) for value in output] if isinstance(output, (tuple, list)) else output


def training_examples(model: Any, images: Tensor) -> tuple[dict[str, Any], ...]:
    """Return examples of what training calls a model with, where it runs parts that no prediction does.

    Decoders of RT-DETR learn to denoise true boxes, whose classes they embed.

    Args:
        model: of ultralytics.
        images: (B, C, H, W), at least two.
    """
    if not hasattr(model.model[-1], "denoising_class_embed"):
        return ()
    targets = {
        "cls": torch.tensor([0, min(1, model.model[-1].nc - 1)], device=images.device),
        "bboxes": torch.tensor([[0.5, 0.5, 0.4, 0.4], [0.3, 0.3, 0.2, 0.2]], device=images.device),
        "batch_idx": torch.tensor([0, 1], device=images.device),
        "gt_groups": [1, 1],
    }
    return ({"x": images[:2], "batch": targets},)


def forget_image_size(model: nn.Module) -> None:
    """Make the heads of a model compute their anchors and strides for the next image again.

    The shape of the feature maps that they were computed for has the channels of the dense model.
    """
    for module in model.modules():
        if any(hasattr(type(module), name) for name in ("anchors", "valid_mask")):
            for name in KEPT:
                module.__dict__.pop(name, None)
