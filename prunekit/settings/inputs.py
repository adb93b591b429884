"""Settings of a job's inputs: its images, how they are augmented and read, and its model."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le, Lt, MaxLen, MinLen

from prunekit.known_names import Count, PositiveInt
from prunekit.settings.validation import Checked

Strength = Annotated[float, Ge(0)]
Probability = Annotated[float, Ge(0), Le(1)]
Scale = Annotated[tuple[Annotated[float, Gt(0), Le(1)], ...], MinLen(2), MaxLen(2)]
Columns = Annotated[tuple[str, ...], MinLen(2), MaxLen(2)]
NamedAugment = Literal["none", "shift", "flip", "crop_flip", "resized_crop_flip"]
Mean = Annotated[tuple[float, ...], MinLen(3), MaxLen(3)]
Std = Annotated[tuple[Annotated[float, Gt(0)], ...], MinLen(3), MaxLen(3)]


@dataclass(frozen=True)
class ColorJitterSettings(Checked):
    """Random changes of color: factors from 1 - x to 1 + x, and a shift of the hue from -x to x.

    Example:
        >>> import prunekit as pk
        >>> pk.AugmentSettings(color_jitter=pk.ColorJitterSettings(brightness=0.2)).color_jitter.brightness
        0.2
    """

    brightness: Strength = 0.4
    """The brightness is multiplied by a factor from 1 - x to 1 + x."""
    contrast: Strength = 0.4
    """The contrast is multiplied by a factor from 1 - x to 1 + x."""
    saturation: Strength = 0.4
    """The saturation is multiplied by a factor from 1 - x to 1 + x."""
    hue: Annotated[float, Ge(0), Le(0.5)] = 0.0
    """The hue is shifted by -x to x; 1 is a full turn."""


@dataclass(frozen=True)
class RandAugmentSettings(Checked):
    """RandAugment (Cubuk et al. 2020).

    Example:
        >>> import prunekit as pk
        >>> pk.AugmentSettings(rand_augment=pk.RandAugmentSettings(magnitude=5)).rand_augment.magnitude
        5
    """

    num_ops: PositiveInt = 2
    """Number of operations that are applied to an image, one after another."""
    magnitude: Annotated[int, Ge(0), Le(30)] = 9
    """Strength of the operations, up to 30."""


@dataclass(frozen=True)
class AugmentSettings(Checked):
    """Random changes of training images by torchvision's transforms, in this order.

    Example:
        >>> import prunekit as pk
        >>> pk.DataSettings(augment=pk.AugmentSettings(crop="padded", flip=0.5)).augment.flip
        0.5
    """

    crop: Literal["none", "shift", "padded", "resized"] = "none"
    """How an image is cropped: `shift` moves it by up to a tenth, `padded` by up to 4 pixels (as for CIFAR),
    `resized` takes a random part and resizes it (as for ImageNet)."""
    scale: Scale | None = None
    """Smallest and largest share of the image's area that a `resized` crop shows; null: 0.08 and 1."""
    flip: Probability = 0.0
    """Probability that an image is flipped horizontally."""
    color_jitter: ColorJitterSettings | None = None
    """Random brightness, contrast, saturation and hue."""
    rand_augment: RandAugmentSettings | None = None
    """RandAugment (Cubuk et al. 2020): random operations of a given strength."""
    trivial_augment: bool = False
    """TrivialAugment (Müller & Hutter 2021): one random operation of random strength, instead of RandAugment."""
    erase: Probability = 0.0
    """Probability that a rectangle is set to the mean (random erasing, Zhong et al. 2020)."""


Augment = NamedAugment | AugmentSettings
BOXED = ("shapes", "coco", "yolo")
"""Sources of images with boxes, for the task `detection`."""
TEXTUAL = ("causal_lm", "masked_lm", "embedding")
"""Tasks that the source `text` makes samples for, of the built-in ones."""
Head = Literal[
    "image_classification",
    "text_classification",
    "token_classification",
    "causal_lm",
    "masked_lm",
    "seq2seq",
    "embedding",
]


@dataclass(frozen=True)
class Workers(Checked):
    """Worker processes that read batches ahead."""

    count: int = 0  # number of processes; 0 reads in the calling process
    prefetch: int = 2  # number of batches that each reads ahead
    persistent: bool = True  # whether they stay for the next pass
    # whether batches for a CUDA device are in page-locked memory, from which they are copied while the device computes
    pin_memory: bool = True


@dataclass(frozen=True)
class DataSettings(Checked):
    """Images, how they are split, and how they become inputs.

    Example:
        >>> import prunekit as pk
        >>> photos = pk.DataSettings("imagefolder", root="photos", image_size=224, augment="crop_flip", workers=4)
        >>> photos.batch, photos.test_share
        (64, 0.3)
        >>> pk.DataSettings("imagefolders")
        Traceback (most recent call last):
        prunekit.errors.SettingsError: DataSettings: source: expected one of 'digits', ... did you mean 'imagefolder'?
    """

    source: Literal[
        "digits", "imagefolder", "npz", "torchvision", "huggingface", "shapes", "coco", "yolo", "text", "own"
    ] = "digits"  # fmt: skip
    """Where the images are from: the handwritten digits that come with the package, a folder with one folder of images
    for each class, an .npz file, a data set of torchvision or of Hugging Face, or `own`: what `--data file.py:factory`
    returns. For the task `detection`: `shapes` (drawn circles, squares and triangles with their boxes), `coco` (a
    data set in the format of COCO) or `yolo` (one in that of ultralytics). For the tasks `causal_lm`, `masked_lm` and
    `embedding`: `text`, and `huggingface` with a column of texts."""
    root: Path | None = None
    """Folder (imagefolder: `train/` and `test/` or `val/`, or classes alone, which are split; torchvision: where its
    files are; huggingface: what `save_to_disk` wrote; coco: `annotations/instances_train2017.json` and
    `instances_val2017.json` with `train2017/` and `val2017/`, or `train/_annotations.coco.json` with `valid/`; yolo:
    `images/`, `labels/` and a `data.yaml`) or file (npz; yolo: a `data.yaml`). Text: a file (.txt, or .jsonl with a
    `text` in each line), or a folder of such files."""
    name: str | None = None
    """A data set of torchvision, such as `CIFAR10`, or of Hugging Face's hub in the place of `root`, such as
    `uoft-cs/cifar10`; files are fetched only with `download`. For coco, what follows `train` and `val` in the names of
    its files, such as `2017`; null: what is there."""
    images: PositiveInt | None = None
    """For shapes: the number of images, each the same whatever their number; null: 240."""
    targets: tuple[Literal["masks", "keypoints"], ...] = ()
    """For detection: what is read besides boxes and their classes, for models that learn it: `masks` for Mask R-CNN,
    `keypoints` for Keypoint R-CNN."""
    category_ids: bool = False
    """For coco: whether a class's number is that of its category, as in torchvision's weights for COCO, which have 91
    classes with the background, of which 80 occur; else classes are numbered in their order, as by ultralytics."""
    tokenizer: Path | None = None
    """For texts: the folder with the tokenizer, a `tokenizer.json`; null: that of the model's folder."""
    window: PositiveInt | None = None
    """For texts: tokens of a sample. Of `causal_lm` and `masked_lm` the text is cut into windows of so many, of which
    15 % are masked for `masked_lm`, the same for the same `split_seed`; of `embedding` each line that is not empty is a
    sample, of at most so many. null: 128."""
    columns: Columns | None = None
    """For huggingface: the columns of images and labels; null: the only ones of their kind."""
    download: bool = False
    """Whether files of the named data set may be fetched from the network."""
    image_size: PositiveInt = 32
    """Height and width of an input. An image file of another size is resized to 8/7 of it by its shorter side and its
    center taken; the digits and the arrays of an npz are resized to it as a whole; images with boxes are resized by
    their longer side and padded."""
    mean: Mean | None = None
    """Mean of a pixel in 0..1 for each of three channels, which is subtracted; null: ImageNet's, and 0.5 for the
    digits."""
    std: Std | None = None
    """Standard deviation of a pixel in 0..1 for each of three channels, which divides; null: ImageNet's, and 0.5 for
    the digits."""
    augment: Augment = "none"
    """For training images only: `shift` by up to a tenth, `flip`, `crop_flip` (padded by 4 pixels, as for CIFAR),
    `resized_crop_flip` (as for ImageNet), or the random changes one by one."""
    max_corrupt: Count | Annotated[float, Gt(0), Lt(1)] = 0
    """The most images that cannot be read and are skipped, as a number or as a share of all images; more are an
    error."""
    batch: PositiveInt = 64
    """Images in a batch, of all processes together if several train."""
    workers: Count = 0
    """Number of processes that read images ahead; 0: none."""
    prefetch: PositiveInt = 2
    """Number of batches that each worker reads ahead."""
    persistent_workers: bool = True
    """Whether workers stay from one epoch to the next, both those of training and those of validation."""
    pin_memory: bool = True
    """Whether workers read into page-locked memory if the device is CUDA."""
    test_share: Annotated[float, Gt(0), Lt(1)] = 0.3
    """Share of the images that are held out for the test, if the data has no test images of its own. Of texts it is the
    last part, and the one before it is for validation."""
    validation_share: Annotated[float, Gt(0), Lt(1)] = 0.1
    """Share of the images that choose the best epoch and are not trained on, if the data has no such images of its
    own."""
    split_seed: Count = 0
    """Seed of the split into training, validation and test images."""
    origin: str | None = None
    """Where to get the data of this recipe; shown if it is missing."""

    @property
    def reading(self) -> Workers:
        """The worker processes that read batches."""
        return Workers(self.workers, self.prefetch, self.persistent_workers, self.pin_memory)


@dataclass(frozen=True)
class ModelSettings(Checked):
    """A model: a zoo's constructor, its arguments, and where the weights come from.

    Example:
        >>> import prunekit as pk
        >>> pk.ModelSettings("resnet18", weights="IMAGENET1K_V1").zoo
        'torchvision'
        >>> pk.ModelSettings("resnet56", zoo="cifr")
        Traceback (most recent call last):
        prunekit.errors.SettingsError: ModelSettings: zoo: expected one of ... got 'cifr'; did you mean 'cifar'?
    """

    name: str
    """Name of the model in its zoo; for `hf` also the folder that has it; for your own code the factory,
    `file.py:factory`."""
    zoo: Literal["torchvision", "cifar", "timm", "hf", "ultralytics", "own"] = "torchvision"
    """Where the model is from: torchvision, the package's own ResNets, timm, transformers, ultralytics, or your own
    code. `torchvision`: its classifiers and detectors. `cifar`: ResNets for 32x32 images, `resnet8` to `resnet110`.
    `timm`: any of its models (extra `timm`). `hf`: a transformers model type such as `vit` or `llama` in its default
    configuration, or a folder that `save_pretrained` wrote, with its weights, which become float32 (extra `hf`);
    nothing is downloaded, and no code of a folder is run. `ultralytics`: a detector such as `yolo11n` or `rtdetr-l`
    (extra `ultralytics`). `own`: what `--model file.py:factory` builds."""
    arguments: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the constructor, for `hf` of the configuration; `num_classes` is filled in from the data
    when not given, of torchvision's detectors with one more for the background, and so is their `image_size`."""
    weights: str | None = None
    """A torchvision weights name such as `IMAGENET1K_V1`, or a path to a `.safetensors` or `.pt`/`.pth`/`.th` state
    dict (the latter read with `weights_only=True`); for `ultralytics` also its own `.pt`. None: random, to be trained
    by `baseline`."""
    origin: str | None = None
    """Where to get weights for this recipe; shown if their file is missing."""
    head: Head | None = None
    """For `hf`: what the model has on top, by the name of the task that it is for; null: that of the recipe's `task`,
    or a classifier of images."""

    @property
    def folder(self) -> Path | None:
        """The folder of a model of transformers with its weights; None if the name is no path, or of another zoo."""
        path = Path(self.name)
        named = "/" in self.name or "\\" in self.name or (path / "config.json").is_file()
        return path if self.zoo == "hf" and named else None
