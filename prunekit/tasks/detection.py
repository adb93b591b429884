"""Detection of objects: losses and boxes of torchvision's and ultralytics' detectors, and mean average precision."""

from collections.abc import Mapping, Sequence
from importlib import import_module
from operator import attrgetter
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torchvision.models import detection as torchvision_detectors
from torchvision.ops import box_convert

from prunekit.errors import DataError, ModelError
from prunekit.hooks.wrappers import unwrapped
from prunekit.tasks.detection_heads import FAMILIES, DetectorHeads, OneStage, Queries, TwoStage, Yolo
from prunekit.tasks.mean_precision import MeanAveragePrecision
from prunekit.tasks.task import Score, Task, register_task
from prunekit.utils.inputs import described

Kind = Literal["torchvision", "ultralytics"]
Targets = list[dict[str, Tensor]]
"""For each image `boxes` (n, 4) float, as left, top, right, bottom in pixels of the input, and `labels` (n,) int64 from
0; perhaps `iscrowd` (n,) int64, `masks` (n, H, W) uint8 and `keypoints` (n, K, 3), as x, y and visibility 0, 1 or 2."""
LEAST_CONFIDENCE = 0.001
"""Detections of an ultralytics model below it are left out; this and the next two are its validation's own values."""
OVERLAP = 0.7
"""Intersection over union with a more confident box, from which non-maximum suppression leaves a box out."""
DETECTIONS = 300
"""The most detections in an image of an ultralytics model."""
SECONDS = 1e6
"""Time limit of ultralytics' suppression for an image: what is found must not depend on the machine."""


def detector_kind(model: nn.Module) -> Kind | None:
    """Return whose detector a model is: torchvision's, or one of ultralytics; None for others."""
    inner = unwrapped(model)
    if isinstance(inner, FAMILIES):
        return "torchvision"
    modules = {f"{kind.__module__}.{kind.__name__}" for kind in type(inner).__mro__}
    return "ultralytics" if "ultralytics.nn.tasks.DetectionModel" in modules else None


def _require_kind(model: nn.Module) -> tuple[nn.Module, Kind]:
    kind = detector_kind(model)
    if kind is None:
        raise ModelError(
            f"{type(unwrapped(model)).__name__}: expected a detector of torchvision or of ultralytics for the task "
            "'detection'; another one needs a task of its own, whose `loss_inputs` and `predictions` know it"
        )
    return unwrapped(model), kind


def class_count(model: nn.Module) -> int | None:
    """Return how many classes a detector tells apart, without the background; None if it does not say."""
    inner, kind = _require_kind(model)
    if kind == "ultralytics":
        return int(inner.model[-1].nc)  # type: ignore[index,union-attr]
    if isinstance(inner, torchvision_detectors.FasterRCNN):
        scores = getattr(inner.roi_heads.box_predictor, "cls_score", None)
        return scores.out_features - 1 if isinstance(scores, nn.Linear) else None
    head = getattr(getattr(inner, "head", None), "classification_head", None)
    count = getattr(head, "num_classes", getattr(head, "num_columns", None))
    return count - 1 if isinstance(count, int) else None


def heads(student: nn.Module, teacher: nn.Module) -> DetectorHeads:
    """Return the comparison of two detectors' heads; raise a `ModelError` where they differ in more than channels."""
    (one, kind), (other, kind_of_teacher) = _require_kind(student), _require_kind(teacher)
    if (kind, class_count(student)) != (kind_of_teacher, class_count(teacher)):
        raise ModelError(
            f"distill: expected a teacher that is a detector of {kind} with {class_count(student)} classes, as the "
            f"student is, got one of {kind_of_teacher} with {class_count(teacher)}"
        )
    if kind == "torchvision":
        family = next(kind for kind in FAMILIES if isinstance(one, kind))
        if not isinstance(other, family):
            raise ModelError(
                f"distill: expected a teacher that is a {family.__name__}, as the student is, got "
                f"{type(other).__name__}; give the dense model that it was pruned from, or leave distill out"
            )
        return (TwoStage if family is torchvision_detectors.FasterRCNN else OneStage)(one, other)
    for model in (one, other):
        head = model.model[-1]  # type: ignore[index]
        if not _is_detect(head):
            raise ModelError(
                f"distill: the answers of {type(head).__name__} cannot be compared with a teacher's, because each "
                "model chooses itself what places they are of; leave distill out"
            )
    return Yolo(one, other)


def _is_detect(head: object) -> bool:
    return "Detect" in {kind.__name__ for kind in type(head).__mro__}


def detecting_head(model: nn.Module) -> DetectorHeads | None:
    """Return what a detector says of boxes and their scores; None for other models, and where it says more of them."""
    inner: Any = unwrapped(model)
    kind = detector_kind(inner)
    if kind == "ultralytics" and _is_detect(head := inner.model[-1]):
        return None if hasattr(head, "lrpc") else Yolo(inner, inner)  # that filters places
    config = getattr(inner, "config", None)  # of transformers; detectors of what a text says have one of the text
    if kind == "ultralytics" or (hasattr(config, "num_labels") and not hasattr(config, "text_config")):
        return Queries(inner)
    if isinstance(inner, torchvision_detectors.FasterRCNN):
        return None if inner.roi_heads.has_mask() or inner.roi_heads.has_keypoint() else TwoStage(inner, inner)
    return OneStage(inner, inner) if kind else None


def collate(samples: Sequence[tuple[Tensor, dict[str, Tensor]]]) -> tuple[Tensor, Targets]:
    """Return a batch of samples: images (B, 3, H, W) and the target of each."""
    images = [image for image, _ in samples]
    shapes = {tuple(image.shape) for image in images}
    if len(shapes) > 1:
        raise ValueError(f"images of {sorted(shapes)[:3]}; bring all to one size, with their boxes")
    return torch.stack(images), [target for _, target in samples]


def boxed_images(batch: Any) -> tuple[Tensor | list[Tensor], Targets]:
    """Return images (B, 3, H, W) floating point, and for each a mapping with `boxes` (n, 4) and `labels` (n,)."""
    if isinstance(batch, (tuple, list)) and len(batch) == 2:
        images, targets = batch
        if _are_images(images) and all(map(_is_target, targets)):
            return [*images] if isinstance(images, tuple) else images, [dict(target) for target in targets]
    raise DataError(
        "expected images (B, 3, H, W) floating point, with values 0 to 1, and a list with a mapping for each: `boxes` "
        "(n, 4) as left, top, right, bottom in pixels, and `labels` (n,) of whole numbers from 0"
    )


def _are_images(given: Any) -> bool:
    if isinstance(given, Tensor):
        return given.ndim == 4 and given.is_floating_point()
    if not isinstance(given, (tuple, list)) or not given:
        return False
    return all(isinstance(one, Tensor) and one.ndim == 3 and one.is_floating_point() for one in given)


def _is_target(given: Any) -> bool:
    if not isinstance(given, Mapping):
        return False
    boxes, labels = given.get("boxes"), given.get("labels")
    if not isinstance(boxes, Tensor) or not isinstance(labels, Tensor):
        return False
    return boxes.shape == (len(labels), 4) and boxes.is_floating_point() and labels.dtype == torch.int64


def loss_inputs(model: nn.Module, example: tuple[Any, ...], targets: Targets) -> tuple[Any, ...]:
    """Return what a detector is called with where it computes its loss: its images, and targets in its own form.

    Boxes of crowds are left out, as in torchvision's references.
    """
    inner, kind = _require_kind(model)
    images, plain = example[0], [*targets]
    for at, target in enumerate(targets):
        if "iscrowd" in target and bool(target["iscrowd"].any()):
            alone = target["iscrowd"] == 0
            plain[at] = {name: values[alone] for name, values in target.items()}
    if kind == "ultralytics":
        _with_settings(inner)
        return (_ultralytics_batch(inner, images, plain),)
    heads: Any = getattr(inner, "roi_heads", None)  # of Mask R-CNN and Keypoint R-CNN, which learn more than boxes
    if getattr(heads, "mask_head", None) is not None:
        _require_part(inner, plain, "masks")
    if getattr(heads, "keypoint_head", None) is not None:
        _require_part(inner, plain, "keypoints")
        _require_points(inner, plain, heads.keypoint_predictor.kps_score_lowres.out_channels)
    return images, [{**target, "labels": target["labels"] + 1} for target in plain]  # 0 is the background


def _require_part(model: nn.Module, targets: Targets, name: str) -> None:
    if not all(name in target for target in targets):
        raise DataError(
            f"{type(model).__name__} learns {name}, and the targets have {', '.join(targets[0]) or 'nothing'}: give "
            f"data with {name}; of a recipe's data they are read with data.targets: [{name}]"
        )


def _require_points(model: nn.Module, targets: Targets, count: int) -> None:
    given = targets[0]["keypoints"].shape[1]
    if given != count:
        argument = "model.arguments.num_keypoints" if isinstance(model, FAMILIES) else "its number of keypoints"
        raise ModelError(
            f"{type(model).__name__}: it knows {count} keypoints of an object, and the data has {given}; set {argument}"
        )


def _with_settings(model: Any) -> None:
    """Give an ultralytics model the settings that its loss reads, as its trainer does, and have it made anew."""
    if not hasattr(getattr(model, "args", None), "box"):
        given = model.args if isinstance(getattr(model, "args", None), Mapping) else {}
        utils = import_module("ultralytics.utils")
        model.args = utils.IterableSimpleNamespace(**{**utils.DEFAULT_CFG_DICT, **given})
    if not hasattr(model, "nc"):  # which RT-DETR's loss reads
        model.nc = model.model[-1].nc
    model.criterion = None  # it holds tensors on the device that the model was on


def _ultralytics_batch(model: Any, images: Tensor, targets: Targets) -> dict[str, Tensor]:
    """Return a batch as ultralytics' loaders make it: boxes of all images together, as shares of the image."""
    height, width = images.shape[-2:]
    stride = int(max(model.stride))
    if height % stride or width % stride:
        raise ModelError(
            f"{type(model).__name__}: expected images whose height and width are multiples of {stride}, got {height} x "
            f"{width}; set data.image_size"
        )
    size = images.new_tensor([width, height, width, height])
    numbers = [torch.full((len(target["labels"]),), float(i)) for i, target in enumerate(targets)]
    boxes = torch.cat([box_convert(target["boxes"].to(images), "xyxy", "cxcywh") for target in targets]) / size
    batch = {
        "img": images,
        "batch_idx": torch.cat(numbers).to(images),
        "cls": torch.cat([target["labels"] for target in targets])[:, None].to(images),
        "bboxes": boxes,
    }
    head = {kind.__name__ for kind in type(model.model[-1]).__mro__}
    if "Segment" in head:
        _require_part(model, targets, "masks")
        numbered = []  # of each pixel the number, from 1, of the object that it is of, 0 for none; the later ones win
        for target in targets:
            masks = target["masks"].bool()  # (n, H, W)
            there = masks * torch.arange(1, len(masks) + 1, device=masks.device)[:, None, None]
            numbered.append(there.amax(0) if len(masks) else there.new_zeros(there.shape[1:]))
        batch["masks"] = torch.stack(numbered).to(images)
    if "Pose" in head:
        _require_part(model, targets, "keypoints")
        _require_points(model, targets, model.model[-1].kpt_shape[0])
        points = torch.cat([target["keypoints"] for target in targets]).to(images)
        scale = images.new_tensor([width, height, 1])
        batch["keypoints"] = (points / scale)[..., : model.model[-1].kpt_shape[1]]
    return batch


def loss(output: Any, targets: Targets) -> Tensor:
    """Return the sum of a detector's losses, the mean over the batch.

    The model returned to `loss_inputs` torchvision's mapping of losses, or ultralytics' pair of losses, which are sums
    over the batch if there are several, and their values for display.
    """
    if isinstance(output, Mapping) and output and all(isinstance(value, Tensor) for value in output.values()):
        return torch.stack([value.float().sum() for value in output.values()]).sum()
    if isinstance(output, tuple) and len(output) == 2 and isinstance(output[0], Tensor):
        losses = output[0]
        return losses.sum() / len(targets) if losses.ndim else losses
    raise ModelError(f"expected the losses of a detector of torchvision or ultralytics, got {described(output)}")


def predictions(model: nn.Module, example: tuple[Any, ...], output: Any) -> Targets:
    """Return what a detector found in each image: `boxes` (n, 4) in pixels of the input, `scores` and `labels`, from 0.

    torchvision's detectors suppress boxes that overlap themselves; ultralytics' outputs are decoded and suppressed as
    in its validation.
    """
    inner, kind = _require_kind(model)
    if kind == "torchvision":
        if not isinstance(output, list):
            raise ModelError(f"expected a list with the detections of each image, got {described(output)}")
        return [{**found, "labels": found["labels"] - 1} for found in output]
    return decoded(inner, output, tuple(example[0].shape[-2:]))


def decoded(model: Any, output: Any, size: tuple[int, int]) -> Targets:
    """Return what an ultralytics detector found in each image, from its output in eval mode."""
    head, given = model.model[-1], output[0] if isinstance(output, (tuple, list)) else output
    if "RTDETRDecoder" in {kind.__name__ for kind in type(head).__mro__}:
        scale = given.new_tensor([size[1], size[0], size[1], size[0]])
        sure = [found[found[:, 4] > LEAST_CONFIDENCE] for found in given.float()]
        rows = [torch.cat([box_convert(one[:, :4], "cxcywh", "xyxy") * scale, one[:, 4:]], 1) for one in sure]
    else:
        rows = import_module("ultralytics.utils.nms").non_max_suppression(
            given,
            LEAST_CONFIDENCE,
            OVERLAP,
            multi_label=True,
            max_det=DETECTIONS,
            nc=head.nc,
            end2end=bool(getattr(head, "end2end", False)),
            max_time_img=SECONDS,
        )
    return [{"boxes": row[:, :4], "scores": row[:, 4], "labels": row[:, 5].long()} for row in rows]


DETECTION = register_task(
    "detection", data="images with boxes and their classes", measures="the detector's own loss; mAP@50:95, mAP@50"
)(
    Task(
        "detection",
        loss,
        None,
        (
            Score("map", "mAP@50:95", attrgetter("map"), attrgetter("interval"), interval_by="bootstrap"),
            Score("map50", "mAP@50", attrgetter("map50")),
        ),
        boxed_images,
        samples="images",
        collate=collate,
        metric=MeanAveragePrecision,
        loss_inputs=loss_inputs,
        predictions=predictions,
        loss_in_train_mode=True,
        class_count=class_count,
        heads=heads,
    )
)
"""Images with boxes, for detectors of torchvision and ultralytics; their own loss; mean average precision."""
