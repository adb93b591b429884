"""torchvision: every classifier, segmentation, detection, video and optical flow model, as its constructor makes it."""

from __future__ import annotations

from typing import Any

import torch
import torchvision
from torch import Tensor
from torchvision.models import detection, optical_flow, segmentation, video
from zoo_cases import Case, images

SIDES = {"inception_v3": 299, "efficientnet_v2_s": 384, "efficientnet_v2_m": 480, "efficientnet_v2_l": 480} | {
    f"efficientnet_b{i}": size for i, size in enumerate((224, 240, 288, 300, 380, 456, 528, 600))
}
SIZE = "the model's own; 224 for those other than classifiers that take any, 128 for optical flow"
FLOORS = {"inception_v3": 96, "maxvit_t": 224}
"""The smallest image, where that is more than 64."""
FRAMES = {"mvit_v1_b": 16, "mvit_v2_s": 16, "s3d": 16}
"""Clips whose size is fixed, with their length; others take any, and get 8 frames."""
DETECTION_SIDES = {"ssd300_vgg16": 300, "ssdlite320_mobilenet_v3_large": 320}
FEW: dict[str, Any] = {"score_thresh": 0.0, "detections_per_img": 10, "topk_candidates": 20}
FEW_OF_TWO_STAGES: dict[str, Any] = {
    "rpn_post_nms_top_n_train": 20,
    "rpn_post_nms_top_n_test": 20,
    "box_score_thresh": 0.0,
    "box_detections_per_img": 10,
    "box_batch_size_per_image": 16,
}
"""Random weights are sure of nothing: without a threshold their boxes reach the heads, and there need not be many."""


def names() -> list[str]:
    """Every model of torchvision but the quantized ones."""
    zoos = (torchvision.models, segmentation, detection, video, optical_flow)
    return [name for zoo in zoos for name in torchvision.models.list_models(module=zoo)]


def knows(name: str) -> bool:
    """Whether it has a row in the matrix."""
    return name in names()


def build(name: str, side: int | None) -> Case:
    """A model with random weights, and its inputs."""
    for zoo, family in FAMILIES.items():
        if name in torchvision.models.list_models(module=zoo):
            return family(name, side)
    return _classifier(name, side)


def _classifier(name: str, side: int | None) -> Case:
    usual = SIDES.get(name, 224)
    side = usual if side is None else max(side, FLOORS.get(name, 64))
    options: dict[str, Any] = {"init_weights": False} if name in ("googlenet", "inception_v3") else {}
    if name.startswith("vit_"):
        patch = int(name.rpartition("_")[2])
        options["image_size"] = side = side // patch * patch
    return Case(torchvision.models.get_model(name, weights=None, **options), images(side))


def _segmentation(name: str, side: int | None) -> Case:
    auxiliary = {} if name.startswith("lraspp") else {"aux_loss": True}
    return Case(
        torchvision.models.get_model(name, weights=None, weights_backbone=None, **auxiliary), images(side or 224)
    )


def _detection(name: str, side: int | None) -> Case:
    options = dict(FEW_OF_TWO_STAGES if "rcnn" in name else FEW)
    if name not in DETECTION_SIDES:
        side = side or 224
        options |= {"min_size": side, "max_size": side}
    model = torchvision.models.get_model(name, weights=None, weights_backbone=None, **options)
    size = DETECTION_SIDES.get(name, side or 224)

    def inputs(batch: int) -> tuple[Any, ...]:
        return [torch.rand(3, size, size) for _ in range(batch)], [_target(name, size) for _ in range(batch)]

    return Case(model, inputs)


def _target(name: str, size: int) -> dict[str, Tensor]:
    """Two objects in an image; eval mode does not look at them."""
    boxes = torch.tensor([[0.1, 0.2, 0.6, 0.7], [0.3, 0.1, 0.9, 0.5]]) * size
    target = {"boxes": boxes, "labels": torch.tensor([1, 1])}
    if name.startswith("mask"):
        target["masks"] = (torch.rand(2, size, size) > 0.5).to(torch.uint8)
    if name.startswith("keypoint"):
        corners, extent = boxes[:, None, :2], boxes[:, None, 2:] - boxes[:, None, :2]
        target["keypoints"] = torch.cat([corners + torch.rand(2, 17, 2) * extent, torch.ones(2, 17, 1)], 2)
    return target


def _video(name: str, side: int | None) -> Case:
    frames = FRAMES.get(name, 8)
    size = 224 if name in FRAMES or side is None else side
    model = torchvision.models.get_model(name, weights=None)
    return Case(model, lambda batch: (torch.randn(batch, 3, frames, size, size),))


def _flow(name: str, side: int | None) -> Case:
    size, updates = max(side or 128, 128), 2

    def inputs(batch: int) -> tuple[Any, ...]:
        return torch.randn(batch, 3, size, size), torch.randn(batch, 3, size, size), updates

    return Case(torchvision.models.get_model(name, weights=None), inputs)


FAMILIES = {segmentation: _segmentation, detection: _detection, video: _video, optical_flow: _flow}
