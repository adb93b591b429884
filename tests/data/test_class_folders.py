"""A folder of images for each class."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.datasets import ImageFolder

from prunekit.data.datasets import FolderImages, ImageTransform
from prunekit.data.loader import batches
from prunekit.data.local_files import image_files, scan_folder
from prunekit.data.sources import load_splits
from prunekit.errors import DataError, UsageError
from prunekit.settings.inputs import DataSettings


def write(folder: Path, count: int, size: tuple[int, int] = (20, 20)) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for index in range(count):
        Image.new("RGB", size, (index, 2 * index, 200)).save(folder / f"{index}.png")


def settings(root: Path, **changed: object) -> DataSettings:
    return DataSettings(source="imagefolder", root=root, image_size=16, **changed)  # type: ignore[arg-type]


def test_classes_labels_and_order_are_those_of_torchvisions_image_folder(tmp_path: Path) -> None:
    names = ("b", "a10", "a2", "B", "c d", "ä", "a-b", "a.b")
    for name in names:
        for inner in (".", "z", "a/deeper", "a b", "10", "9"):
            write(tmp_path / "images" / name / inner, 3)
        Image.new("RGB", (4, 4)).save(tmp_path / "images" / name / "UPPER.PNG")
        (tmp_path / "images" / name / "notes.txt").write_text("no image")
    write(tmp_path / "elsewhere", 2)
    (tmp_path / "images" / "b" / "linked").symlink_to(tmp_path / "elsewhere", target_is_directory=True)
    (tmp_path / "images" / "readme.txt").write_text("no class")
    theirs, ours = ImageFolder(str(tmp_path / "images")), scan_folder(tmp_path / "images")
    assert list(ours.classes) == theirs.classes
    assert [(str(path), label) for path, label in ours.rest] == theirs.samples
    assert len(ours.rest) == len(names) * 19 + 2


def test_classes_alone_are_split(tmp_path: Path) -> None:
    for name in ("cat", "dog"):
        write(tmp_path / name, 10)
    splits = load_splits(settings(tmp_path, test_share=0.3, validation_share=0.2))
    assert splits.classes == ("cat", "dog")
    assert (len(splits.train), len(splits.validation), len(splits.test)) == (10, 4, 6)
    assert splits.sample_shape == (3, 16, 16)
    images, labels = next(iter(batches(splits.test, 6, shuffle_seed=None)))
    assert images.shape == (6, 3, 16, 16)
    assert labels.tolist() == [0, 0, 0, 1, 1, 1]


def test_the_test_folder_is_the_test_split(tmp_path: Path) -> None:
    for part, count in (("train", 8), ("test", 3)):
        for name in ("cat", "dog"):
            write(tmp_path / part / name / "deeper", count)
    splits = load_splits(settings(tmp_path, validation_share=0.25))
    assert (len(splits.train), len(splits.validation), len(splits.test)) == (12, 4, 6)
    assert isinstance(splits.test, FolderImages)
    assert all("test" in path.parts for path in splits.test.paths)


def test_imagenets_names_of_the_parts(tmp_path: Path) -> None:
    for part, count in (("train", 8), ("val", 3)):
        for name in ("n01440764", "n01443537"):
            write(tmp_path / part / name, count)
    splits = load_splits(settings(tmp_path, validation_share=0.25))
    assert (len(splits.train), len(splits.validation), len(splits.test)) == (12, 4, 6)
    write(tmp_path / "test" / "n01440764", 1)
    with pytest.raises(DataError, match=r"expected train/ with test/ or val/, .*found train/, test/, val/"):
        load_splits(settings(tmp_path))


def test_normalization_is_imagenets(tmp_path: Path) -> None:
    Image.new("RGB", (16, 16), (255, 0, 51)).save(tmp_path / "a.png")
    image, _ = FolderImages((tmp_path / "a.png",), torch.tensor([0]), ImageTransform(16))[0]
    expected = (torch.tensor([1.0, 0.0, 0.2]) - torch.tensor([0.485, 0.456, 0.406])) / torch.tensor(
        [0.229, 0.224, 0.225]
    )
    torch.testing.assert_close(image, expected[:, None, None].expand(3, 16, 16))


def test_the_center_of_a_larger_image_is_taken(tmp_path: Path) -> None:
    pixels = np.zeros((40, 120, 3), np.uint8)
    pixels[:, 40:80] = 255  # the middle third; the sides are cut away
    Image.fromarray(pixels).save(tmp_path / "a.png")
    image, _ = FolderImages((tmp_path / "a.png",), torch.tensor([0]), ImageTransform(28))[0]
    white = (1 - torch.tensor([0.485, 0.456, 0.406])) / torch.tensor([0.229, 0.224, 0.225])
    torch.testing.assert_close(image, white[:, None, None].expand(3, 28, 28))


def test_gray_and_palette_images_get_three_channels(tmp_path: Path) -> None:
    for mode in ("L", "P", "RGBA"):
        path = tmp_path / f"{mode}.png"
        Image.new(mode, (16, 16)).save(path)
        assert FolderImages((path,), torch.tensor([0]), ImageTransform(16))[0][0].shape == (3, 16, 16)


def test_the_fingerprint_follows_the_files(tmp_path: Path) -> None:
    for name in ("cat", "dog"):
        write(tmp_path / name, 5)
    before = load_splits(settings(tmp_path)).fingerprint
    assert load_splits(settings(tmp_path)).fingerprint == before
    path = tmp_path / "cat" / "0.png"
    os.utime(path, ns=(0, 1))
    assert load_splits(settings(tmp_path)).fingerprint != before


def test_a_missing_root(tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=r"data\.root: .*nowhere does not exist; expected a folder with train/ .*data\.root=PATH"
    ):
        load_splits(settings(tmp_path / "nowhere"))
    with pytest.raises(UsageError, match=r"data\.root: source 'imagefolder' needs the path"):
        load_splits(DataSettings(source="imagefolder"))


def test_a_file_instead_of_a_folder(tmp_path: Path) -> None:
    (tmp_path / "data.npz").touch()
    with pytest.raises(DataError, match=r"expected a folder, but this is a file; .*source=npz"):
        load_splits(settings(tmp_path / "data.npz"))


def test_no_classes(tmp_path: Path) -> None:
    write(tmp_path, 3)
    with pytest.raises(DataError, match=r"two or more classes, or train/ with test/ or val/, found \[\]"):
        load_splits(settings(tmp_path))


def test_train_without_test(tmp_path: Path) -> None:
    write(tmp_path / "train" / "cat", 3)
    with pytest.raises(DataError, match=r"expected train/ with test/ or val/, or class folders alone, found train/$"):
        load_splits(settings(tmp_path))


def test_a_test_class_that_is_not_trained(tmp_path: Path) -> None:
    for name in ("train/cat", "train/dog", "test/cat", "test/dogs"):
        write(tmp_path / name, 3)
    with pytest.raises(DataError, match=r"dogs: no such class in .*train; did you mean 'dog'\?"):
        load_splits(settings(tmp_path))


def test_a_class_without_images(tmp_path: Path) -> None:
    write(tmp_path / "cat", 3)
    (tmp_path / "dog").mkdir()
    with pytest.raises(DataError, match=r"dog: no images here; expected files that end in \.jpg"):
        load_splits(settings(tmp_path))


def test_an_empty_file(tmp_path: Path) -> None:
    for name in ("cat", "dog"):
        write(tmp_path / name, 3)
    (tmp_path / "dog" / "1.png").write_bytes(b"")
    with pytest.raises(DataError, match=r"1\.png: expected an image, but the file is empty"):
        load_splits(settings(tmp_path))


def test_too_few_images_of_a_class(tmp_path: Path) -> None:
    write(tmp_path / "cat", 9)
    write(tmp_path / "dog", 2)
    with pytest.raises(DataError, match="class 'dog' has 1 image left"):
        load_splits(settings(tmp_path))


def link(at: Path, target: Path | str) -> None:
    at.symlink_to(target, target_is_directory=True)


@pytest.mark.parametrize("target", [".", "..", "../..", "../dog", "self"])
def test_a_link_that_leads_back_adds_no_image(tmp_path: Path, target: str) -> None:
    """Followed blindly, two such links in a folder are 2 ** 40 paths."""
    for name in ("cat", "dog"):
        write(tmp_path / name, 3)
    for name in ("self", "again"):
        link(tmp_path / "cat" / name, target)
    found = scan_folder(tmp_path)
    assert found.classes == ("cat", "dog")
    assert [(path.parent.name, path.name, label) for path, label in found.rest] == [
        (name, f"{index}.png", label) for label, name in enumerate(("cat", "dog")) for index in range(3)
    ]
    assert len(image_files(tmp_path)) == 6


def test_links_to_one_folder_and_chains_of_links_are_followed_once(tmp_path: Path) -> None:
    for depth in range(30):  # each folder has two links to the next: 2 ** 30 ways to the last
        folder = tmp_path / "outside" / str(depth)
        write(folder, 1)
        for name in ("left", "right"):
            link(folder / name, f"../{depth + 1}")
    (tmp_path / "outside" / "30").mkdir()
    write(tmp_path / "in" / "cat", 1)
    write(tmp_path / "in" / "dog", 1)
    link(tmp_path / "in" / "dog" / "more", tmp_path / "outside" / "0")
    found = scan_folder(tmp_path / "in")
    assert [label for _, label in found.rest] == [0] + [1] * 31
    assert len({path.resolve() for path, _ in found.rest}) == 32


def test_the_root_as_a_class_of_its_own_is_none(tmp_path: Path) -> None:
    for name in ("cat", "dog"):
        write(tmp_path / "train" / name, 2)
        write(tmp_path / "test" / name, 1)
    link(tmp_path / "train" / "all", ".")
    link(tmp_path / "train" / "above", "../..")
    found = scan_folder(tmp_path)
    assert found.classes == ("cat", "dog")
    assert len(found.rest) == 4


@pytest.mark.parametrize("target", ["cat", "cat/wild", "/elsewhere"])
def test_a_class_that_is_another_by_a_link_is_refused(tmp_path: Path, target: str) -> None:
    write(tmp_path / "in" / "cat" / "wild", 2)
    write(tmp_path / "in" / "dog", 2)
    write(tmp_path / "elsewhere", 2)
    aim = tmp_path / "elsewhere" if target == "/elsewhere" else tmp_path / "in" / target
    link(tmp_path / "in" / "kitty", aim)
    if target == "/elsewhere":
        assert scan_folder(tmp_path / "in").classes == ("cat", "dog", "kitty")
        link(tmp_path / "in" / "tiger", aim)
    with pytest.raises(DataError, match=r"(kitty|tiger): expected a folder of its own for each class, got a link to"):
        scan_folder(tmp_path / "in")
