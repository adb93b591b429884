"""A NumPy archive, right and wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from mutants import changed_arrays, damaged_bytes, unclean

from prunekit.data.local_files import read_npz
from prunekit.data.sources import load_splits
from prunekit.errors import DataError
from prunekit.settings.inputs import DataSettings


def images(count: int, *shape: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(0).integers(0, 256, (count, *shape), dtype=np.uint8)


def labels(count: int, classes: int = 3) -> np.ndarray[Any, Any]:
    return np.arange(count) % classes


def settings(path: Path) -> DataSettings:
    return DataSettings(source="npz", root=path, image_size=8)


def save(folder: Path, **arrays: Any) -> DataSettings:
    np.savez(folder / "data.npz", **arrays)
    return settings(folder / "data.npz")


@pytest.mark.parametrize("shape", [(8, 8), (8, 8, 1), (8, 8, 3), (5, 9, 3)])
def test_one_part_is_split(tmp_path: Path, shape: tuple[int, ...]) -> None:
    splits = load_splits(save(tmp_path, images=images(60, *shape), labels=labels(60)))
    assert (len(splits.train), len(splits.validation), len(splits.test)) == (36, 6, 18)
    assert splits.train[0][0].shape == splits.sample_shape == (3, 8, 8)
    assert splits.classes == ("0", "1", "2")


def test_two_parts_stay_apart(tmp_path: Path) -> None:
    x, y = images(9, 8, 8, 3), labels(9)
    splits = load_splits(
        save(tmp_path, x_train=images(60, 8, 8, 3), y_train=labels(60), x_test=x, y_test=y, classes=["a", "b", "c"])
    )
    assert splits.classes == ("a", "b", "c")
    assert (len(splits.train), len(splits.validation), len(splits.test)) == (54, 6, 9)
    image, label = splits.test[5]
    mean, std = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    torch.testing.assert_close(image.permute(1, 2, 0), (torch.tensor(x[5]) / 255 - mean) / std)
    assert label == y[5]


def test_the_fingerprint_follows_the_content(tmp_path: Path) -> None:
    x, y = images(30, 8, 8), labels(30)
    before = load_splits(save(tmp_path, images=x, labels=y)).fingerprint
    x[3, 4, 5] ^= 1
    assert load_splits(save(tmp_path, images=x, labels=y)).fingerprint != before


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"x": images(3, 8, 8)}, "expected arrays x_train, .*, or images, labels; found x$"),
        ({"images": images(6, 8, 8).astype(np.float32), "labels": labels(6)}, "images: expected uint8 .* got float32"),
        ({"images": images(6, 8, 8, 4), "labels": labels(6)}, r"with C 1 or 3, got uint8 \(6, 8, 8, 4\)"),
        ({"images": images(6, 8), "labels": labels(6)}, r"got uint8 \(6, 8\)"),
        ({"images": images(0, 8, 8), "labels": labels(0)}, "images: expected images, but the array is empty"),
        (
            {"images": images(6, 8, 8), "labels": labels(5)},
            r"labels: expected 6 integers, .* got int64 \(5,\)",
        ),
        ({"images": images(6, 8, 8), "labels": labels(6) / 2}, "labels: expected 6 integers, .* got float64"),
        ({"images": images(9, 8, 8), "labels": labels(9) + 1}, "largest label is 3; no image has label 0; renumber"),
        (
            {"images": images(9, 8, 8), "labels": labels(9) * 10**9},
            "label is 2000000000; no image has label 1, 2",
        ),
        ({"images": images(9, 8, 8), "labels": labels(9) * 0}, "two or more classes, .* largest label is 0;"),
        (
            {"images": images(9, 8, 8), "labels": labels(9) - 1},
            r"expected labels 0\.\.1 .* 3 of 9 .* label -1",
        ),
        (
            {"images": images(9, 8, 8), "labels": labels(9), "classes": np.array(["a", "b"])},
            r"expected labels 0\.\.1 \(2 classes\), but 3 of 9 are outside, the first is label 2 of image 2",
        ),
        (
            {"x_train": images(9, 8, 8), "y_train": labels(9), "x_test": images(4, 8, 8), "y_test": labels(4, 4)},
            r"y_test: expected labels 0\.\.2 \(3 classes\), but 1 of 4 are outside, the first is label 3",
        ),
        (
            {"images": images(9, 8, 8), "labels": labels(9).astype(np.uint64) + np.uint64(2**63)},
            "labels: expected labels from 0, one for each class, got 9223372036854775810",
        ),
        ({"images": images(9, 8, 8), "labels": labels(9) - 7}, "two or more classes, .* largest label is -5;"),
        ({"images": images(9, 8, 8), "labels": labels(9) != 0}, "labels: expected 9 integers, .* got bool"),
        *(
            (
                {"images": images(9, 8, 8), "labels": labels(9), "classes": names},
                f"classes: expected the name .* got {got}",
            )
            for names, got in (
                (np.array("only"), r"<U4 \(\)"),
                (np.zeros(0), r"float64 \(0,\)"),
                (np.array([["a", "b", "c"]]), r"<U1 \(1, 3\)"),
                (np.array(["a"]), r"<U1 \(1,\)"),
                (np.arange(3) + 0.5, r"float64 \(3,\)"),
                (np.arange(3) > 1, r"bool \(3,\)"),
            )
        ),
        (
            {"images": images(9, 8, 8), "labels": labels(9), "classes": np.array(["a", "b", "a"])},
            "classes: expected a name of its own for each class, got 'a' twice",
        ),
        (
            {"images": images(9, 8, 8), "labels": labels(9), "classes": np.array([b"a", b"b", b"\xff"])},
            "classes: expected names as text in UTF-8, but",
        ),
    ],
)
def test_what_is_wrong_is_said(tmp_path: Path, arrays: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message) as caught:
        load_splits(save(tmp_path, **arrays))
    assert "data.npz" in str(caught.value)


@pytest.mark.parametrize("names", [["a", "b", "é"], [b"a", b"b", "é".encode()]], ids=["text", "bytes"])
def test_classes_are_text_or_bytes_of_text(tmp_path: Path, names: list[Any]) -> None:
    found = load_splits(save(tmp_path, images=images(60, 8, 8), labels=labels(60), classes=np.array(names)))
    assert found.classes == ("a", "b", "é")


@pytest.mark.parametrize("content", [b"", b"no archive", b"PK\x03\x04 broken"])
def test_a_file_that_is_no_archive(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "data.npz").write_bytes(content)
    with pytest.raises(DataError, match="expected a NumPy archive"):
        load_splits(settings(tmp_path / "data.npz"))


def test_pickled_objects_are_not_loaded(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="without objects"):
        load_splits(save(tmp_path, images=np.array([{}, []], dtype=object), labels=labels(2)))


def test_one_bare_array_is_no_archive(tmp_path: Path) -> None:
    with (tmp_path / "data.npz").open("wb") as file:
        np.save(file, images(3, 8, 8))
    with pytest.raises(DataError, match="expected a NumPy archive"):
        load_splits(settings(tmp_path / "data.npz"))


def test_what_is_no_archive_is_never_advised_to_be_loaded_unsafely(tmp_path: Path) -> None:
    (tmp_path / "junk.npz").write_bytes(b"hello")
    with pytest.raises(DataError, match="it is no zip file") as caught:
        read_npz(tmp_path / "junk.npz")
    assert "pickle" not in str(caught.value)
    with pytest.raises(DataError, match=r"it is a folder"):
        read_npz(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("parts", [1, 2])
def test_mutants_are_read_whole_or_refused(tmp_path: Path, parts: int) -> None:
    names = np.array(["a", "b", "c"])
    sound = {"images": images(30, 6, 5, 3), "labels": labels(30), "classes": names}
    if parts == 2:
        sound = {"x_train": images(30, 6, 5), "y_train": labels(30), "x_test": images(6, 6, 5), "y_test": labels(6)}
    file = tmp_path / "data.npz"
    np.savez(file, **sound)
    content = file.read_bytes()
    np.savez_compressed(file, **sound)
    packed = file.read_bytes()

    def read(mutant: bytes | dict[str, np.ndarray[Any, Any]]) -> None:
        if isinstance(mutant, bytes):
            file.write_bytes(mutant)
        else:
            np.savez(file, **mutant)
        splits = load_splits(settings(file))
        for part in (splits.train, splits.validation, splits.test):
            part.fetch(torch.arange(len(part)), (0, 0))

    mutants: list[Any] = [*damaged_bytes(content, 60, parts), *damaged_bytes(packed, 60, parts)]
    mutants += changed_arrays(sound, 100, parts)
    assert unclean(read, mutants) == []
