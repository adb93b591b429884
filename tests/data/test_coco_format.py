"""Data sets in the format of COCO."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from drawn_files import write_coco
from mutants import changed_json, unclean

from prunekit.data.coco import masks_of, run_lengths
from prunekit.data.drawn_shapes import CLASSES, DrawnShapes
from prunekit.data.sources import load_splits
from prunekit.errors import DataError
from prunekit.settings.inputs import DataSettings


def settings(root: Path, **more: Any) -> DataSettings:
    return DataSettings("coco", root=root, image_size=80, **more)


def test_boxes_masks_and_keypoints_lie_in_the_padded_image(tmp_path: Path) -> None:
    splits = load_splits(settings(write_coco(tmp_path / "a"), targets=("masks", "keypoints"), validation_share=0.2))
    assert (len(splits.train), len(splits.validation), len(splits.test)) == (5, 1, 6)
    assert splits.classes == CLASSES
    assert splits.task.name == "detection"
    assert splits.notes == ()
    images, targets = splits.test.fetch(torch.arange(6))
    assert images.shape == (6, 3, 80, 80)
    gray = images.new_tensor(114 / 255)
    assert torch.allclose(images[:, :, :10], gray)
    assert torch.allclose(images[:, :, 70:], gray, atol=1e-6)
    drawn = DrawnShapes(12, 60, ("masks", "keypoints"))
    for index, target in enumerate(targets):
        objects = drawn.read(6 + index)[1]
        assert objects.keypoints is not None
        scale, offset = torch.tensor([80 / 60, 1.0]), torch.tensor([0.0, 10.0])
        assert torch.allclose(target["boxes"], objects.boxes * scale.repeat(2) + offset.repeat(2), atol=1e-3)
        assert torch.equal(target["labels"], objects.labels)
        assert not target["iscrowd"].any()
        assert torch.allclose(target["keypoints"][..., :2], objects.keypoints[..., :2] * scale + offset, atol=1e-3)
        for box, mask in zip(target["boxes"], target["masks"], strict=True):
            rows, columns = torch.where(mask.bool())
            edges = torch.stack([columns.min(), rows.min(), columns.max() + 1, rows.max() + 1])
            assert (edges - box).abs().max() <= 1.4
    assert sum(len(target["labels"]) for target in targets) > 6 > sum(not len(t["labels"]) for t in targets)


def test_classes_are_numbered_in_order_or_as_their_categories(tmp_path: Path) -> None:
    root = write_coco(tmp_path / "a")
    plain, numbered = load_splits(settings(root)), load_splits(settings(root, category_ids=True))
    assert numbered.classes == ("circle", "N/A", "square", "N/A", "N/A", "N/A", "triangle")
    a, b = (torch.cat([t["labels"] for t in each.test.fetch(torch.arange(6))[1]]) for each in (plain, numbered))
    assert torch.equal(torch.tensor([0, 2, 6])[a], b)
    assert "masks" not in plain.test.fetch(torch.arange(1))[1][0]
    assert plain.fingerprint != numbered.fingerprint


def test_exports_with_the_annotations_beside_the_images_are_read(tmp_path: Path) -> None:
    write_coco(tmp_path)
    for part, name in (("train", "train2017"), ("valid", "val2017")):
        (tmp_path / name).rename(tmp_path / part)
        (tmp_path / "annotations" / f"instances_{name}.json").rename(tmp_path / part / "_annotations.coco.json")
    assert len(load_splits(settings(tmp_path)).test) == 6


def degenerate(content: dict[str, Any]) -> None:
    content["annotations"][0]["bbox"][2] = 0
    content["annotations"][1]["bbox"][:2] = [200, 10]
    content["annotations"][2]["bbox"][3] = 500
    content["annotations"][3]["iscrowd"] = 1


def test_boxes_without_area_are_counted_and_left_out(tmp_path: Path) -> None:
    plain = load_splits(settings(write_coco(tmp_path / "a")))
    splits = load_splits(settings(write_coco(tmp_path / "b", change=degenerate)))
    counts = [sum(len(t["labels"]) for t in each.test.fetch(torch.arange(6))[1]) for each in (plain, splits)]
    assert counts[1] == counts[0] - 2
    assert [note.partition(": ")[2] for note in splits.notes[:2]] == [
        f"2 of {counts_of(tmp_path)} boxes are empty or outside of their image, and left out",
        f"1 of {counts_of(tmp_path)} boxes reach beyond their image, and are clipped to it",
    ]
    targets = splits.test.fetch(torch.arange(6))[1]
    assert sum(int(target["iscrowd"].sum()) for target in targets) == 1
    assert all(bool((target["boxes"] <= 80).all()) for target in targets)


def counts_of(root: Path) -> int:
    return len(json.loads((root / "b" / "annotations" / "instances_train2017.json").read_text())["annotations"])


def test_broken_images_are_counted(tmp_path: Path) -> None:
    root = write_coco(tmp_path / "a")
    (root / "val2017" / "007.png").write_bytes(b"no image")
    with pytest.raises(DataError, match=r"007.png: expected an image, but UnidentifiedImageError"):
        load_splits(settings(root)).test.fetch(torch.arange(6))
    splits = load_splits(settings(root, max_corrupt=1))
    images, targets = splits.test.fetch(torch.arange(6))
    assert len(images) == len(targets) == 5
    assert len(splits.corrupt) == 1


def without_boxes(content: dict[str, Any]) -> None:
    content["annotations"] = []


def of_another_category(content: dict[str, Any]) -> None:
    content["annotations"][1]["category_id"] = 4


def of_no_image(content: dict[str, Any]) -> None:
    content["annotations"][0]["image_id"] = 77


def out_of_the_folder(content: dict[str, Any]) -> None:
    content["images"][0]["file_name"] = "../../elsewhere.png"


def with_text_for_a_box(content: dict[str, Any]) -> None:
    content["annotations"][2]["bbox"] = "left"


def without_keypoints(content: dict[str, Any]) -> None:
    del content["annotations"][0]["keypoints"]


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (without_boxes, "expected boxes, and none of 6 images has any"),
        (of_another_category, "annotation 2: there is no category 4; expected one of the 3 in its list"),
        (of_no_image, "annotation 1: there is no image 77"),
        (out_of_the_folder, "expected names of files in .*train2017, got '../../elsewhere.png'"),
        (with_text_for_a_box, r"annotations\[2\].bbox: expected \[left, top, width, height\] in pixels, got 'left'"),
        (lambda content: content.pop("annotations"), "it has images, and no annotations, as COCO's test set"),
        (without_keypoints, "as data.targets asks for keypoints; annotation 1 has none"),
    ],
)
def test_faults_of_the_file_are_named(
    tmp_path: Path, change: Callable[[dict[str, Any]], Any], expected: str
) -> None:  # fmt: skip
    root = write_coco(tmp_path / "a", images=3 if change is without_keypoints else 6, change=change)
    with pytest.raises(DataError, match=expected):
        load_splits(settings(root, targets=("keypoints",) if change is without_keypoints else ()))


def text_for_a_width(content: dict[str, Any]) -> None:
    content["images"][0]["width"] = "wide"


def an_id_twice(content: dict[str, Any]) -> None:
    content["images"][1]["id"] = content["images"][0]["id"]


def ids_of_two_kinds(content: dict[str, Any]) -> None:
    content["categories"][0]["id"] = "x"


def run_lengths_of_another_size(content: dict[str, Any]) -> None:
    content["annotations"][0]["segmentation"] = {"size": [60, 80], "counts": [10**9]}


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (text_for_a_width, r"images\[0\].width: expected a whole number of pixels, from 1, got 'wide'"),
        (an_id_twice, r"images\[1\].id: expected an id of its own, got \d+ again"),
        (ids_of_two_kinds, "expected ids of categories, all numbers or all text, got"),
        (run_lengths_of_another_size, "annotation 1: segmentation: expected polygons, .* a mask of 80x60 pixels, got"),
    ],
)
def test_values_of_another_kind_are_named(
    tmp_path: Path, change: Callable[[dict[str, Any]], Any], expected: str
) -> None:  # fmt: skip
    with pytest.raises(DataError, match=expected):
        load_splits(settings(write_coco(tmp_path / "a", change=change), targets=("masks",)))


def test_run_lengths_as_text_are_those_of_pycocotools() -> None:
    encode = pytest.importorskip("pycocotools.mask").encode
    generator = torch.Generator().manual_seed(0)
    for share in (0.0, 0.02, 0.5, 0.98, 1.0):
        mask = (torch.rand(97, 41, generator=generator) < share).to(torch.uint8)
        text = encode(np.asfortranarray(mask.numpy()))["counts"].decode()
        assert torch.equal(masks_of([{"size": [97, 41], "counts": text}], (41, 97))[0], mask)
    assert run_lengths("\x00") is None
    assert run_lengths("o" * 100) is None


@pytest.mark.slow
@pytest.mark.parametrize(
    "targets", [(), ("masks",), ("masks", "keypoints")], ids=lambda names: "+".join(names) or "boxes"
)
def test_mutants_are_read_whole_or_refused(tmp_path: Path, targets: tuple[str, ...]) -> None:
    root = write_coco(tmp_path / "a", images=3)
    kind = "person_keypoints" if "keypoints" in targets else "instances"
    file = root / "annotations" / f"{kind}_train2017.json"

    def read(mutant: bytes) -> None:
        file.write_bytes(mutant)
        splits = load_splits(settings(root, targets=targets))
        for part in (splits.train, splits.validation, splits.test):
            part.fetch(torch.arange(len(part)), (0, 0))

    assert unclean(read, changed_json(json.loads(file.read_bytes()), 200, seed=len(targets))) == []


def test_a_missing_folder_says_where_to_get_coco(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"nowhere does not exist; .*cocodataset.org"):
        load_splits(settings(tmp_path / "nowhere"))
    with pytest.raises(DataError, match=r"annotations/instances_train2017.json and .* found none of them"):
        load_splits(settings(tmp_path))


def test_polygons_become_masks() -> None:
    masks = masks_of([[[2, 1, 7, 1, 7, 4, 2, 4]], [[0, 0, 3, 0, 3, 3], [8, 8, 9, 8, 9, 9, 8, 9]]], (12, 10))
    assert masks.shape == (2, 10, 12)
    assert masks[0, 1:5, 2:8].all()
    assert int(masks[0].sum()) == 24
    assert masks[1, 9, 9]
    assert masks[1, 0, 2]
    assert not masks[1, 5, 5]
