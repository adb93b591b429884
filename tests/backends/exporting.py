"""Small models of several kinds, and their files in each format."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from prunekit.backends.backend import FORMATS
from prunekit.backends.files.export_source import ExportOptions, ExportSource
from prunekit.models.interface import interface_of
from prunekit.utils.inputs import Keywords, call
from prunekit.utils.tensors import gather, map_tensors


class Named(nn.Module):
    """Positional, named, nested, missing and unused inputs; an output with names that its inputs and results have."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.linear = nn.Parameter(torch.tensor([1.0, -2.0, 0.5])), nn.Linear(3, 3)

    def forward(self, weight: Tensor, unused: Tensor, *, add: dict[str, Tensor], flag: Any = None) -> dict[str, Any]:
        hidden = self.linear(weight + add["a"]) + self.weight
        return {"linear": hidden.relu(), "relu": hidden, "again": hidden, "weight": weight, "none": flag, "number": 3}

    @staticmethod
    def example(samples: int = 2) -> tuple[Any, ...]:
        x, y, z = torch.randn(3, samples, 3)
        return x, y, Keywords(add={"a": z}, flag=None)


class Convolutions(nn.Module):
    """Convolutions with norms, for images of any size."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, 8, 3, 2), nn.BatchNorm2d(8), nn.ReLU())
        self.second = nn.Sequential(nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.ReLU())
        self.head = nn.Linear(8, 4)

    def forward(self, image: Tensor) -> Tensor:
        out: Tensor = self.head(self.second(self.first(image)).mean((2, 3)))
        return out


def source_of(
    model: nn.Module, example: tuple[Any, ...], *, options: ExportOptions | None = None, **facts: Any
) -> ExportSource:
    model = model.eval()
    return ExportSource(model, example, interface_of(model, example, **facts), options or ExportOptions())


def write(name: str, source: ExportSource, folder: Path) -> Path:
    """The file of a model in a format, moved to another folder after it was written."""
    made = folder / "made"
    made.mkdir(parents=True)
    FORMATS.get(name).write(source, made / f"model{FORMATS.get(name).suffix}")
    made.rename(folder / "moved")
    return folder / "moved" / f"model{FORMATS.get(name).suffix}"


def of_size(example: tuple[Any, ...], samples: int) -> tuple[Any, ...]:
    """An example of another number of samples: no sample of the first is in it as it was."""
    found: tuple[Any, ...] = map_tensors(
        example,
        lambda one: (
            one[torch.arange(samples) % len(one)].flip(0) * 0.5
            if one.is_floating_point()
            else one[:1].repeat(samples, 1)
        ),
    )
    return found


def require_same(model: nn.Module, run: Any, example: tuple[Any, ...], tolerance: float = 1e-4) -> None:
    with torch.no_grad():
        wanted = gather(call(model, example))
    found = run(example)
    assert [(one.dtype, one.shape) for one in found] == [(one.dtype, one.shape) for one in wanted]
    for one, other in zip(found, wanted, strict=True):
        assert other.abs().max() > 0
        assert float((one - other).abs().max() / other.abs().max()) < tolerance
