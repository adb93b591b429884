"""Models of ultralytics with few layers, for each of its tasks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from ultralytics import YOLO

HEADS = {
    "detect": "Detect, [nc]",
    "segment": "Segment, [nc, 16, 32]",
    "pose": "Pose, [nc, [4, 2]]",
    "obb": "OBB, [nc, 1]",
}
BACKBONE = """
nc: 3
{points}
backbone:
  - [-1, 1, Conv, [16, 3, 2]]
  - [-1, 1, Conv, [24, 3, 2]]
  - [-1, 1, C2f, [24, True]]
  - [-1, 1, Conv, [32, 3, 2]]
  - [-1, 1, C2f, [32, True]]
  - [-1, 1, Conv, [48, 3, 2]]
  - [-1, 1, SPPF, [48, 5]]
"""
NECK = """
head:
  - [-1, 1, nn.Upsample, [None, 2, nearest]]
  - [[-1, 4], 1, Concat, [1]]
  - [-1, 1, C2f, [32]]
  - [[9, 6], 1, {head}]
"""


def small_yolo(folder: Path, task: str = "detect", *, end2end: bool = False) -> Any:
    """A model with random weights, and statistics of random images in its norms, so that its outputs differ."""
    text = BACKBONE.format(points="kpt_shape: [4, 2]" if task == "pose" else "")
    text += "head:\n  - [-1, 1, Classify, [nc]]\n" if task == "classify" else NECK.format(head=HEADS[task])
    path = folder / f"small-{task}.yaml"
    path.write_text(f"{text}{'end2end: True' if end2end else ''}\n", encoding="utf-8")
    torch.manual_seed(0)
    return with_statistics(YOLO(path, task=task))


def with_statistics(yolo: Any, side: int = 64) -> Any:
    norms = [module for module in yolo.model.modules() if isinstance(module, nn.BatchNorm2d)]
    usual = [norm.momentum for norm in norms]
    for norm in norms:
        norm.momentum = None  # the mean over all batches
    with torch.no_grad():
        yolo.model.train()
        for _ in range(3):
            yolo.model(torch.rand(8, 3, side, side))
    for norm, momentum in zip(norms, usual, strict=True):
        norm.momentum = momentum
    yolo.model.eval()
    return yolo
