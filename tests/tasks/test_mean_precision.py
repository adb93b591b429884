"""Mean average precision: COCO's own figures, and the bootstrap over images."""

from __future__ import annotations

import contextlib
import io
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from prunekit.errors import DataError, UsageError
from prunekit.tasks.mean_precision import AveragePrecisions, MeanAveragePrecision

pytest.importorskip("pycocotools")
Annotations = list[dict[str, Tensor]]


def scene(images: int = 40, classes: int = 4, seed: int = 0) -> tuple[Annotations, Annotations]:
    """Boxes, some of crowds, and detections: some near, some doubled, some wrong, with equal scores among them."""
    draw = torch.Generator().manual_seed(seed)

    def numbers(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=draw)

    found, wanted = [], []
    for index in range(images):
        count = 0 if index % 7 == 3 else int(numbers(1) * 6) + 1
        corner, size = 80 * numbers(count, 2), 8 + 60 * numbers(count, 2)
        boxes = torch.cat([corner, corner + size], 1)
        labels = (numbers(count) * (classes - 1)).long()  # the last class has no boxes
        wanted.append({"boxes": boxes, "labels": labels, "iscrowd": (numbers(count) < 0.15).long()})
        near = (boxes + 6 * (numbers(count, 4) - 0.5)).repeat(2, 1)
        wrong = torch.cat([60 * numbers(3, 2), 60 + 60 * numbers(3, 2)], 1)
        guesses = torch.cat([labels.repeat(2), (numbers(3) * classes).long()])
        scores = (numbers(len(guesses)) * 20).round() / 20
        found.append({"boxes": torch.cat([near, wrong]), "labels": guesses, "scores": scores})
    return found, wanted


def measured(found: Annotations, wanted: Annotations, size: int = 16) -> AveragePrecisions:
    metric = MeanAveragePrecision()
    for start in range(0, len(found), size):
        metric.update(found[start : start + size], wanted[start : start + size])
    return metric.compute()


def coco_figures(found: Annotations, wanted: Annotations) -> np.ndarray[Any, Any]:
    """What pycocotools prints for these, by its own way from a JSON-like data set."""
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    def entries(parts: Annotations) -> list[dict[str, Any]]:
        return [
            {
                "image_id": image,
                "category_id": int(label),
                "bbox": [float(box[0]), float(box[1]), float(box[2] - box[0]), float(box[3] - box[1])],
                "area": float((box[2] - box[0]).double() * (box[3] - box[1]).double()),
                **({"score": float(part["scores"][i])} if "scores" in part else {}),
                "iscrowd": int(part["iscrowd"][i]) if "iscrowd" in part else 0,
            }
            for image, part in enumerate(parts, 1)
            for i, (box, label) in enumerate(zip(part["boxes"].double(), part["labels"], strict=True))
        ]

    with contextlib.redirect_stdout(io.StringIO()):
        truth = COCO()
        truth.dataset = {
            "images": [{"id": image} for image in range(1, len(wanted) + 1)],
            "categories": [{"id": label} for label in range(4)],
            "annotations": [entry | {"id": i} for i, entry in enumerate(entries(wanted), 1)],
        }
        truth.createIndex()
        run = COCOeval(truth, truth.loadRes(entries(found)), "bbox")
        run.evaluate()
        run.accumulate()
        run.summarize()
    return np.asarray(run.stats)


@pytest.mark.parametrize("seed", [0, 1])
def test_figures_are_those_of_coco(seed: int) -> None:
    found, wanted = scene(seed=seed)
    result, figures = measured(found, wanted), coco_figures(found, wanted)
    assert 5 < result.map < 95
    assert result.map50 > result.map
    assert result.map / 100 == pytest.approx(figures[0], abs=1e-12)
    assert result.map50 / 100 == pytest.approx(figures[1], abs=1e-12)


def test_weights_of_one_give_the_figure_itself_and_others_that_of_repeated_images() -> None:
    found, wanted = scene()
    for each in found:  # of equal scores, copies of an image are in another order
        each["scores"] += torch.arange(len(each["scores"])) * 1e-4
    result = measured(found, wanted)
    assert result.reweighted(np.ones((1, 40), dtype=np.int64))[0] == pytest.approx(result.map, abs=1e-10)
    weights = np.random.default_rng(0).integers(0, 4, 40)
    chosen = np.repeat(np.arange(40), weights)
    repeated = measured([found[i] for i in chosen], [wanted[i] for i in chosen])
    assert result.reweighted(weights[None])[0] == pytest.approx(repeated.map, abs=1e-10)


def test_the_interval_is_the_bootstraps_and_narrows_with_images() -> None:
    few, many = measured(*scene(20)), measured(*scene(160))
    low, high = few.interval
    assert 0 < low < few.map < high < 100
    assert many.interval[1] - many.interval[0] < 0.6 * (high - low)
    assert measured(*scene(20)).interval == (low, high)
    drawn = np.random.default_rng(5).multinomial(20, np.full(20, 0.05), 300)
    slow = np.percentile(few.reweighted(drawn), [2.5, 97.5])
    assert np.abs(slow - few.interval).max() < 3


def test_resamples_without_any_box_are_left_out() -> None:
    found, wanted = scene(4)
    result = measured(found, wanted)
    weights = np.array([[0, 0, 0, 4], [1, 1, 1, 1]])  # the last image has no boxes
    assert np.isnan(result.reweighted(weights)[0])
    assert np.isfinite(result.reweighted(weights)[1])


def test_perfect_and_no_detections() -> None:
    _, wanted = scene(6)
    wanted = [{**each, "iscrowd": torch.zeros_like(each["labels"])} for each in wanted]
    exact = [{"boxes": w["boxes"], "labels": w["labels"], "scores": torch.ones(len(w["labels"]))} for w in wanted]
    assert measured(exact, wanted).map == pytest.approx(100)
    none = [{name: value[:0] for name, value in each.items()} for each in exact]
    assert measured(none, wanted).map == 0
    assert measured(none, wanted).interval == (0.0, 0.0)


def test_without_ground_truth_there_is_no_figure() -> None:
    found, wanted = scene(3)
    empty = [{name: value[:0] for name, value in each.items()} for each in wanted]
    with pytest.raises(DataError, match="expected boxes to find, got 3 images without any"):
        measured(found, empty)
    with pytest.raises(DataError, match="detections for each of 3 images, got 2"):
        MeanAveragePrecision().update(found[:2], wanted)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise ModuleNotFoundError(name)

    monkeypatch.setattr("prunekit.utils.availability.import_module", missing)
    with pytest.raises(UsageError, match=r"pycocotools, which is not installed: pip install prunekit\[detection\]"):
        MeanAveragePrecision()
