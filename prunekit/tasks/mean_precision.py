"""Mean average precision of detections, COCO's, with an interval by bootstrap over images.

pycocotools matches detections with boxes and gives the figure. The interval needs the same figure for a thousand data
sets in which image i is there w_i times, with w drawn again each time. Matching does not depend on w, so it is done
once; each data set only counts anew. Of one class, at one threshold, with detections ordered by score:

    right(d) = sum of w over the hits up to d                recall(d) = right(d) / (sum of w over the boxes)
    seen(d)  = sum of w over all that counts up to d         precision(d) = right(d) / seen(d)
    AP       = mean over the levels r of: the best precision at any d whose recall(d) >= r; 0 where none reaches r

1. Both change at detections alone, and recall only at hits: `precision` is needed at the hits only.
2. The best precision "from here on" is a running maximum from the right end.
3. right(d) is a whole number, so `recall >= r` is `right >= n_r` for the least such n_r (`_least_hits`), and the first
   hit that reaches it is found by a binary search (`_first_reaching`).
4. With w = 1 for every image the result is pycocotools' own figure.
"""

import io
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from torch import Tensor

from prunekit.errors import DataError, UsageError
from prunekit.utils.availability import import_of_extra

REPLICATES = 1000
"""Bootstrap samples that an interval is read from."""
SEED = 0
"""Seed of the bootstrap samples, so that an interval is the same each time."""
AT_ONCE = 4_000_000
"""The most numbers in an array of the bootstrap: replicates times detections of a class."""
Array = np.ndarray[Any, np.dtype[Any]]


def coco_evaluation() -> tuple[Any, Any]:
    """Return pycocotools' classes COCO and COCOeval."""
    parts = ("pycocotools.coco", "pycocotools.cocoeval")
    data, evaluation = (import_of_extra(part, "detection", "a mean average precision", UsageError) for part in parts)
    return data.COCO, evaluation.COCOeval


@dataclass(frozen=True, eq=False)
class ClassMatches:
    """The detections of one class in all images, the most confident first, and what they were matched with."""

    images: Array  # (D,) int64, which image each detection is of
    hits: Array  # (T, D) bool, whether it found a box, for each threshold of the intersection over union
    ignored: Array  # (T, D) bool, whether it counts neither as right nor as wrong, as within a crowd
    boxes: Array  # (N,) int64, the number of boxes to find in each image

    def precisions(self, weights: Array, recalls: Array) -> Array:
        """Return the average precision for each threshold, if every image counts as often as its weight says.

        COCO's evaluation gives the same on a data set that repeats each image as often, unless two detections in an
        image have the same score, whose order is open. Weights (B, N) int64 say how often each image counts, in B data
        sets at once; recalls (R,) are the levels at which the precision is read. The result is (B, T) float64,
        0..1; NaN where there is no box to find.
        """
        totals = weights @ self.boxes  # (B,)
        counts = weights[:, self.images]  # (B, D)
        shown = np.cumsum(counts, 1)
        needed = _least_hits(totals, recalls)  # (B, R)
        found = np.zeros((len(weights), len(self.hits)))
        for level, (hit, ignored) in enumerate(zip(self.hits, self.ignored, strict=True)):
            places = np.flatnonzero(hit)  # recall rises at hits alone, and the best precision from there on is at a hit
            if not len(places):
                continue
            seen = np.cumsum(np.where(ignored, 0, counts), 1) if ignored.any() else shown
            right = np.cumsum(counts[:, places], 1)  # (B, H)
            precision = right / (seen[:, places] + np.spacing(1))
            best = np.maximum.accumulate(precision[:, ::-1], 1)[:, ::-1]
            best = np.concatenate([best, np.zeros((len(best), 1))], 1)  # recalls that are never reached
            found[:, level] = np.take_along_axis(best, _first_reaching(right, needed), 1).mean(1)
        found[totals == 0] = np.nan
        return found


def _least_hits(totals: Array, recalls: Array) -> Array:
    """Return the least number of hits, (B, R), of which the share of the totals (B,) is at least each recall."""
    whole = np.maximum(totals, 1)[:, None]
    least = np.ceil(recalls * whole).astype(np.int64)
    least = np.where((least > 0) & ((least - 1) / whole >= recalls), least - 1, least)  # as the division rounds
    enough: Array = np.where(least / whole < recalls, least + 1, least)
    return enough


def _first_reaching(right: Array, needed: Array) -> Array:
    """Return in each row the first place (B, R) at which ascending numbers (B, H) reach the needed ones (B, R)."""
    rows, width = right.shape
    apart = np.arange(rows)[:, None] * (max(int(right.max()), int(needed.max())) + 1)
    places = np.searchsorted((right + apart).ravel(), (needed + apart).ravel()).reshape(needed.shape)
    found: Array = places - np.arange(rows)[:, None] * width
    return found


@dataclass(frozen=True, eq=False)
class AveragePrecisions:
    """The mean average precision of detections in some images."""

    # the mean over classes and the thresholds 0.5, 0.55, ..., 0.95 of the intersection over union, in percent
    map: float
    map50: float  # at the threshold 0.5 alone, in percent
    images: int  # number of images
    matches: tuple[ClassMatches, ...]  # of each class that has boxes or detections
    recalls: Array  # (R,) levels of recall at which the precision is read

    @cached_property
    def interval(self) -> tuple[float, float]:
        """The 95 % interval of `map` in percent: percentile bootstrap over images (Efron 1979, Ann. Stat. 7:1)."""
        generator = np.random.default_rng(SEED)
        drawn = generator.multinomial(self.images, np.full(self.images, 1 / self.images), REPLICATES)
        low, high = np.nanpercentile(self.reweighted(drawn), [2.5, 97.5])
        return float(low), float(high)

    def reweighted(self, weights: Array) -> Array:
        """Return `map` if images count as often as their weights say, (B, N) int64: (B,), NaN without any box."""
        sums, classes = np.zeros(len(weights)), np.zeros(len(weights))
        for each in self.matches:
            step = max(1, AT_ONCE // max(1, len(each.images)))
            for start in range(0, len(weights), step):
                rows = slice(start, start + step)
                means = each.precisions(weights[rows], self.recalls).mean(1)
                sums[rows] += np.nan_to_num(means)
                classes[rows] += ~np.isnan(means)
        with np.errstate(invalid="ignore"):
            found: Array = 100 * sums / classes
        return found


class MeanAveragePrecision:
    """The metric of detections: the mean average precision as pycocotools computes it for COCO (Lin et al. 2014).

    At most 100 detections of a class in an image count. Detections in a crowd count neither as right nor as wrong.
    """

    def __init__(self) -> None:
        coco_evaluation()
        self._boxes: list[dict[str, Any]] = []
        self._detections: list[dict[str, Any]] = []
        self._images = 0

    def update(self, output: Sequence[Mapping[str, Tensor]], targets: Sequence[Mapping[str, Tensor]], /) -> None:
        """Add a batch: of each image detections with `scores` (n,), and targets, perhaps with `iscrowd` (m,).

        Both have `boxes` (n, 4) and `labels` (n,).
        """
        if len(output) != len(targets):
            raise DataError(f"mAP: expected detections for each of {len(targets)} images, got {len(output)}")
        for found, wanted in zip(output, targets, strict=True):
            self._images += 1
            crowds = wanted.get("iscrowd")
            kinds = [0] * len(wanted["labels"]) if crowds is None else crowds.tolist()
            for box, label, crowd in zip(
                wanted["boxes"].double().tolist(), wanted["labels"].tolist(), kinds, strict=True
            ):
                self._boxes.append(self._entry(box, label) | {"id": len(self._boxes) + 1, "iscrowd": int(crowd)})
            parts = found["boxes"].double().tolist(), found["labels"].tolist(), found["scores"].tolist()
            for box, label, score in zip(*parts, strict=True):
                self._detections.append(self._entry(box, label) | {"id": len(self._detections) + 1, "score": score})

    def _entry(self, box: list[float], label: int) -> dict[str, Any]:
        left, top, right, bottom = box
        width, height = right - left, bottom - top
        return {
            "image_id": self._images,
            "category_id": label,
            "bbox": [left, top, width, height],
            "area": width * height,
        }

    def compute(self) -> AveragePrecisions:
        """Return the mean average precision of all batches so far."""
        if not any(not box["iscrowd"] for box in self._boxes):
            raise DataError(
                f"mAP: expected boxes to find, got {self._images} images without any; a mean average precision needs "
                "ground truth: give targets with boxes"
            )
        coco, evaluation = coco_evaluation()
        classes = sorted({box["category_id"] for box in self._boxes})  # others have no precision
        with redirect_stdout(io.StringIO()):
            run = evaluation(self._data_set(coco, self._boxes), self._data_set(coco, self._detections), "bbox")
            run.params.catIds = classes
            run.params.areaRng, run.params.areaRngLbl = run.params.areaRng[:1], run.params.areaRngLbl[:1]
            run.params.maxDets = run.params.maxDets[-1:]
            run.evaluate()
            run.accumulate()
        precisions = run.eval["precision"]  # (thresholds, recalls, classes, 1, 1), -1 for a class without boxes
        at_half = precisions[np.isclose(run.params.iouThrs, 0.5)]
        mean, mean50 = (100 * float(np.mean(values[values > -1])) for values in (precisions, at_half))
        images, each = self._images, run.evalImgs
        matches = (_matches(each[start : start + images], images) for start in range(0, len(each), images))
        there = tuple(one for one in matches if one is not None)
        return AveragePrecisions(mean, mean50, images, there, np.asarray(run.params.recThrs))

    def _data_set(self, coco: Any, annotations: list[dict[str, Any]]) -> Any:
        made = coco()
        made.dataset = {
            "images": [{"id": number} for number in range(1, self._images + 1)],
            "categories": [{"id": label} for label in sorted({one["category_id"] for one in annotations})],
            "annotations": [dict(one) for one in annotations],  # the evaluation adds to them
        }
        made.createIndex()
        return made


def _matches(evaluated: Sequence[Mapping[str, Any] | None], images: int) -> ClassMatches | None:
    """Return the matches of one class from what COCO's evaluation found in each image; None if there are none."""
    there = [(index, found) for index, found in enumerate(evaluated) if found is not None]
    if not there:
        return None
    scores = np.concatenate([found["dtScores"] for _, found in there])
    order = np.argsort(-scores, kind="mergesort")  # as COCO's evaluation orders equal scores
    boxes = np.zeros(images, dtype=np.int64)
    for index, found in there:
        boxes[index] = np.count_nonzero(np.asarray(found["gtIgnore"]) == 0)
    matched = np.concatenate([found["dtMatches"] for _, found in there], 1)[:, order] != 0
    ignored = np.concatenate([found["dtIgnore"] for _, found in there], 1)[:, order].astype(bool)
    which = np.repeat([index for index, _ in there], [len(found["dtScores"]) for _, found in there])
    return ClassMatches(which.astype(np.int64)[order], matched & ~ignored, ignored, boxes)
