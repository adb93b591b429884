"""ultralytics: every family of configurations that the package ships, in its smallest scale, with random weights.

A model is what `YOLO("yolo11n.yaml").model` is. Its users read decoded predictions, and its losses the raw boxes and
scores; the feature maps that the heads return beside them are read by nobody. What comes next is the model's own `fuse`
and the package's own exporter, as `YOLO(...).export(format="onnx")` runs it.
"""

from __future__ import annotations

import io
import os
import tempfile
from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

os.environ.setdefault("YOLO_AUTOINSTALL", "false")
os.environ.setdefault("YOLO_VERBOSE", "false")

import torch
from coverage_export import TOLERANCE, differing, in_short, run_onnx
from torch import Tensor
from torch.utils._pytree import tree_leaves
from ultralytics import RTDETR, YOLO
from zoo_cases import OWN, Case, images

SIDE = 128
SIZE = str(SIDE)
TASKS = ("", "-seg", "-pose", "-obb", "-cls")
NAMES = (
    "yolov3-tiny", "yolov3", "yolov5n", "yolov5n-p6", "yolov6n",
    *(f"yolov8n{task}" for task in TASKS), "yolov8n-ghost", "yolov8n-p2", "yolov8n-p6", "yolov8-cls-resnet50",
    "yolov8n-world", "yolov8n-worldv2", "yolov8n-rtdetr", "yoloe-v8n", "yoloe-v8n-seg",
    "yolov9t", "yolov9s", "yolov9c-seg", "yolov10n",
    *(f"yolo11n{task}" for task in TASKS), "yoloe-11n", "yoloe-11n-seg",
    *(f"yolo12n{task}" for task in TASKS),
    *(f"yolo26n{task}" for task in TASKS), "yolo26n-p2", "yolo26n-p6", "yolo26n-depth", "yolo26n-sem", "yoloe-26n",
    "yoloe-26n-seg", "rtdetr-l", "rtdetr-resnet50",
)  # fmt: skip


def names() -> list[str]:
    """The smallest model of every configuration."""
    return list(NAMES)


def knows(name: str) -> bool:
    """Whether it has a row in the matrix."""
    return name in NAMES


def build(name: str, side: int | None) -> Case:
    """A model with random weights, and images of `side` pixels."""
    side = side or SIDE
    return Case(_package(name).model.eval(), images(side), predictions, CHECKS, {"own_export": own_export})


def _package(name: str) -> Any:
    """The package's object around a model."""
    made = (RTDETR if "rtdetr" in name else YOLO)(f"{name}.yaml")
    made.model.task, made.model.pruned_name = made.task, name
    return made


def predictions(output: Any) -> Any:
    """What is read of an output: all but the feature maps."""
    if isinstance(output, Mapping):
        return {key: predictions(value) for key, value in output.items() if key != "feats"}
    return [predictions(value) for value in output] if isinstance(output, (tuple, list)) else output


def fuses(case: Case, pruned: Any, example: tuple[Any, ...]) -> str:
    """Whether the compact model's own `fuse` leaves its predictions as they are, to 1e-4."""
    said = _fused(pruned.model, example)
    dense = said if said == "yes" else _fused(case.model, example)
    return said if dense == "yes" else f"{OWN}: {dense}"


def _fused(model: Any, example: tuple[Any, ...]) -> str:
    with torch.no_grad():
        want = tree_leaves(model.eval()(*example))[0]
        got = tree_leaves(deepcopy(model).fuse(verbose=False)(*example))[0]
    off = float((got - want).abs().max() / want.abs().max())
    return "yes" if off <= TOLERANCE else f"differs by {off:.2g}"


def own_save(case: Case, pruned: Any, example: tuple[Any, ...]) -> str:
    """Whether the compact model comes back from the package's own `save` and `load`."""
    said = _saved(pruned.model, example)
    dense = said if said == "yes" else _saved(case.model, example)
    return said if dense == "yes" else f"{OWN}: {dense}"


def _saved(model: Any, example: tuple[Any, ...]) -> str:
    from ultralytics.nn.tasks import load_checkpoint

    package = _package(model.pruned_name)
    try:
        with tempfile.TemporaryDirectory() as folder, torch.no_grad():
            package.model = deepcopy(model).eval()
            package.save(Path(folder) / "model.pt")
            loaded, _ = load_checkpoint(Path(folder) / "model.pt")
            want = tree_leaves(deepcopy(model).half().float().eval()(*example))[0]  # it is saved in float16
            return differing([tree_leaves(loaded.eval()(*example))[0].numpy()], want)
    except Exception as error:  # whatever the package's code does
        return in_short(error)


def own_average(case: Case, pruned: Any, example: tuple[Any, ...]) -> str:
    """Whether the package's trainer can keep an average of the compact model's weights, and save it."""
    said = _averaged(pruned.model, example)
    dense = said if said == "yes" else _averaged(case.model, example)
    return said if dense == "yes" else f"{OWN}: {dense}"


def _averaged(model: Any, example: tuple[Any, ...]) -> str:
    from ultralytics.utils.torch_utils import ModelEMA

    try:
        model, memory = deepcopy(model), io.BytesIO()
        average = ModelEMA(model)
        with torch.no_grad():
            next(model.parameters()).add_(0.1)
            average.update(model)
            torch.save({"ema": deepcopy(average.ema).half()}, memory)
            memory.seek(0)
            loaded = torch.load(memory, weights_only=False)["ema"].float().eval()
            want = tree_leaves(average.ema.half().float().eval()(*example))[0]
            return differing([tree_leaves(loaded(*example))[0].numpy()], want)
    except Exception as error:  # whatever the package's code does
        return in_short(error)


CHECKS = {"fuses": fuses, "own_save": own_save, "own_average": own_average}


def own_export(case: Case, pruned: Any, example: tuple[Any, ...]) -> str:
    """Whether the package exports the compact model, and ONNX Runtime computes the same."""
    said = _exported(pruned.model, example)
    dense = said if said == "yes" else _exported(case.model, example)
    return said if dense == "yes" else f"{OWN}: {dense}"


def _exported(model: Any, example: tuple[Any, ...]) -> str:
    package = _package(model.pruned_name)
    try:
        with tempfile.TemporaryDirectory() as folder:
            package.model = deepcopy(model)
            package.model.pt_path = str(Path(folder) / "model.pt")
            file = package.export(format="onnx", imgsz=example[0].shape[-1], simplify=False, verbose=False)
            with torch.no_grad():
                want = [one for one in tree_leaves(model.eval()(*example)) if isinstance(one, Tensor)]
            got = run_onnx(Path(file), example)
            return differing(got[:1], want[0])
    except Exception as error:  # whatever the package's code does
        return in_short(error)
