"""timm: of every file of `timm.models` the smallest model by parameters, random weights, at its own image size.

But at 224 pixels for those that are made for more than 384 and take any: in float64 on one thread they need minutes.
Those that come without a classifier get one: else what they put out is the residual stream itself, which has to stay.

Which is the smallest is kept in `zoo_timm_smallest.json`, because building some 1,400 models takes minutes; for another
release of timm it is found again by

    python benchmarks/zoo_timm.py
"""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

import timm
import torch
from torch import nn
from zoo_cases import Case, images

SMALLEST = Path(__file__).with_name("zoo_timm_smallest.json")
LARGEST, REDUCED = 384, 224
"""Pixels along an image: the most that a model is checked with, and what it gets instead."""
SIZE = f"the model's own, {REDUCED} where that is above {LARGEST}"
CLASSES = 1000


def names() -> list[str]:
    """The smallest model of every architecture module."""
    return list(json.loads(SMALLEST.read_text(encoding="utf-8"))["models"].values())


def knows(name: str) -> bool:
    """Whether timm has it; the matrix has only the smallest of every file."""
    return bool(timm.is_model(name))


def build(name: str, side: int | None) -> Case:
    """A model with random weights; images have the size it was made for up to `LARGEST`, whatever `side` says."""
    settings = timm.get_pretrained_cfg(name)
    channels, side, _ = settings.input_size
    arguments = {} if settings.num_classes else {"num_classes": CLASSES}
    if side > LARGEST and not settings.fixed_input_size:
        side = REDUCED
        with suppress(TypeError):  # a constructor that does not ask: the model takes images of any size
            return Case(timm.create_model(name, img_size=side, **arguments), images(side, channels))
    return Case(timm.create_model(name, **arguments), images(side, channels))


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
