"""torchvision's own data sets by name."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import torchvision

from prunekit.data.settings import DataSettings
from prunekit.errors import DataError, UsageError, nearest

ARGUMENTS = ("train", "split")
TESTS = ("test", "val")


def set_names() -> tuple[str, ...]:
    """Data sets of torchvision that have a training and a test part."""
    found = {name: getattr(torchvision.datasets, name) for name in torchvision.datasets.__all__}
    return tuple(name for name, kind in found.items() if inspect.isclass(kind) and _argument(kind) is not None)


def open_sets(settings: DataSettings) -> tuple[Any, Any]:
    """The training and the test part of a data set, nothing downloaded unless `settings.download`.

    Some, such as CIFAR10, are kept as pickles, which torchvision loads after it has checked their MD5 sums.

    Raises:
        UsageError: there is no such data set, or it has no training and test part.
        DataError: files are missing or damaged, or cannot be downloaded.
    """
    name = str(settings.name)
    if name not in set_names():
        alike = next((known for known in set_names() if known.lower() == name.lower()), name)
        raise UsageError(
            f"data.name: expected a data set of torchvision with a training and a test part, got {name!r}; "
            f"{nearest(alike, set_names())}"
        )
    kind = getattr(torchvision.datasets, name)
    if _argument(kind) == "train":
        return _open(kind, settings, train=True), _open(kind, settings, train=False)
    return _open(kind, settings, split="train"), _open_split(kind, settings)


def _argument(kind: Any) -> str | None:
    parameters = inspect.signature(kind).parameters
    return next((name for name in ARGUMENTS if name in parameters), None)


def _open_split(kind: Any, settings: DataSettings) -> Any:
    for name in TESTS:
        try:
            return _open(kind, settings, split=name)
        except ValueError:  # torchvision: "Unknown value 'test' for argument split"
            continue
    raise UsageError(f"data.name: torchvision's {kind.__name__} has no split {' or '.join(map(repr, TESTS))}")


def _open(kind: Any, settings: DataSettings, **part: Any) -> Any:
    if "download" in inspect.signature(kind).parameters:
        part["download"] = settings.download
    try:
        return kind(str(settings.root), **part)
    except ValueError:
        raise
    except Exception as error:  # RuntimeError, OSError, URLError, ModuleNotFoundError: none leaves a usable data set
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
