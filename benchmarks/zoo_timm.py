"""timm: of every file of `timm.models` the smallest model by parameters, random weights, at its own image size.

Which is the smallest is kept in `zoo_timm_smallest.json`, because building some 1,400 models takes minutes; for another
release of timm it is found again by

    python benchmarks/zoo_timm.py
"""

from __future__ import annotations

import json
from pathlib import Path

import timm
import torch
from torch import nn
from zoo_cases import Case, images

SMALLEST = Path(__file__).with_name("zoo_timm_smallest.json")


def names() -> list[str]:
    """The smallest model of every architecture module."""
    return list(json.loads(SMALLEST.read_text(encoding="utf-8"))["models"].values())


def build(name: str, side: int | None) -> Case:
    """A model with random weights; images have the size it was made for, whatever `side` says."""
    model = timm.create_model(name, pretrained=False)
    channels, *size = model.pretrained_cfg["input_size"]
    return Case(model, images(size[0], channels))


def smallest(module: str) -> str:
    """The model of a module with the fewest parameters; the first by name of several."""
    return min(timm.list_models(module=module), key=_parameters)


def _parameters(name: str) -> int:
    try:
        with torch.device("meta"):
            model: nn.Module = timm.create_model(name, pretrained=False)
    except (RuntimeError, NotImplementedError):  # a constructor that looks at values
        model = timm.create_model(name, pretrained=False)
    return sum(parameter.numel() for parameter in model.parameters())


if __name__ == "__main__":
    found = {module: smallest(module) for module in timm.list_modules()}
    SMALLEST.write_text(json.dumps({"timm": timm.__version__, "models": found}, indent=1) + "\n", encoding="utf-8")
