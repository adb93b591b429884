"""Data sets as ultralytics has them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from drawn_files import write_yolo
from mutants import changed_json, damaged_bytes, unclean

from prunekit.data.drawn_shapes import CLASSES, DrawnShapes
from prunekit.data.sources import load_splits
from prunekit.data.yolo import label_file
from prunekit.errors import DataError
from prunekit.settings.inputs import DataSettings


def settings(root: Path, **more: Any) -> DataSettings:
    return DataSettings("yolo", root=root, image_size=80, **more)


@pytest.mark.parametrize("kind", ["boxes", "polygons", "points"])
def test_boxes_are_those_that_were_written(tmp_path: Path, kind: str) -> None:
    wanted = {"polygons": ("masks",), "points": ("keypoints",)}.get(kind, ())
    splits = load_splits(settings(write_yolo(tmp_path, kind=kind), targets=wanted))
    assert (len(splits.train), len(splits.validation), len(splits.test)) == (5, 1, 6)
    assert splits.classes == CLASSES
    assert splits.notes == ()
    _, targets = splits.test.fetch(torch.arange(6))
    drawn = DrawnShapes(12, 60, ("keypoints",))
    scale, offset = torch.tensor([80 / 60, 1.0]), torch.tensor([0.0, 10.0])
    for index, target in enumerate(targets):
        objects = drawn.read(6 + index)[1]
        assert torch.allclose(target["boxes"], objects.boxes * scale.repeat(2) + offset.repeat(2), atol=1e-2)
        assert torch.equal(target["labels"], objects.labels)
        if kind == "polygons":
            areas = (target["boxes"][:, 2:] - target["boxes"][:, :2]).prod(1)
            assert torch.allclose(target["masks"].sum((1, 2)).float(), areas, rtol=0.25)
        if kind == "points":
            assert objects.keypoints is not None
            assert torch.allclose(target["keypoints"][..., :2], objects.keypoints[..., :2] * scale + offset, atol=1e-2)


def test_a_folder_alone_is_described_by_its_labels_or_by_ultralytics(tmp_path: Path) -> None:
    splits = load_splits(settings(write_yolo(tmp_path / "mine", description=False)))
    assert splits.classes == ("0", "1", "2")
    pytest.importorskip("ultralytics")
    splits = load_splits(settings(write_yolo(tmp_path / "coco8", description=False)))
    assert len(splits.classes) == 80
    assert splits.classes[:2] == ("person", "bicycle")


def test_parts_may_be_lists_of_files_and_a_test_of_their_own(tmp_path: Path) -> None:
    root = write_yolo(tmp_path)
    files = sorted(str(path.relative_to(root)) for path in (root / "images" / "train").iterdir())
    (root / "some.txt").write_text("\n".join(files[:4]))
    (root / "last.txt").write_text("\n".join(f"./{name}" for name in files[4:]))
    (root / "data.yaml").write_text(
        f"train: some.txt\nval: [last.txt]\ntest: images/val\nnc: 3\nnames: {list(CLASSES)}"
    )
    splits = load_splits(settings(root / "data.yaml"))
    assert (len(splits.train), len(splits.validation), len(splits.test)) == (4, 2, 6)


def test_images_to_train_on_are_no_test(tmp_path: Path) -> None:
    root = write_yolo(tmp_path)
    (root / "data.yaml").write_text(f"train: images\nval: images\nnames: {list(CLASSES)}")
    splits = load_splits(settings(root, test_share=0.25))
    assert (len(splits.train), len(splits.validation), len(splits.test)) == (8, 1, 3)
    assert "validation has the images of train; others are drawn for it" in splits.notes[0]


def test_faulty_labels_are_counted_as_corrupt_images(tmp_path: Path) -> None:
    root = write_yolo(tmp_path)
    (root / "labels" / "train" / "001.txt").write_text("0 0.5 0.5 0.2\n")
    with pytest.raises(DataError, match=r"001.png.*001.txt, have another form: line 1: expected a class and a box"):
        load_splits(settings(root))
    splits = load_splits(settings(root, max_corrupt=1))
    assert len(splits.train) + len(splits.validation) == 5
    assert len(splits.corrupt) == 1


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("5 0.5 0.5 0.2 0.2", "line 1: there is no class 5; .*data.yaml names 3, 0 to 2"),
        (
            "1 0.5 0.5 0.2 0.0\n1 1.5 1.5 0.2 0.2\n0 0.5 0.5 0.9 0.4",
            "2 of {} boxes are empty or outside of their image",
        ),
    ],
)
def test_faulty_boxes_are_named(tmp_path: Path, text: str, expected: str) -> None:
    root = write_yolo(tmp_path)
    (root / "labels" / "train" / "001.txt").write_text(text)
    if "no class" in expected:
        with pytest.raises(DataError, match=expected):
            load_splits(settings(root))
    else:
        lines = sum(len(path.read_text().splitlines()) for path in (root / "labels" / "train").iterdir())
        assert expected.format(lines) in load_splits(settings(root)).notes[0]


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"nowhere does not exist; .*github.com/ultralytics/assets/releases"):
        load_splits(settings(tmp_path / "nowhere"))
    with pytest.raises(DataError, match=r"folders images/train and images/val, found neither"):
        load_splits(settings(tmp_path))
    root = write_yolo(tmp_path / "a")
    with pytest.raises(DataError, match=r"data.targets asks for keypoints, and .*data.yaml has no kpt_shape"):
        load_splits(settings(root, targets=("keypoints",)))
    with pytest.raises(DataError, match=r"data.targets asks for masks, and expected polygons, but an object has a box"):
        load_splits(settings(root, targets=("masks",)))
    (root / "data.yaml").write_text("train: images/none\nval: images/val\nnames: [a]")
    with pytest.raises(DataError, match=r"train: expected a folder of images, .* got 'images/none'"):
        load_splits(settings(root))
    for path in (root / "labels").rglob("*.txt"):
        path.unlink()
    (root / "data.yaml").write_text("train: images/train\nval: images/val\nnames: [a]")
    with pytest.raises(DataError, match="expected boxes, and none of 6 images has any; expected labels such as"):
        load_splits(settings(root))


def test_labels_are_where_images_are() -> None:
    assert label_file(Path("/data/images/set/images/train/a.b.jpg")) == Path("/data/images/set/labels/train/a.b.txt")


def read_whole(root: Path, targets: tuple[str, ...] = ()) -> None:
    splits = load_splits(settings(root, targets=targets, max_corrupt=0.5))
    for part in (splits.train, splits.validation, splits.test):
        part.fetch(torch.arange(len(part)), (0, 0))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["boxes", "polygons", "points"])
def test_mutants_of_descriptions_and_labels_are_read_whole_or_refused(tmp_path: Path, kind: str) -> None:
    root = write_yolo(tmp_path, images=3, kind=kind)
    described, labels = root / "data.yaml", sorted((root / "labels" / "train").glob("*.txt"))[0]
    sound, lines = described.read_bytes(), labels.read_bytes()
    targets = {"polygons": ("masks",), "points": ("keypoints",)}.get(kind, ())
    content = {"path": ".", "train": "images/train", "val": ["images/val"], "nc": 3, "names": dict(enumerate(CLASSES))}
    content |= {"kpt_shape": [3, 3], "flip_idx": [0, 2, 1]} if kind == "points" else {}

    def read(mutant: tuple[Path, bytes]) -> None:
        described.write_bytes(sound)
        labels.write_bytes(lines)
        mutant[0].write_bytes(mutant[1])
        read_whole(root, targets)

    seed = len(kind)
    mutants = [(described, each) for each in changed_json(content, 100, seed)]  # which is YAML too
    mutants += [(described, each) for each in damaged_bytes(sound, 50, seed)]
    mutants += [(labels, each) for each in damaged_bytes(lines, 100, seed)]
    assert unclean(read, mutants) == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("names: [a]\nnc: 1000000000000", "nc: expected the number of classes, 1 to 100,000, got 1000000000000"),
        ("names: [[a], b, c]", r"names: expected the name of each class, got \[\['a'\], 'b', 'c'\]"),
        ("names: {0: a, b: c}", r"names: expected numbers 0 to 1, got \[0, 'b'\]"),
        ("names: [a]\nkpt_shape: [1000000000000, 3]", r"kpt_shape: expected \[keypoints, 2 or 3\], at most 10,000"),
        ("names: [a]\nkpt_shape: [2, 3]\nflip_idx: -1", "flip_idx: expected the number of each keypoint once, got -1"),
        ("names: [a]\nx: 2001-99-99", r"data.yaml:4:4: expected YAML as of ultralytics' data sets, but"),
        (
            "names: [a]\ntest: some.txt",
            r"test: expected images in 'some.txt', files that end in .*, found 'notes.md'",
        ),
    ],
)
def test_values_of_another_kind_are_named(tmp_path: Path, text: str, expected: str) -> None:
    root = write_yolo(tmp_path)
    (root / "some.txt").write_text("images/train/000.png\nnotes.md\n")
    (root / "data.yaml").write_text(f"train: images/train\nval: images/val\n{text}\n")
    with pytest.raises(DataError, match=expected):
        load_splits(settings(root))


@pytest.mark.parametrize("line", ["inf 0.5 0.5 0.2 0.2", "1e300 0.5 0.5 0.2 0.2", "0 nan 0.5 0.2 0.2", "0 1e300 0 1 1"])
def test_numbers_beyond_any_image_are_of_another_form(tmp_path: Path, line: str) -> None:
    root = write_yolo(tmp_path)
    (root / "labels" / "train" / "001.txt").write_text(f"{line}\n")
    with pytest.raises(DataError, match=r"001.txt, have another form: line 1: expected a class and a box"):
        load_splits(settings(root))
