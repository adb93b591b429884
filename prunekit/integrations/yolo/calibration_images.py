"""Calibration images for models of ultralytics, from what the library takes as data; labels are not read."""

import random
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from ultralytics.data.augment import LetterBox, classify_transforms
from ultralytics.data.utils import IMG_FORMATS, check_cls_dataset, check_det_dataset
from ultralytics.engine.model import Model
from ultralytics.utils.patches import imread

from prunekit.errors import DataError, raised_as
from prunekit.integrations.yolo.pruned_yolo import channels_of

GRAY, COLOR = 0, 1
"""Flags of OpenCV."""


def calibration_images(yolo: Model, data: Any, size: tuple[int, int], most: int, seed: int) -> Tensor:
    """Return images (B, C, H, W) float32 as ultralytics' predictors give them to the model: RGB in 0..1, of one size.

    Args:
        data: a data set of ultralytics by its YAML file or as a dictionary; a folder, a file, a text file of paths, or
            a list of these; images as arrays (H, W, 3) in BGR, as OpenCV reads them; a tensor (B, C, H, W), in 0..1 or
            uint8; or a loader of such tensors, or of ultralytics' batches, whose images are under `img`.
        size: height and width in pixels, to which files and arrays are scaled and padded.
        most: how many images are taken, of files a random sample.
    """
    channels = channels_of(yolo.model)
    if isinstance(data, Tensor):
        found = _as_floats(data[:most])
    elif (
        isinstance(data, (str, Path))
        or _is_list_of(data, (str, Path))
        or (isinstance(data, Mapping) and "train" in data)
    ):
        paths = image_files(data, classified=yolo.task == "classify")
        chosen = sorted(random.Random(seed).sample(range(len(paths)), min(most, len(paths))))
        found = _preprocessed(yolo, (_read(paths[index], channels) for index in chosen), size)
    elif _is_list_of(data, np.ndarray):
        found = _preprocessed(yolo, data[:most], size)
    elif isinstance(data, Iterable) and not isinstance(data, Mapping):
        found = _of_batches(data, most)
    else:
        raise DataError(
            "data: expected a data set's YAML file or its dictionary, a folder of images, paths, arrays, a tensor "
            f"(B, {channels}, H, W), or a loader; got {_described(data)}"
        )
    if found.ndim != 4 or found.shape[1] != channels:
        raise DataError(f"data: expected images of shape (B, {channels}, H, W), got {tuple(found.shape)}")
    return found


def image_files(data: Any, *, classified: bool = False) -> list[str]:
    """Return the paths of the training images of a data set, or of the images in folders, files and lists.

    A `classified` data set has classes, in folders by split, as ultralytics takes it.
    """
    places = _places(data, classified)
    found: list[str] = []
    for place in places:
        if place.is_dir():
            found += [str(path) for path in place.rglob("*.*")]
        elif place.suffix == ".txt" and place.is_file():
            lines = place.read_text(encoding="utf-8-sig").split("\n")
            named = (Path(line.strip()) for line in lines if line.strip())
            found += [str(path if path.is_absolute() or path.exists() else place.parent / path) for path in named]
        elif place.is_file():
            found.append(str(place))
        else:
            raise DataError(f"data: there is no {place}")
    images = sorted(path for path in found if path.rpartition(".")[2].lower() in IMG_FORMATS)
    if not images:
        raise DataError(f"data: no images in {', '.join(map(str, places))}; known are {', '.join(sorted(IMG_FORMATS))}")
    return images


def _places(data: Any, classified: bool) -> list[Path]:
    if _is_list_of(data, (str, Path)):
        return [Path(one) for one in data]
    if isinstance(data, (str, Path)) and Path(data).exists() and Path(data).suffix not in {".yaml", ".yml"}:
        return [Path(data) / "train" if classified and (Path(data) / "train").is_dir() else Path(data)]
    root = Path()
    with raised_as(DataError, f"data: {_described(data)} is no data set that ultralytics reads: ", reason=str):
        if isinstance(data, Mapping):
            split, root = data["train"], Path(data.get("path") or "")
        elif classified:
            split = check_cls_dataset(data)["train"]
        else:
            split = check_det_dataset(str(data))["train"]
        return [root / one for one in (split if isinstance(split, (list, tuple)) else [split])]


def _preprocessed(yolo: Model, images: Iterable[np.ndarray[Any, Any]], size: tuple[int, int]) -> Tensor:
    """Return images (H, W, C) in BGR as the predictor of the task gives them to the model."""
    ready = []
    if yolo.task == "classify":
        from PIL import Image

        transform = classify_transforms(size)
        for image in images:
            ready.append(transform(Image.fromarray(np.ascontiguousarray(image[..., ::-1]))))
    else:
        letterbox = LetterBox(size, auto=False, scale_fill="RTDETR" in type(yolo.model).__name__)
        for image in images:
            boxed = np.ascontiguousarray(letterbox(image=image)[..., ::-1].transpose(2, 0, 1))
            ready.append(torch.from_numpy(boxed).float() / 255)
    return torch.stack(ready)


def _read(path: str, channels: int) -> np.ndarray[Any, Any]:
    if channels not in (1, 3):
        raise DataError(f"data: the model reads {channels} channels; expected its images as a tensor, or a loader")
    image = imread(path, flags=COLOR if channels == 3 else GRAY)
    if image is None:
        raise DataError(f"data: {path} cannot be read as an image")
    found: np.ndarray[Any, Any] = image if image.ndim == 3 else image[..., None]
    return found


def _of_batches(data: Iterable[Any], most: int) -> Tensor:
    batches, count = list[Tensor](), 0
    for batch in data:
        inputs = batch.get("img") if isinstance(batch, Mapping) else batch
        inputs = inputs[0] if isinstance(inputs, (list, tuple)) and inputs else inputs
        if not isinstance(inputs, Tensor):
            raise DataError(
                "data: expected a loader of images (B, C, H, W), or of dictionaries with them under 'img'; got "
                f"{_described(batch)}"
            )
        inputs = inputs if inputs.ndim == 4 else inputs[None]
        if batches and inputs.shape[1:] != batches[0].shape[1:]:
            raise DataError(
                f"data: images of {tuple(inputs.shape[1:])} after {tuple(batches[0].shape[1:])}; expected all of one "
                "size, as of a loader with rect=False"
            )
        batches.append(_as_floats(inputs.cpu()))
        count += len(inputs)
        if count >= most:
            break
    if not batches:
        raise DataError("data: the loader is empty")
    return torch.cat(batches)[:most]


def _as_floats(images: Tensor) -> Tensor:
    return images.float() / 255 if images.dtype == torch.uint8 else images.float()


def _is_list_of(data: Any, kinds: type | tuple[type, ...]) -> bool:
    return isinstance(data, Sequence) and not isinstance(data, str) and bool(data) and isinstance(data[0], kinds)


def _described(data: Any) -> str:
    if isinstance(data, (str, Path)):
        return repr(str(data))
    keys = f" with {', '.join(map(repr, list(data)[:3]))}" if isinstance(data, Mapping) else ""
    return f"{type(data).__name__}{keys}"
