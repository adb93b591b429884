"""Data sets of Hugging Face's library; what needs the library is skipped where it is not installed."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from PIL import Image

from prunekit.data.loader import batches
from prunekit.data.sources import load_splits
from prunekit.errors import DataError, UsageError
from prunekit.settings.inputs import DataSettings


def settings(root: Path | None, **changed: Any) -> DataSettings:
    return DataSettings(source="huggingface", root=root, image_size=8, **changed)


def library() -> Any:
    return pytest.importorskip("datasets", reason="the extra hf-data is not installed")


def rows(count: int, seed: int, **more: list[Any]) -> Any:
    """Images of noise with labels cat, dog, cat, dog, ..."""
    datasets = library()
    generator = np.random.default_rng(seed)
    images = [Image.fromarray(generator.integers(0, 256, (8, 8, 3), dtype=np.uint8)) for _ in range(count)]
    columns = {"picture": images, "animal": [index % 2 for index in range(count)], **more}
    features = {"picture": datasets.Image(), "animal": datasets.ClassLabel(names=["cat", "dog"])}
    features |= {name: datasets.ClassLabel(names=["x", "y"]) for name in more}
    return datasets.Dataset.from_dict(columns, features=datasets.Features(features))


def test_without_the_library_the_extra_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataError, match=r"data\.source=huggingface needs .* pip install prunekit\[hf-data\]"):
        load_splits(settings(tmp_path))


def test_versions_that_may_run_code_of_data_sets_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    old = ModuleType("datasets")
    old.__version__ = "3.6.0"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", old)
    with pytest.raises(DataError, match=r"expected datasets 4\.0 or newer, which runs no code of data sets, got 3\.6"):
        load_splits(settings(tmp_path))


def test_a_missing_folder_is_said_before_the_library_is_asked(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"data\.root: .*nowhere does not exist; expected the folder that `save"):
        load_splits(settings(tmp_path / "nowhere"))
    with pytest.raises(UsageError, match=r"data\.root: source 'huggingface' needs the path"):
        load_splits(settings(None))


def test_parts_classes_and_images_are_those_that_were_saved(tmp_path: Path) -> None:
    saved = library().DatasetDict({"train": rows(20, 0), "test": rows(6, 1)})
    saved.save_to_disk(str(tmp_path / "set"))
    splits = load_splits(settings(tmp_path / "set", validation_share=0.2))
    assert splits.classes == ("cat", "dog")
    assert (len(splits.train), len(splits.validation), len(splits.test)) == (16, 4, 6)
    plain = load_splits(settings(tmp_path / "set", mean=(0.0,) * 3, std=(1.0,) * 3))
    images, labels = next(iter(batches(plain.test, 6, shuffle_seed=None, workers=1)))
    assert labels.tolist() == [0, 1] * 3
    expected = np.stack([np.asarray(row["picture"]) for row in saved["test"]]).transpose(0, 3, 1, 2)
    np.testing.assert_allclose(images.numpy(), expected / 255, atol=1e-6)


def test_without_a_test_part_validation_is_measured_on_and_without_both_images_are_drawn(tmp_path: Path) -> None:
    library().DatasetDict({"train": rows(20, 0), "validation": rows(6, 1)}).save_to_disk(str(tmp_path / "two"))
    assert len(load_splits(settings(tmp_path / "two", validation_share=0.2)).test) == 6
    rows(20, 0).save_to_disk(str(tmp_path / "one"))
    assert len(load_splits(settings(tmp_path / "one", test_share=0.3)).test) == 6


def test_columns_that_are_not_told_apart_are_named_by_the_settings(tmp_path: Path) -> None:
    rows(20, 0, color=[0, 1, 1, 0] * 5).save_to_disk(str(tmp_path / "set"))
    with pytest.raises(UsageError, match=r"got \['picture'\] and \['animal', 'color'\]; name them as data\.columns="):
        load_splits(settings(tmp_path / "set"))
    assert load_splits(settings(tmp_path / "set", columns=("picture", "color"))).classes == ("x", "y")
    with pytest.raises(UsageError, match=r"has no column 'colr'; did you mean 'color'"):
        load_splits(settings(tmp_path / "set", columns=("picture", "colr")))


def test_without_labels_a_column_of_images_is_enough(tmp_path: Path) -> None:
    noted = rows(20, 0, color=[0, 1, 1, 0] * 5)
    for name, kept in (("two", noted), ("none", noted.remove_columns(["animal", "color"]))):
        kept.save_to_disk(str(tmp_path / name))
        splits = load_splits(settings(tmp_path / name, labels=False))
        assert (splits.classes, splits.task.main.name) == ((), "agreement")
        assert (len(splits.train), len(splits.validation), len(splits.test)) == (12, 2, 6)
    given = load_splits(settings(tmp_path / "two", labels=False, columns=("picture", "color")))
    assert given.fingerprint == load_splits(settings(tmp_path / "two", labels=False)).fingerprint


def test_a_folder_of_something_else_is_refused(tmp_path: Path) -> None:
    library()
    with pytest.raises(DataError, match="expected a folder that `save_to_disk` wrote, but: "):
        load_splits(settings(tmp_path))


def test_the_hub_is_asked_with_download_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = library()
    asked = []
    monkeypatch.setattr(datasets, "load_dataset", lambda *names, **more: asked.append((names, more)) or rows(20, 0))
    with pytest.raises(UsageError, match=r"data\.download: expected true, because some/set is on the hub"):
        load_splits(settings(None, name="some/set"))
    assert not asked
    load_splits(settings(None, name="some/set", download=True))
    assert asked == [(("some/set",), {})]
