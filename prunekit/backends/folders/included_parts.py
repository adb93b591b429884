"""Parts that every standalone file includes as they are here: tensors from a file, put into a structure, and images.

They use torch, NumPy, Pillow and safetensors alone, and each is on its own: what it reads is defined in this module or
imported at its top.
"""

import hashlib
from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

from prunekit.models.preprocessing import in_rgb


def read_tensors(path: Path, sha256: str) -> dict[str, Tensor]:
    """Return the tensors of a file by name, if its checksum is right."""
    if hashlib.sha256(path.read_bytes()).hexdigest() != sha256:
        raise RuntimeError(f"{path}: its checksum is not the expected one; the file is damaged or was exchanged")
    # copies: the file's own layout is not aligned, which changes the last bit of results of CPU kernels
    return {name: tensor.clone() for name, tensor in load_file(path).items()}


def set_tensors(
    model: nn.Module, tensors: Mapping[str, Tensor], ties: Mapping[str, str], frozen: Sequence[str]
) -> None:
    """Put tensors in place of a model's parameters and buffers, whatever their shapes; `ties` are further names."""
    placed: dict[str, Tensor] = {}
    for name in (*tensors, *ties):
        path, _, leaf = name.rpartition(".")
        module = model.get_submodule(path)
        if leaf in module._buffers:
            placed[name] = module._buffers[leaf] = placed[ties[name]] if name in ties else tensors[name]
        else:
            own = placed[ties[name]] if name in ties else nn.Parameter(tensors[name], name not in frozen)
            placed[name] = module._parameters[leaf] = own  # type: ignore[assignment]


def read_image(image: str | PathLike[str] | Image.Image) -> Image.Image:
    """Return an image in RGB, from its file if a path is given."""
    if isinstance(image, Image.Image):
        return in_rgb(image)
    with Image.open(image) as file:
        return in_rgb(ImageOps.exif_transpose(file))


def image_input(
    image: str | PathLike[str] | Image.Image,
    *,
    height: int,
    width: int,
    shorter_side: int | None,
    interpolation: str,
    mean: Sequence[float],
    std: Sequence[float],
    white: float,
    channel_order: str,
    padding: float | None = None,
) -> Tensor:
    """Return the model's input (channels, height, width) of an image, or of the path of one.

    With `shorter_side`, the image is resized to that length of its shorter side and its center is cut out; with
    `padding`, it is resized to fit, and centered on that gray; else it is resized as a whole. A pixel of the value
    `white` becomes 1 before mean and standard deviation are applied.
    """
    pixels = read_image(image)
    if shorter_side is not None and pixels.size != (width, height):
        (w, h), resample = pixels.size, Image.Resampling[interpolation.upper()]
        size = (shorter_side, int(shorter_side * h / w)) if w <= h else (int(shorter_side * w / h), shorter_side)
        pixels = pixels.resize(size, resample) if size != pixels.size else pixels
        left, top = (
            -((new - old) // 2) if new > old else round((old - new) / 2)
            for new, old in ((width, pixels.width), (height, pixels.height))
        )
        pixels = pixels.crop((left, top, left + width, top + height))
    if padding is not None and pixels.size != (width, height):
        scale = min(width / pixels.width, height / pixels.height)
        inside = max(1, round(pixels.width * scale)), max(1, round(pixels.height * scale))
        canvas = Image.new("RGB", (width, height), (round(255 * padding),) * 3)
        smaller = pixels.resize(inside, Image.Resampling[interpolation.upper()])
        canvas.paste(smaller, ((width - inside[0]) // 2, (height - inside[1]) // 2))
        pixels = canvas
    values = torch.from_numpy(np.array(pixels)).permute(2, 0, 1).contiguous().float() / white
    if values.shape[1:] != (height, width):
        smooth: dict[str, Any] = {"align_corners": False}
        smooth["antialias"] = interpolation == "lanczos" or (values.shape[1] > height and values.shape[2] > width)
        options = {} if interpolation == "nearest" else smooth
        values = F.interpolate(values[None], (height, width), mode=interpolation, **options)[0]
    if channel_order == "bgr":
        values = values.flip(0)
    if len(mean) == 1:  # gray, by the weights of ITU-R 601-2
        weights = torch.tensor([0.299, 0.587, 0.114])
        order = weights.flip(0) if channel_order == "bgr" else weights
        values = (values * order[:, None, None]).sum(0, keepdim=True)
    return (values - torch.tensor(mean)[:, None, None]) / torch.tensor(std)[:, None, None]


def scores_of(output: Any) -> Tensor:
    """Return the tensor of class scores in an output: itself, its entry `logits`, or its first one."""
    if isinstance(output, Tensor):
        return output
    if isinstance(output, Mapping):
        return scores_of(output["logits"] if "logits" in output else next(iter(output.values())))
    return scores_of(output[0])


def best_classes(scores: Tensor, classes: Sequence[str], count: int = 5) -> list[str]:
    """Return the best classes of one image, each as a line with its probability; scores: (classes,)."""
    found = scores.float().softmax(0).topk(min(count, len(scores)))
    named = [classes[i] if i < len(classes) else f"class {i}" for i in found.indices.tolist()]
    return [f"{100 * value:5.1f} %  {name}" for value, name in zip(found.values.tolist(), named, strict=True)]
