"""Heads of detectors, compared for distillation and repair: what two models say of the same places."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.models.detection import FCOS, FasterRCNN, RetinaNet
from torchvision.models.detection.rpn import concat_box_prediction_layers
from torchvision.models.detection.ssd import SSD

from prunekit.errors import ModelError
from prunekit.hooks.hook import recomputing
from prunekit.hooks.owner import HookOwner
from prunekit.hooks.wrappers import unwrapped
from prunekit.utils.tensors import gather

SURE = 0.1
"""Least probability that a place holds an object, from which the teacher's box there is compared."""
FAMILIES = (FasterRCNN, RetinaNet, FCOS, SSD)
"""The detectors of torchvision."""
ANCHORS = ("sizes", "scales", "aspect_ratios", "steps")
"""Attributes of torchvision's generators that anchors follow from."""


@dataclass(frozen=True)
class Said:
    """The answers of a head about N places: anchors of all images, or proposals."""

    scores: Tensor  # logits (N, classes)
    # deltas or distances (N, 4), those of each class (N, classes, 4), or logits of distances (N, 4, bins)
    boxes: Tensor
    background: bool = False  # whether the scores share one softmax, with the background first; else a sigmoid each
    centerness: Tensor | None = None  # logits (N, 1)
    # more numbers of each place, (N, ...), such as of its mask or keypoints; or of each image, such as prototypes; made
    # where they are compared, as distillation does not look at them
    more: Callable[[], Mapping[str, Tensor]] = dict

    def detected(self) -> dict[str, Tensor]:
        """Return scores as probabilities of classes (N, classes), and boxes (N, 4) and more by that of an object."""
        each, sure = self.wide().likely()
        if self.centerness is not None:  # as FCOS scores what it detects
            each, sure = (
                one.sqrt() for one in (each * self.centerness.sigmoid(), sure * self.centerness[:, 0].sigmoid())
            )
        boxes = self.boxes
        if boxes.ndim == 3 and self.background:  # of each class, by its probability
            boxes, sure = (boxes[:, 1:] * each[:, :, None]).flatten(1), torch.ones_like(sure)
        elif boxes.ndim == 3:  # the mean of distances
            boxes = boxes.softmax(2) @ torch.arange(boxes.shape[2]).to(boxes)
        places = {"boxes": boxes, **self.more()}
        by_place = {
            key: one.flatten(1) * sure[:, None] if len(one) == len(sure) else one for key, one in places.items()
        }
        return {"scores": each, **by_place}

    def likely(self) -> tuple[Tensor, Tensor]:
        """Return the probabilities of classes (N, classes), and of any object (N,)."""
        each = self.scores.softmax(1)[:, 1:] if self.background else self.scores.sigmoid()
        return each, each.sum(1) if self.background else each.amax(1)

    def wide(self) -> Said:
        """Return the same in float32 at least."""
        narrow = {k: v.float() for k, v in vars(self).items() if isinstance(v, Tensor) and v.dtype.itemsize <= 2}
        return replace(self, **narrow)  # type: ignore[arg-type]  # background is no tensor


def head_error(student: Said, teacher: Said) -> Tensor:
    """Return how far a student's head is from its teacher's: 0 where they say the same, else more.

    The KL divergence of classes, summed over all places, and of each place that the teacher is sure of its confidence
    times the error of the box, all over the sum of these confidences, which stands for the number of places with an
    object in a detector's own loss. Boxes are compared by smooth L1, their distances by the KL divergence if the head
    gives distributions.

    Sources: Chen et al. 2017, "Learning efficient object detection models with knowledge distillation" (classes and
    boxes); Zheng et al. 2022, "Localization distillation for dense object detection" (distributions of distances).

    Example:
        >>> import torch
        >>> from prunekit.tasks.detection_heads import Said, head_error
        >>> teacher = Said(torch.tensor([[2.0, -3.0], [-5.0, -5.0]]), torch.zeros(2, 4))
        >>> float(head_error(teacher, teacher))
        0.0
        >>> float(head_error(Said(teacher.scores, torch.ones(2, 4)), teacher))  # of the box that it is sure of
        1.76...
    """
    given, wanted = student.wide(), teacher.wide()
    if wanted.background:
        known, likely = (said.scores.log_softmax(1) for said in (given, wanted))
        classes = F.kl_div(known, likely, reduction="none", log_target=True).sum(1)
    else:
        classes = _of_probabilities(given.scores, wanted.scores)
    each, sure = wanted.likely()
    sure = sure * (sure >= SURE)
    if wanted.boxes.ndim == 3 and wanted.background:
        boxes = F.smooth_l1_loss(given.boxes[:, 1:], wanted.boxes[:, 1:], reduction="none").sum(2)
        boxes = (boxes * each).sum(1) / each.sum(1).clamp_min(SURE)
    elif wanted.boxes.ndim == 3:
        known, likely = (said.boxes.log_softmax(2) for said in (given, wanted))
        boxes = F.kl_div(known, likely, reduction="none", log_target=True).sum((1, 2))
    else:
        boxes = F.smooth_l1_loss(given.boxes, wanted.boxes, reduction="none").sum(1)
    if wanted.centerness is not None and given.centerness is not None:
        boxes = boxes + _of_probabilities(given.centerness, wanted.centerness)
    error: Tensor = (classes.sum() + (sure * boxes).sum()) / sure.sum().clamp_min(1)
    return error


def _of_probabilities(student: Tensor, teacher: Tensor) -> Tensor:
    """Return KL divergences of probabilities, each from a logit (N, K), summed over K."""
    sure = teacher.sigmoid()
    there = sure * (F.logsigmoid(teacher) - F.logsigmoid(student))
    return (there + (1 - sure) * (F.logsigmoid(-teacher) - F.logsigmoid(-student))).sum(1)


class DetectorHeads(HookOwner):
    """A comparison of two detectors' heads in training, see `prunekit.tasks.task.HeadComparison`.

    Hooks note what the student's backbone reads and its heads say. The teacher is not called as a whole: it has its
    backbone and heads judge the same tensors, so that it sees the very view, as resized and padded by the student, and
    the same proposals, whatever the student draws at random.
    """

    reads: tuple[str, ...] = ()  # paths of modules whose arguments are noted
    says: tuple[str, ...]  # paths of modules whose results are noted
    selects = False  # whether scores decide which places the last head says something of

    def __init__(self, student: nn.Module, teacher: nn.Module) -> None:
        super().__init__()
        self.student: Any = student
        self.teacher: Any = teacher
        self.noted: dict[str, Any] = {}
        one, other = ({}, {}) if student is teacher else (self.facts(student), self.facts(teacher))
        for name, value in one.items():
            if value != other[name]:
                raise ModelError(
                    f"distill: expected a teacher whose heads answer as the student's do; {name}: {other[name]} of the "
                    f"teacher, {value} of the student. Give the dense model that it was pruned from, or leave distill "
                    "out"
                )

    def facts(self, model: Any) -> Mapping[str, Any]:
        """Return what student and teacher must have in common, by its name."""
        raise NotImplementedError

    def answers(self) -> tuple[Any, ...]:
        """Return what the teacher's heads return for what the student noted, in the order of `says`."""
        raise NotImplementedError

    def said(self, answers: tuple[Any, ...]) -> Iterator[Said]:
        """Yield what heads say, from what they return."""
        raise NotImplementedError

    def register(self) -> None:
        """Note what modules of the student read and say in passes with gradients."""
        for path in self.reads:
            self.own_forward_pre(self.student.get_submodule(path), partial(self._note, f"{path} reads"))
        for path in self.says:
            self.own_forward(self.student.get_submodule(path), partial(self._note, path))

    def _note(self, key: str, module: nn.Module, arguments: Any, named: Any, *result: Any) -> None:
        if torch.is_grad_enabled() and not recomputing():
            self.noted[key] = result[0] if result else arguments

    def teach(self) -> list[Said]:
        """Return what the teacher's heads say of the last batch that the student saw."""
        missing = [path for path in self.says if path not in self.noted]
        if missing:
            raise ModelError(f"distill: {', '.join(missing)} of the student did not run in this step; leave it out")
        return list(self.said(self.answers()))

    def error(self, taught: list[Said]) -> Tensor:
        """Return the mean over heads of `head_error`, and forget the batch."""
        answers = tuple(self.noted[path] for path in self.says)
        self.noted = {}
        pairs = zip(self.said(answers), taught, strict=True)
        return torch.stack([head_error(one, other) for one, other in pairs]).mean()

    def detections(self, model: nn.Module, run: Callable[[], Any], *, whole: bool) -> tuple[Any, dict[str, Tensor]]:
        """Run a model, to its end if `whole`, and return its output, else None, and what its heads have detected.

        That is `Said.detected` of both heads of two stages, or of the branch by which a model of one stage detects: of
        two, the second where it is `end2end`.
        """
        noted = list[Any]()

        def note(_module: nn.Module, _arguments: Any, answer: Any) -> None:
            noted.append(answer)
            if len(noted) == len(self.says) and not whole:
                raise _DetectedError

        heads, output = [unwrapped(model).get_submodule(path) for path in self.says], None
        with ExitStack() as hooks:
            for head in heads:
                hooks.callback(head.register_forward_hook(note).remove)
            with suppress(_DetectedError):
                output = run()
        said = [*self.said(tuple(noted))]
        if not self.selects:
            said = said[-1:] if getattr(heads[0], "end2end", False) else said[:1]
        return output, {
            f"{name} {at}" if at else name: one for at, each in enumerate(said) for name, one in each.detected().items()
        }


class _DetectedError(Exception):
    """The answer of a head is known, and nothing behind it need run."""


class OneStage(DetectorHeads):
    """The head of torchvision's SSD, RetinaNet and FCOS."""

    reads, says = ("backbone",), ("head",)

    def facts(self, model: Any) -> Mapping[str, Any]:
        """Return its anchors, and how it codes boxes and normalizes images."""
        return _of_torchvision(model, model.anchor_generator, model.box_coder)

    def answers(self) -> tuple[Any, ...]:
        """Return the answers of the head about the student's images."""
        features = self.teacher.backbone(*self.noted["backbone reads"])
        return (self.teacher.head([features] if isinstance(features, Tensor) else list(features.values())),)

    def said(self, answers: tuple[Any, ...]) -> Iterator[Said]:
        """Yield what is said of all anchors of all images."""
        flat = {name: values.flatten(0, 1) for name, values in answers[0].items()}
        background, center = isinstance(self.student, SSD), flat.get("bbox_ctrness")
        yield Said(flat["cls_logits"], flat["bbox_regression"], background, center)


class TwoStage(DetectorHeads):
    """The heads of torchvision's Faster R-CNN: that of the RPN, and the box head on the student's proposals."""

    reads, says = ("backbone", "roi_heads.box_roi_pool"), ("rpn.head", "roi_heads.box_predictor")
    selects = True

    def facts(self, model: Any) -> Mapping[str, Any]:
        """Return its anchors, and how it codes boxes and normalizes images."""
        return _of_torchvision(model, model.rpn.anchor_generator, model.rpn.box_coder, model.roi_heads.box_coder)

    def answers(self) -> tuple[Any, ...]:
        """Return the answers about the student's images, and about its proposals, which it drew at random."""
        features = self.teacher.backbone(*self.noted["backbone reads"])
        features = {"0": features} if isinstance(features, Tensor) else features
        heads, (_, *places) = self.teacher.roi_heads, self.noted["roi_heads.box_roi_pool reads"]
        boxes = heads.box_predictor(heads.box_head(heads.box_roi_pool(features, *places)))
        return self.teacher.rpn.head(list(features.values())), boxes

    def said(self, answers: tuple[Any, ...]) -> Iterator[Said]:
        """Yield what is said of all anchors, and of all proposals."""
        (objects, deltas), (scores, boxes) = answers
        yield Said(*concat_box_prediction_layers(objects, deltas))
        yield Said(scores, boxes.unflatten(1, (-1, 4)), background=True)


class Yolo(DetectorHeads):
    """The head of ultralytics' YOLO: its raw maps in train mode, of one branch or two."""

    reads = ("model.0",)

    def __init__(self, student: nn.Module, teacher: nn.Module) -> None:
        self.says = (f"model.{len(student.model) - 1}",)  # type: ignore[arg-type]
        super().__init__(student, teacher)

    def facts(self, model: Any) -> Mapping[str, Any]:
        """Return the branches of the head, its strides, and the bins of each distance."""
        head = model.model[-1]
        branches = [getattr(head, name, None) is not None for name in ("cv2", "one2one_cv2")]
        branches_of = {(True, False): "one2many", (True, True): "one2many and one2one"}
        return {
            "branches": branches_of.get((branches[0], branches[1]), "one2one, because it is fused"),
            "strides": [float(one) for one in head.stride],
            "bins": head.reg_max,
        }

    def answers(self) -> tuple[Any, ...]:
        """Return the raw maps for the student's images."""
        return (self.teacher(*self.noted["model.0 reads"]),)

    def said(self, answers: tuple[Any, ...]) -> Iterator[Said]:
        """Yield what each branch says of all anchors of all images."""
        maps = answers[0] if isinstance(answers[0], dict) else answers[0][1]  # in eval mode behind the decoded boxes
        for branch in [maps[name] for name in ("one2many", "one2one") if maps.get(name)] or [maps]:
            scores, boxes = (_of_places(branch[name]) for name in ("scores", "boxes"))
            boxes = boxes if boxes.shape[1] == 4 else boxes.view(len(boxes), 4, -1)
            yield Said(scores, boxes, more=partial(_more_said, branch))


class Queries(DetectorHeads):
    """The decoder of a DETR, of ultralytics or transformers, compared by queries of the same places."""

    selects = True

    def __init__(self, model: nn.Module) -> None:
        layers: Any = getattr(model, "model", None)
        self.says = (f"model.{len(layers) - 1}",) if isinstance(layers, nn.Sequential) else ("",)
        super().__init__(model, model)

    def said(self, answers: tuple[Any, ...]) -> Iterator[Said]:
        """Yield what is said of all queries, and, before the decoder, of the places that become queries."""
        (answer,) = answers
        if isinstance(answer, tuple):  # of ultralytics
            boxes, scores, first_boxes, first_scores, _ = answer[1] if len(answer) == 2 else answer
            places = [(scores[-1], boxes[-1]), (first_scores, first_boxes)]
        else:
            first = [answer.get(name) for name in ("enc_topk_logits", "enc_topk_bboxes")]
            places = [(answer.logits, answer.pred_boxes), *([] if None in first else [tuple(first)])]
        nothing = places[0][0].shape[-1] - 1 == getattr(getattr(self.student, "config", None), "num_labels", -1)
        for scores, boxes in places:
            scores = scores.flatten(0, 1)
            yield Said(scores.roll(1, 1) if nothing else scores, boxes.flatten(0, 1), nothing)


def _of_places(numbers: Tensor) -> Tensor:
    return numbers.transpose(1, 2).flatten(0, 1)


def _more_said(branch: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return what a branch says beside scores and boxes."""
    every = {name: one for name in sorted(branch.keys() - {"scores", "boxes", "feats"}) for one in gather(branch[name])}
    count = branch["scores"].shape[2:]
    return {name: _of_places(one) if one.shape[2:] == count else one for name, one in every.items()}


def _of_torchvision(model: Any, anchors: Any, *coders: Any) -> dict[str, Any]:
    """Return what two of torchvision's detectors of one family must have in common."""
    return {
        "anchors": {name: getattr(anchors, name) for name in ANCHORS if hasattr(anchors, name)},
        "coding of boxes": [getattr(one, "weights", getattr(one, "normalize_by_size", None)) for one in coders],
        "normalization": (list(model.transform.image_mean), list(model.transform.image_std)),
    }
