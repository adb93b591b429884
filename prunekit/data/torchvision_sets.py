"""torchvision's own data sets by name."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import torchvision

from prunekit.errors import DataError, UsageError, nearest
from prunekit.settings.data import DataSettings

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
"""Data sets with one label for each image, and what selects their training and their test part."""


def open_sets(settings: DataSettings) -> tuple[Any, Any]:
    """The training and the test part of a data set, nothing downloaded unless `settings.download`.

    Some, such as CIFAR10, are kept as pickles, which torchvision loads after it has checked their MD5 sums.

    Raises:
        UsageError: there is no such data set among those that have labels and a test part.
        DataError: files are missing or damaged, or cannot be downloaded.
    """
    name = str(settings.name)
    if name not in SETS:
        alike = next((known for known in SETS if known.lower() == name.lower()), name)
        raise UsageError(
            "data.name: expected a data set of torchvision with a label for each image, and a training and a test "
            f"part, got {name!r}; {nearest(alike, SETS)}"
        )
    kind = getattr(torchvision.datasets, name)
    train, test = (_open(kind, settings, **part) for part in SETS[name])
    return train, test


def _open(kind: Any, settings: DataSettings, **part: Any) -> Any:
    if "download" in inspect.signature(kind).parameters:
        part["download"] = settings.download
    try:
        return kind(str(settings.root), **part)
    except Exception as error:  # RuntimeError, OSError, ValueError, ModuleNotFoundError: none leaves a usable data set
        raise DataError(_missing(kind, settings, part, error)) from error


def _missing(kind: Any, settings: DataSettings, part: dict[str, Any], error: Exception) -> str:
    which = ", ".join(f"{key}={value!r}" for key, value in part.items())
    root = Path(str(settings.root)).absolute()
    absent = [str(path.relative_to(root)) for path in _files(kind, root, part) if not path.is_file()]
    files = f"missing below {root}: {', '.join(absent)}" if absent else f"looked below {root}"
    origin = f"; {settings.origin}" if settings.origin else ""
    fetch = "" if settings.download or "download" not in part else ", or have them fetched with data.download=true"
    return (
        f"data.root: torchvision's {kind.__name__} ({which}) cannot be used: {error}; {files}; put its files there or "
        f"set data.root{fetch}{origin}"
    )


def _files(kind: Any, root: Path, part: dict[str, Any]) -> list[Path]:
    """The files that a data set needs, where its class says so; the three ways in which torchvision does."""
    if hasattr(kind, "train_list"):  # CIFAR, STL10
        return [root / kind.base_folder / entry[0] for entry in (*kind.train_list, *kind.test_list)]
    if hasattr(kind, "resources"):  # MNIST and those made like it
        return [root / kind.__name__ / "raw" / Path(entry[0]).stem for entry in kind.resources]
    names = getattr(kind, "split_list", {}).get(part.get("split"), ())  # SVHN, USPS
    return [root / names[1]] if len(names) > 1 else []
