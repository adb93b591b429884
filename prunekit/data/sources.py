"""Sources of data, by name: where the samples of the settings come from, and what is missing where they do not.

Those of images are here: the embedded digits, folders, NumPy archives, data sets of other libraries, images with
boxes, and images that a model's own preprocessing feeds.
"""

import os
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from prunekit.data import coco, yolo
from prunekit.data.annotated_images import AnnotatedImages, BoxAugmentation, BoxedImages
from prunekit.data.augmentation import Draw
from prunekit.data.datasets import CorruptImages, FolderImages, Indexable, TensorImages
from prunekit.data.drawn_shapes import DrawnShapes
from prunekit.data.library_datasets import open_rows, open_sets
from prunekit.data.local_files import LabeledArrays, LabeledFiles, read_npz, scan_folder, scan_unlabeled
from prunekit.data.roots import ARCHIVE, missing_data
from prunekit.data.splits import (
    ImageSource,
    Splits,
    fingerprint,
    image_transform_of,
    require_labels,
    require_shares,
    source_of_parts,
    splits_of,
)
from prunekit.data.texts import text_splits
from prunekit.errors import DataError, UsageError, nearest
from prunekit.models.preprocessing import Preprocessing
from prunekit.settings.inputs import BOXED, DataSettings
from prunekit.tasks.batches import GRAY
from prunekit.tasks.classification import IMAGE_CLASSIFICATION
from prunekit.tasks.detection import DETECTION
from prunekit.tasks.task import get_task
from prunekit.utils.files import sha256

SHAPES = 240
"""Number of drawn images where the settings give none."""


@dataclass(frozen=True)
class BoxedSource:
    """Images with boxes that are still to be split."""

    parts: dict[str, AnnotatedImages]  # `train`, and perhaps `validation` and `test`
    corrupt: CorruptImages  # counts corrupt images
    content: tuple[bytes, ...]  # bytes that identify the data
    notes: tuple[str, ...] = ()  # what was left out


def detection_splits(settings: DataSettings) -> Splits:
    """Load images with boxes and split them, the same for the same settings and content.

    Where there are no test images, those of validation are the test images, and others for validation are drawn from
    the training images, as for classification.
    """
    for name in ("mean", "std"):
        if getattr(settings, name) is not None:
            raise UsageError(
                f"data.{name}: expected none for images with boxes, whose values stay 0..1: torchvision's detectors "
                "normalize them themselves, and ultralytics' are not normalized"
            )
    require_shares(settings)
    source = _BOXED_READERS[settings.source](settings)
    size = settings.image_size
    feed = Preprocessing(size, size, mean=(0.0,) * 3, std=(1.0,) * 3, padding=GRAY)
    augmentation = BoxAugmentation.of(settings.augment, GRAY)
    made = {
        name: BoxedImages(images, feed, augmentation, torch.arange(len(images)), source.corrupt)
        for name, images in source.parts.items()
    }
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
    files = coco.annotation_files(_root(settings), settings.name, "keypoints" in settings.targets)
    found = {part: coco.read_coco(file, settings.targets, settings.category_ids) for part, file in files.items()}
    train = found["train"].classes
    for name, part in found.items():
        if part.classes != train:
            raise DataError(
                f"{settings.root}: expected the same categories in all parts, got {len(train)} in train "
                f"({', '.join(train[:3])}...) and {len(part.classes)} in {name} ({', '.join(part.classes[:3])}...)"
            )
    corrupt = CorruptImages.allowing(settings.max_corrupt, sum(map(len, found.values())))
    content = tuple(sha256(file.path).encode() for file in files.values())
    notes = tuple(note for images in found.values() for note in images.notes)
    return BoxedSource(dict(found), corrupt, content, notes)


def _yolo(settings: DataSettings) -> BoxedSource:
    known = yolo.describe_yolo(_root(settings))
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


_BOXED_READERS: dict[str, Callable[[DataSettings], BoxedSource]] = {"shapes": _shapes, "coco": _coco, "yolo": _yolo}


def load_splits(settings: DataSettings, task: str = IMAGE_CLASSIFICATION.name) -> Splits:
    """Load labeled images and split them: stratified, and the same for the same settings and content.

    Texts, for tasks that take them, are split into blocks. `test_share` and `validation_share` are shares of all
    images. If the source has separate test images, only validation images are drawn, as a share of its training images.
    """
    require_labels(settings, get_task(task))
    if settings.source == "own":
        raise UsageError("data.source: these images are their owner's; give them as --data file.py:factory")
    if (missing := missing_data(settings)) is not None:
        raise DataError(missing)
    if settings.source in BOXED:
        return detection_splits(settings)
    if settings.source == "text" or (settings.source == "huggingface" and get_task(task).texts is not None):
        return text_splits(settings, get_task(task))
    return splits_of(_READERS[settings.source](settings), settings)


def _digits(settings: DataSettings) -> ImageSource:
    """Return the UCI optical digits, Alpaydin & Kaynak 1998 (see DIGITS.md): 1,797 gray images of 8x8, values 0..16."""
    with resources.as_file(resources.files("prunekit.data") / "digits.npz") as path, np.load(path) as archive:
        pixels, labels = archive["images"][:, None], archive["labels"].astype(np.int64)
    transform = image_transform_of(settings)
    given = torch.from_numpy(labels) if settings.labels else torch.arange(len(labels))
    dataset = TensorImages(torch.from_numpy(pixels), given, transform, scale=16.0)
    classes = tuple(str(digit) for digit in range(10)) if settings.labels else ()
    return ImageSource("digits", classes, dataset, None, (pixels.tobytes(), labels.tobytes()))


def _npz(settings: DataSettings) -> ImageSource:
    path = _root(settings)
    archive = read_npz(path, labeled=settings.labels)

    def dataset(arrays: LabeledArrays) -> TensorImages:
        return TensorImages(arrays.pixels, arrays.labels, image_transform_of(settings))

    test = None if archive.test is None else dataset(archive.test)
    parts = [archive.rest] if archive.test is None else [archive.rest, archive.test]
    tensors = [tensor for arrays in parts for tensor in (arrays.pixels, arrays.labels)]
    content = tuple(tensor.contiguous().numpy().tobytes() for tensor in tensors)
    return ImageSource(str(path), archive.classes, dataset(archive.rest), test, content)


def _imagefolder(settings: DataSettings) -> ImageSource:
    root = _root(settings)
    folder = scan_folder(root) if settings.labels else scan_unlabeled(root)
    transform = image_transform_of(settings)
    stats = {path: path.stat() for path, _ in (*folder.rest, *(folder.test or ()), *(folder.validation or ()))}
    corrupt = CorruptImages.allowing(settings.max_corrupt, len(stats))
    corrupt.merge({str(path): "the file is empty" for path, stat in stats.items() if not stat.st_size})

    def dataset(files: LabeledFiles) -> FolderImages:
        paths, labels = zip(*files, strict=True)
        return FolderImages(paths, torch.tensor(labels), transform, corrupt)

    test, validation = (None if part is None else dataset(part) for part in (folder.test, folder.validation))
    # Files are identified by name, size and time of change: reading all would take hours for a large data set.
    content = tuple(
        f"{path.relative_to(root)} {stat.st_size} {stat.st_mtime_ns}".encode() for path, stat in stats.items()
    )
    return ImageSource(str(root), folder.classes, dataset(folder.rest), test, content, validation)


def _root(settings: DataSettings) -> Path:
    assert settings.root is not None  # see `missing_data`
    return settings.root


_READERS: dict[str, Callable[[DataSettings], ImageSource]] = {
    "digits": _digits,
    "npz": _npz,
    "imagefolder": _imagefolder,
    "torchvision": lambda given: source_of_parts(open_sets(given), given, str(given.name)),
    "huggingface": lambda given: source_of_parts(open_rows(given), given, str(given.root or given.name)),
}


@dataclass(frozen=True, eq=False)
class PreprocessedImages(Indexable):
    """Images with their labels, which a preprocessing turns into inputs."""

    images: Sequence[Path] | np.ndarray[Any, Any]  # paths of image files, or uint8 arrays (H, W) or (H, W, 3)
    labels: Tensor  # (N,) int64
    preprocessing: Preprocessing  # from an image to an input
    corrupt: CorruptImages = field(default_factory=CorruptImages)  # stays empty: an image that cannot be read raises

    def __len__(self) -> int:
        return len(self.labels)

    def fetch(self, indices: Tensor, draw: Draw | None = None) -> tuple[Tensor, Tensor]:
        """Return a batch: inputs (B, C, H, W) float32, labels (B,) int64."""
        return self.preprocessing([self.images[index] for index in indices.tolist()]), self.labels[indices]


def labeled_images(path: Path, preprocessing: Preprocessing, classes: Sequence[str]) -> Splits:
    """Return labeled images whose test part a model is tested on: that of the data if it has one, else all of it."""
    if not path.exists():
        raise DataError(f"{path}: expected a folder of images or a NumPy archive ({ARCHIVE}), and there is none")
    images: Sequence[Path] | np.ndarray[Any, Any]
    if path.is_dir():
        folder = scan_folder(path)
        images, labels = zip(*(folder.test or folder.rest), strict=True)
        found, given, numbered = folder.classes, torch.tensor(labels), False
    else:
        archive = read_npz(path)
        arrays = archive.test or archive.rest
        images, given = np.moveaxis(arrays.pixels.numpy(), 1, 3), arrays.labels
        images = images[..., 0] if images.shape[3] == 1 else images
        found, numbered = archive.classes, archive.classes == tuple(map(str, range(len(archive.classes))))
    matched = _matched(found, classes, str(path), numbered)
    test = PreprocessedImages(images, torch.tensor(matched)[given], preprocessing)
    known = fingerprint([str(path.resolve()).encode(), given.numpy().tobytes(), str(preprocessing).encode()])
    shape = (len(preprocessing.mean), preprocessing.height, preprocessing.width)
    return Splits(test, test, test, tuple(classes) or found, shape, known, preprocessing=preprocessing)


def _matched(found: Sequence[str], classes: Sequence[str], where: str, numbered: bool) -> list[int]:
    """Return the model's label of each class of the data."""
    if not classes:
        return list(range(len(found)))
    if numbered and not set(found) <= set(classes) and len(found) <= len(classes):
        return list(range(len(found)))
    if wrong := [name for name in found if name not in classes]:
        more = f", nor are {len(wrong) - 1} more" if wrong[1:] else ""
        raise DataError(
            f"{where}: class {wrong[0]!r} is none of the model's {len(classes)} classes{more}; "
            f"{nearest(wrong[0], classes)}; rename the folders or classes as the model names them"
        )
    times = Counter(classes)
    if twice := [name for name in found if times[name] > 1]:
        raise DataError(f"{where}: {twice[0]!r} is the name of {times[twice[0]]} of the model's classes; leave it out")
    return [list(classes).index(name) for name in found]
