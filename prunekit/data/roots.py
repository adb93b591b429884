"""Roots of data: which file or folder a source reads, and how to get one that is missing; known without torch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from prunekit.errors import UsageError

if TYPE_CHECKING:
    from prunekit.settings.inputs import DataSettings

EXTENSIONS = (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".gif", ".tif", ".tiff", ".ppm", ".pgm")
"""Ends of the names of image files."""
_TRAIN = ({"train": True}, {"train": False})
_SPLIT = ({"split": "train"}, {"split": "test"})
_VAL = ({"split": "train"}, {"split": "val"})
_TRAINVAL = ({"split": "trainval"}, {"split": "test"})
SETS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    **dict.fromkeys(("CIFAR10", "CIFAR100", "MNIST", "FashionMNIST", "KMNIST", "QMNIST", "USPS"), _TRAIN),
    **dict.fromkeys(("Country211", "DTD", "FER2013", "Flowers102", "Food101", "GTSRB", "PCAM"), _SPLIT),
    **dict.fromkeys(("RenderedSST2", "STL10", "SVHN", "StanfordCars"), _SPLIT),
    **dict.fromkeys(("CLEVRClassification", "ImageNet", "Imagenette"), _VAL),
    **dict.fromkeys(("FGVCAircraft", "OxfordIIITPet"), _TRAINVAL),
}
"""Data sets with one label for each image, and the arguments for their training and their test part."""
GET_COCO = (
    "COCO is at https://cocodataset.org/#download: 2017 Train images, 2017 Val images and 2017 Train/Val annotations, "
    "unpacked into one folder"
)
GET_YOLO = "small ones are at https://github.com/ultralytics/assets/releases, such as coco8.zip"
ORIGINS = {"coco": GET_COCO, "yolo": GET_YOLO}
"""Where data of a source can be had."""
EXPECTED = {
    "npz": "a NumPy archive (.npz)",
    "imagefolder": "a folder with train/ and test/ or val/, or with one folder of images for each class",
    "torchvision": "the folder of torchvision's files (data.download=true makes and fills it)",
    "huggingface": "the folder that `save_to_disk` of Hugging Face's datasets wrote",
    "coco": "the folder of a data set in the format of COCO, with annotations/ and its images",
    "yolo": "the folder of a data set of ultralytics, or its data.yaml",
    "text": "a file of text (.txt or .jsonl), or a folder of them",
}
"""What a source with a root reads."""


ARCHIVE = ".npz"


def is_labeled_images(data: str) -> bool:
    """Return whether a text names a folder or an archive of images, and not code such as `file.py:factory`."""
    return Path(data).is_dir() or Path(data).suffix == ARCHIVE


def missing_data(settings: DataSettings) -> str | None:
    """Return which data is missing, where it was searched and how to supply it; None if its root exists."""
    if settings.source not in EXPECTED or (settings.source == "huggingface" and settings.name is not None):
        return None
    if settings.root is None:
        raise UsageError(f"data.root: source {settings.source!r} needs the path of its data, got none")
    if settings.root.exists() or settings.download:
        return None
    where = settings.origin or ORIGINS.get(settings.source)
    origin = f"; {where}" if where else ""
    beside = "" if settings.root.is_absolute() else ", here or beside the recipe that names it"
    expected = f"expected {EXPECTED[settings.source]}{beside}; give its path as data.root=PATH{origin}"
    return f"data.root: {settings.root.absolute()} does not exist; {expected}"
