"""Sources of images with boxes, and their split into training, validation and test images."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from prunekit.data import coco, yolo
from prunekit.data.annotated_images import GRAY, AnnotatedImages, BoxAugmentation, BoxedImages
from prunekit.data.datasets import CorruptImages
from prunekit.data.drawn_shapes import DrawnShapes
from prunekit.data.splits import Splits, fingerprint
from prunekit.errors import DataError, UsageError
from prunekit.models.preprocessing import Preprocessing
from prunekit.settings.data_and_model import DataSettings
from prunekit.tasks.detection import DETECTION

SHAPES = 240
"""Number of drawn images where the settings give none."""


@dataclass(frozen=True)
class BoxedSource:
    """Images with boxes that are still to be split.

    Attributes:
        parts: `train`, and perhaps `validation` and `test`.
        corrupt: counts corrupt images.
        content: bytes that identify the data.
        notes: what was left out.
    """

    parts: dict[str, AnnotatedImages]
    corrupt: CorruptImages
    content: tuple[bytes, ...]
    notes: tuple[str, ...] = ()


def detection_splits(settings: DataSettings) -> Splits:
    """Load images with boxes and split them, the same for the same settings and content.

    Where there are no test images, those of validation are the test images, and others for validation are drawn from
    the training images, as for classification.
    """
    _refuse(settings)
    source = _READERS[settings.source](settings)
    size = settings.image_size
    feed = Preprocessing(size, size, mean=(0.0,) * 3, std=(1.0,) * 3, padding=GRAY)
    augmentation = BoxAugmentation.of(settings.augment, GRAY)

    def of(part: str, chosen: Tensor) -> BoxedImages:
        return BoxedImages(source.parts[part], feed, augmentation, chosen, source.corrupt)

    everything = {name: torch.arange(len(images)) for name, images in source.parts.items()}
    made = {name: of(name, chosen) for name, chosen in everything.items()}
    if "test" not in made and "validation" in made:
        made["test"] = made.pop("validation")
    made |= _drawn(made, settings)
    how = f"{settings.source} {size} {settings.targets} {settings.category_ids} {settings.test_share} "
    how += f"{settings.validation_share} {settings.split_seed} {[(name, len(part)) for name, part in made.items()]}"
    return Splits(
        made["train"],
        made["validation"],
        made["test"],
        source.parts["train"].classes,
        (3, size, size),
        fingerprint([how.encode(), *source.content]),
        DETECTION,
        feed,
        source.notes,
    )


def _refuse(settings: DataSettings) -> None:
    """Raise a `UsageError` for settings that would change nothing."""
    for name in ("mean", "std"):
        if getattr(settings, name) is not None:
            raise UsageError(
                f"data.{name}: expected none for images with boxes, whose values stay 0..1: torchvision's detectors "
                "normalize them themselves, and ultralytics' are not normalized"
            )
    if settings.test_share + settings.validation_share >= 1:
        raise UsageError(
            f"data: expected test_share + validation_share < 1, got {settings.test_share} + {settings.validation_share}"
        )


def _drawn(made: dict[str, BoxedImages], settings: DataSettings) -> dict[str, BoxedImages]:
    """Return the missing parts, drawn from the training images, and what is left of these."""
    total = len(made["train"])
    shares = {"test": settings.test_share, "validation": settings.validation_share}
    missing = {name: max(1, round(total * share)) for name, share in shares.items() if name not in made}
    if sum(missing.values()) + 2 > total:
        raise DataError(
            f"expected images to train on, two at least, beside {' and '.join(missing) or 'none'}, got {total}"
        )
    order = np.random.default_rng(settings.split_seed).permutation(total)
    found: dict[str, BoxedImages] = {}
    for name, count in missing.items():
        found[name] = replace(made["train"], indices=torch.from_numpy(np.sort(order[:count])))
        order = order[count:]
    return found | {"train": replace(made["train"], indices=torch.from_numpy(np.sort(order)))}


def _shapes(settings: DataSettings) -> BoxedSource:
    images = DrawnShapes(settings.images or SHAPES, settings.image_size, settings.targets)
    return BoxedSource({"train": images}, CorruptImages(), (str(len(images)).encode(),))


def _coco(settings: DataSettings) -> BoxedSource:
    assert settings.root is not None  # see `missing_data`
    files = coco.annotation_files(settings.root, settings.name, "keypoints" in settings.targets)
    found = {part: coco.read_coco(file, settings.targets, settings.category_ids) for part, file in files.items()}
    _require_equal_classes(found, settings.root)
    corrupt = CorruptImages.allowing(settings.max_corrupt, sum(map(len, found.values())))
    content = tuple(file.content for file in files.values())
    notes = tuple(note for images in found.values() for note in images.notes)
    return BoxedSource(dict(found), corrupt, content, notes)


def _require_equal_classes(parts: dict[str, coco.CocoImages], root: Path) -> None:
    train = parts["train"].classes
    for name, part in parts.items():
        if part.classes != train:
            raise DataError(
                f"{root}: expected the same categories in all parts, got {len(train)} in train ({', '.join(train[:3])}"
                f"...) and {len(part.classes)} in {name} ({', '.join(part.classes[:3])}...)"
            )


def _yolo(settings: DataSettings) -> BoxedSource:
    assert settings.root is not None  # see `missing_data`
    known = yolo.describe_yolo(settings.root)
    corrupt = CorruptImages.allowing(settings.max_corrupt, sum(map(len, known.images.values())))
    same = [part for part in known.images if part != "train" and known.images[part] == known.images["train"]]
    parts = [part for part in known.images if part not in same]  # images to train on are no test
    found = {part: yolo.read_yolo(known, part, settings.targets, corrupt) for part in parts}
    largest = max(int(one.classes.max(initial=-1)) for images in found.values() for one in images.labels)
    classes = known.classes or tuple(map(str, range(largest + 1)))
    notes = [note for images in found.values() for note in images.notes]
    notes += [f"{known.where}: {part} has the images of train; others are drawn for it" for part in same]
    made: dict[str, AnnotatedImages] = {name: replace(images, classes=classes) for name, images in found.items()}
    content = tuple(_marks(path for images in found.values() for path in images.paths))
    return BoxedSource(made, corrupt, content, tuple(notes))


def _marks(images: Iterable[Path]) -> Iterable[bytes]:
    """Yield name, size and time of change of files: reading all would take too long."""
    for path in images:
        for file in (path, yolo.label_file(path)):
            if os.path.isfile(file):
                stat = file.stat()
                yield f"{file.name} {stat.st_size} {stat.st_mtime_ns}".encode()


_READERS: dict[str, Callable[[DataSettings], BoxedSource]] = {"shapes": _shapes, "coco": _coco, "yolo": _yolo}
