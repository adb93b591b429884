"""Drawn shapes, and their augmentation with boxes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from prunekit.data.drawn_shapes import DrawnShapes
from prunekit.data.loader import batches
from prunekit.data.sources import load_splits
from prunekit.data.splits import Splits
from prunekit.errors import UsageError
from prunekit.settings.inputs import AugmentSettings, ColorJitterSettings, DataSettings, RandAugmentSettings

ALL = ("masks", "keypoints")


def shapes(augment: Any = "none", **more: Any) -> Splits:
    return load_splits(DataSettings("shapes", image_size=64, targets=ALL, augment=augment, **{"images": 40} | more))


def edges(mask: Tensor) -> Tensor:
    rows, columns = torch.where(mask.bool())
    return torch.stack([columns.min(), rows.min(), columns.max() + 1, rows.max() + 1]).float()


def test_boxes_and_points_are_those_of_the_masks() -> None:
    drawn = DrawnShapes(60, 64, ALL)
    found = [drawn.read(index)[1] for index in range(60)]
    assert {int(label) for each in found for label in each.labels} == {0, 1, 2}
    assert 2 <= sum(not len(each) for each in found) <= 12
    assert max(map(len, found)) == 4
    for each in found:
        assert each.masks is not None
        assert each.keypoints is not None
        assert each.masks.sum(0).max() <= 1  # of pixels that can be seen
        for box, mask, points in zip(each.boxes, each.masks, each.keypoints, strict=True):
            assert torch.equal(edges(mask), box)
            center, left, right = points[:, :2]
            assert left[0] == box[0] + 0.5
            assert right[0] == box[2] - 0.5
            assert mask[int(left[1]), int(left[0])] or mask[int(left[1]) - 1, int(left[0])]
            assert (points[0, 2] == 2) == bool(mask[int(center[1]), int(center[0])])


def test_images_are_the_same_each_time_and_parts_are_disjoint() -> None:
    splits, again = shapes(), shapes()
    assert splits.fingerprint == again.fingerprint != shapes(images=41).fingerprint
    assert splits.classes == ("circle", "square", "triangle")
    assert splits.sample_shape == (3, 64, 64)
    a, b = splits.train.fetch(torch.arange(5)), again.train.fetch(torch.arange(5))
    assert torch.equal(a[0], b[0])
    assert 0 <= a[0].min() < 0.2
    assert 0.8 < a[0].max() <= 1
    chosen = [part.indices.tolist() for part in (splits.train, splits.validation, splits.test)]  # type: ignore[attr-defined]
    assert sorted(index for part in chosen for index in part) == list(range(40))
    assert [len(part) for part in chosen] == [24, 4, 12]


EVERYTHING = AugmentSettings("resized", flip=0.5, color_jitter=ColorJitterSettings(hue=0.1), erase=0.3)


@pytest.mark.parametrize("augment", ["shift", "flip", "crop_flip", "resized_crop_flip", EVERYTHING], ids=str)
def test_boxes_stay_on_their_objects(augment: Any) -> None:
    train = shapes(augment).train
    images, targets = train.fetch(torch.arange(24), (3, 1))
    plain, before = train.fetch(torch.arange(24))
    assert images.shape == plain.shape
    assert not torch.equal(images, plain)
    moved, tight = 0, list[bool]()
    for target, old in zip(targets, before, strict=True):
        moved += target["boxes"].shape != old["boxes"].shape or not torch.allclose(target["boxes"], old["boxes"])
        assert {len(value) for value in target.values()} == {len(target["labels"])}
        for box, mask, points in zip(target["boxes"], target["masks"], target["keypoints"], strict=True):
            assert (box >= 0).all()
            assert (box <= 64).all()
            if mask.sum() > 30:
                beyond = torch.cat([box[:2] - edges(mask)[:2], edges(mask)[2:] - box[2:]])
                assert beyond.max() <= 1.5
                tight.append(bool(beyond.min() >= -2))  # a crop may cut off what reached to a side of the box
            known = points[points[:, 2] > 0]
            inside = (known[:, :2] >= box[:2] - 2) & (known[:, :2] <= box[2:] + 2)
            assert inside.all()
            if len(known) == 3:
                assert points[1, 0] < points[2, 0]  # the left end is still the left one
    assert moved > 6
    assert sum(tight) > 0.8 * len(tight) > 16


def test_what_is_drawn_depends_on_seed_epoch_and_image_alone() -> None:
    splits = shapes(EVERYTHING)

    def of(epoch: int, workers: int, size: int = 6) -> dict[float, Tensor]:
        found = batches(splits.train, size, shuffle_seed=3, workers=workers, augment=True).at_epoch(epoch)
        return {float(image.sum()): image for images, _ in found for image in images}

    once = of(0, 0)
    assert once.keys() == of(0, 1).keys() == of(0, 0, 5).keys()
    assert once.keys() != of(1, 0).keys()


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({"augment": AugmentSettings(rand_augment=RandAugmentSettings())}, "data.augment.rand_augment: expected none"),
        ({"augment": AugmentSettings(trivial_augment=True)}, "data.augment.trivial_augment: expected none"),
        ({"mean": (0.5, 0.5, 0.5)}, "data.mean: expected none for images with boxes"),
        ({"test_share": 0.6, "validation_share": 0.4}, "test_share \\+ validation_share < 1"),
    ],
)
def test_settings_that_do_not_fit_are_named(more: dict[str, Any], expected: str) -> None:
    with pytest.raises(UsageError, match=expected):
        shapes(**more)
