"""Small models and exports of them, for tests of what takes exported files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from prunekit.backends.backend import FORMATS
from prunekit.backends.files.export_source import ExportSource
from prunekit.models.interface import interface_of
from prunekit.models.preprocessing import Preprocessing

FEED = Preprocessing(8, 8, mean=(0.4, 0.5, 0.6), std=(0.2, 0.2, 0.3))
CLASSES = ("cat", "dog", "ox")
FORMS = ("onnx", "openvino", "pt2")


class Photos(nn.Sequential):
    def __init__(self, width: int = 8) -> None:
        super().__init__(nn.Conv2d(3, width, 3), nn.ReLU(), nn.Flatten(), nn.Linear(width * 36, 3))


class Two(nn.Module):
    """Takes two inputs, and returns two outputs by name."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, left: Tensor, right: Tensor) -> dict[str, Tensor]:
        return {"logits": self.b((self.a(left) * self.a(right)).relu()), "hidden": self.a(left)}


def exported(model: nn.Module, example: tuple[Any, ...], form: str, path: Path, **known: Any) -> Path:
    """Write a model in a format; the suffix is added to the path."""
    file = path.with_name(path.name + FORMATS.get(form).suffix)
    file.parent.mkdir(parents=True, exist_ok=True)
    interface = interface_of(model.eval(), example, **known)
    FORMATS.get(form).write(ExportSource(model, example, interface), file)
    return file


def classifier(width: int = 8) -> nn.Module:
    """A classifier of images, the same for the same width."""
    torch.manual_seed(width)
    return Photos(width).eval()


def photos(form: str, folder: Path, width: int = 8) -> Path:
    """The file of such a classifier."""
    example, known = (torch.randn(2, 3, 8, 8),), {"classes": CLASSES, "preprocessing": FEED}
    return exported(classifier(width), example, form, folder / "net", task="image_classification", **known)
