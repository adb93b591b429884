"""Settings of a job's inputs: its images, how they are augmented and read, and its model."""

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
    """Brightness is multiplied by 1 - x to 1 + x."""
    contrast: Strength = 0.4
    """Contrast is multiplied by 1 - x to 1 + x."""
    saturation: Strength = 0.4
    """Saturation is multiplied by 1 - x to 1 + x."""
    hue: Annotated[float, Ge(0), Le(0.5)] = 0.0
    """Largest shift of the hue, either way; 1 is a full turn."""


@dataclass(frozen=True)
class RandAugmentSettings(Checked):
    """RandAugment (Cubuk et al. 2020).

    Example:
        >>> import prunekit as pk
        >>> pk.AugmentSettings(rand_augment=pk.RandAugmentSettings(magnitude=5)).rand_augment.magnitude
        5
    """

    num_ops: PositiveInt = 2
    """Operations on each image, one after another."""
    magnitude: Annotated[int, Ge(0), Le(30)] = 9
    """Strength of the operations."""


@dataclass(frozen=True)
class AugmentSettings(Checked):
    """Random changes of training images by torchvision's transforms, in this order.

    Example:
        >>> import prunekit as pk
        >>> pk.DataSettings(augment=pk.AugmentSettings(crop="padded", flip=0.5)).augment.flip
        0.5
    """

    crop: Literal["none", "shift", "padded", "resized"] = "none"
    """`shift` moves an image by up to a tenth; `padded` by up to 4 pixels, as for CIFAR; `resized` resizes a random
    part, as for ImageNet; `none`."""
    scale: Scale | None = None
    """Smallest and largest share of the area in a `resized` crop; null: 0.08 and 1."""
    flip: Probability = 0.0
    """Probability of a horizontal flip."""
    color_jitter: ColorJitterSettings | None = None
    """Random brightness, contrast, saturation and hue."""
    rand_augment: RandAugmentSettings | None = None
    """Random operations of a given strength (RandAugment, Cubuk et al. 2020)."""
    trivial_augment: bool = False
    """Applies one random operation of random strength instead (TrivialAugment, Müller & Hutter 2021)."""
    erase: Probability = 0.0
    """Probability that a rectangle is set to the mean (random erasing, Zhong et al. 2020)."""


Augment = NamedAugment | AugmentSettings
BOXED = ("shapes", "coco", "yolo")
"""Sources of images with boxes, for the task `detection`."""
TEXTUAL = ("causal_lm", "masked_lm", "embedding")
"""Tasks that the source `text` makes samples for, of the built-in ones."""
Head = Literal[
    "image_classification", "text_classification", "token_classification", "causal_lm", "masked_lm", "seq2seq",
    "embedding",
]  # fmt: skip


@dataclass(frozen=True)
class Workers(Checked):
    """Worker processes that read batches ahead."""

    count: int = 0  # number of processes; 0 reads in the calling process
    prefetch: int = 2  # number of batches that each reads ahead
    persistent: bool = True  # whether they stay for the next pass
    pin_memory: bool = True  # whether batches for CUDA are in page-locked memory, and copied while the device computes


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
    """Source of the data. Images: `digits` (in the package), `imagefolder` (a folder for each class), `npz`,
    `torchvision`, `huggingface`. Images with boxes: `shapes` (drawn circles, squares and triangles), `coco`, `yolo`
    (ultralytics' format). Texts, for `causal_lm`, `masked_lm` and `embedding`: `text`, or `huggingface` with a column
    of texts. `own`: what `--data file.py:factory` returns."""
    root: Path | None = None
    """Folder or file of the data. imagefolder: `train/` and `test/` or `val/`, or classes, which are then split.
    torchvision: the folder of its files. huggingface: what `save_to_disk` wrote. npz: the file. coco: `train2017/`,
    `val2017/` and `annotations/instances_train2017.json`, `instances_val2017.json`; or `train/_annotations.coco.json`
    and `valid/`. yolo: a `data.yaml`, or its folder with `images/` and `labels/`. text: a `.txt`, a `.jsonl` with a
    `text` in each line, or a folder of them."""
    name: str | None = None
    """Data set of torchvision, such as `CIFAR10`, or of Hugging Face's hub, in place of `root`, such as
    `uoft-cs/cifar10`. Files are fetched only with `download`. coco: what follows `train` and `val` in file names, such
    as `2017`; null: what is there."""
    images: PositiveInt | None = None
    """For shapes: number of images; null: 240."""
    targets: tuple[Literal["masks", "keypoints"], ...] = ()
    """For detection, besides boxes: `masks` for Mask R-CNN, `keypoints` for Keypoint R-CNN."""
    category_ids: bool = False
    """For coco: keeps the numbers of categories as classes, as in torchvision's weights (91 classes with the
    background); else classes are numbered in order, as by ultralytics."""
    tokenizer: Path | None = None
    """For texts: folder with a `tokenizer.json`; null: the model's folder."""
    window: PositiveInt | None = None
    """For texts: tokens of a sample; null: 128. `causal_lm` and `masked_lm` cut the text into such windows; `masked_lm`
    masks 15 %, by `split_seed`. `embedding` takes each nonempty line, up to this length."""
    stride: PositiveInt | None = None
    """For `causal_lm`: tokens from one window of the test text to the next; null: `window`. With fewer, windows
    overlap, and of each but the first only the last `stride` tokens count, as Hugging Face documents for perplexity."""
    columns: Columns | None = None
    """For huggingface: columns of images and labels; null: the only ones of their kind."""
    labels: bool = True
    """Reads the labels of images. `false`: the dense model's answers take their place, in `image_classification`, whose
    score is then the agreement with the dense model. An imagefolder then needs no folders of classes (each image below
    `root` is taken, in `train/`, `test/` and `val/` if they are there), and an npz no labels; own data sets may return
    images alone."""
    download: bool = False
    """Allows fetching the named data set from the network."""
    image_size: PositiveInt = 32
    """Height and width of an input. Image files are resized to 8/7 of it by their shorter side, and cropped at the
    center. Digits and npz arrays are resized as a whole; images with boxes by their longer side, and padded."""
    mean: Mean | None = None
    """Mean of each color channel, in 0..1; null: ImageNet's, for digits 0.5."""
    std: Std | None = None
    """Standard deviation of each color channel, in 0..1; null: ImageNet's, for digits 0.5."""
    augment: Augment = "none"
    """Random changes of training images: `none`, `shift` by up to a tenth, `flip`, `crop_flip` (padded by 4 pixels, as
    for CIFAR), `resized_crop_flip` (as for ImageNet), or each change by itself."""
    max_corrupt: Count | Annotated[float, Gt(0), Lt(1)] = 0
    """Unreadable images to skip, as a number or a share; more are an error."""
    batch: PositiveInt = 64
    """Images in a batch, over all processes."""
    workers: Count = 0
    """Processes that read ahead."""
    prefetch: PositiveInt = 2
    """Batches that each worker reads ahead."""
    persistent_workers: bool = True
    """Keeps workers from one epoch to the next."""
    pin_memory: bool = True
    """Reads into page-locked memory, on CUDA."""
    test_share: Annotated[float, Gt(0), Lt(1)] = 0.3
    """Share of the test, if the data has no test set. Of texts, the last part; the part before it validates."""
    validation_share: Annotated[float, Gt(0), Lt(1)] = 0.1
    """Share that chooses the best epoch, if the data has no validation set."""
    split_seed: Count = 0
    """Seed of the split into training, validation and test."""
    origin: str | None = None
    """Place to get the data; shown if it is missing."""

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
    """Name of the model in its zoo. hf: also a folder. own: the factory, `file.py:factory`."""
    zoo: Literal["torchvision", "cifar", "timm", "hf", "ultralytics", "own"] = "torchvision"
    """Source of the model. `torchvision`: classifiers and detectors. `cifar`: ResNets for 32x32 images, `resnet8`
    to `resnet110`. `timm`: any model (extra `timm`). `hf`: a model type of transformers, such as `vit` or `llama`, in
    its default configuration, or a folder from `save_pretrained`, with weights as float32 (extra `hf`); it downloads
    nothing and runs no code of a folder. `ultralytics`: a detector such as `yolo11n` or `rtdetr-l` (extra
    `ultralytics`). `own`: what `--model file.py:factory` builds."""
    arguments: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the constructor, or of hf's configuration. `num_classes` comes from the data unless given
    (plus the background in torchvision's detectors), and so does those detectors' `image_size`."""
    weights: str | None = None
    """Weights of torchvision, such as `IMAGENET1K_V1`, or a state dict: `.safetensors`, or `.pt`, `.pth`, `.th`, read
    with `weights_only=True`; ultralytics: also its own `.pt`. null: random, to be trained by `baseline`."""
    origin: str | None = None
    """Place to get the weights; shown if their file is missing."""
    head: Head | None = None
    """For hf: the model's head, by the name of a task; null: the recipe's `task`, else image classification."""

    @property
    def folder(self) -> Path | None:
        """The folder of a model of transformers with its weights; None if the name is no path, or of another zoo."""
        path = Path(self.name)
        named = "/" in self.name or "\\" in self.name or (path / "config.json").is_file()
        return path if self.zoo == "hf" and named else None
