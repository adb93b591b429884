"""The embedded digits, and how any data set is split."""

from __future__ import annotations

from dataclasses import replace
from importlib import resources

import pytest
import torch

from prunekit.data.sources import load_splits
from prunekit.data.splits import Splits
from prunekit.errors import UsageError
from prunekit.settings.inputs import DataSettings


@pytest.fixture(scope="module")
def splits() -> Splits:
    return load_splits(DataSettings())


def test_every_digit_is_there_with_its_license() -> None:
    archive = resources.files("prunekit.data") / "digits.npz"
    assert len(archive.read_bytes()) < 200_000
    text = (resources.files("prunekit.data") / "DIGITS.md").read_text(encoding="utf-8")
    assert all(words in text for words in ("CC BY 4.0", "Alpaydin", "Kaynak", "10.24432/C50P49"))


def test_the_splits_are_disjoint_and_together_everything(splits: Splits) -> None:
    parts = [set(chosen(part)) for part in (splits.train, splits.validation, splits.test)]
    assert sum(len(part) for part in parts) == len(set().union(*parts)) == 1797
    assert len(parts[2]) >= 500
    assert len(parts[1]) >= 150


def chosen(part: object) -> list[int]:
    """Indices into the whole data set, through nested subsets."""
    indices, dataset = part.indices, part.dataset  # type: ignore[attr-defined]
    while hasattr(dataset, "indices"):
        indices, dataset = dataset.indices[indices], dataset.dataset
    return [int(index) for index in indices]


def test_every_split_has_every_class_in_proportion(splits: Splits) -> None:
    for part, total in ((splits.train, 1797 * 0.6), (splits.validation, 1797 * 0.1), (splits.test, 1797 * 0.3)):
        counts = torch.bincount(part.labels, minlength=10)
        assert (counts - total / 10).abs().max() <= 5


def test_an_image_is_the_digit_upsampled_and_normalized(splits: Splits) -> None:
    image, label = splits.train[7]
    assert image.shape == splits.sample_shape == (3, 32, 32)
    assert image.dtype == torch.float32
    assert isinstance(label, int)
    assert splits.classes == tuple("0123456789")
    assert torch.equal(image[0], image[1])
    assert torch.equal(image[0], image[2])
    original = load_splits(DataSettings(image_size=8)).train[7][0]
    # Bilinear with half-pixel centers: the mean of the 4 pixels around a corner of the 8x8 grid is what lies between.
    expected = torch.nn.functional.interpolate(original[None], (32, 32), mode="bilinear", align_corners=False)[0]
    torch.testing.assert_close(image, expected)
    assert set((original * 8 + 8).flatten().tolist()) <= set(range(17))


@pytest.mark.parametrize("changed", [{"split_seed": 1}, {"image_size": 28}, {"test_share": 0.35}])
def test_the_fingerprint_follows_what_matters(splits: Splits, changed: dict[str, float]) -> None:
    assert load_splits(DataSettings()).fingerprint == splits.fingerprint
    assert load_splits(DataSettings(batch=7, workers=3)).fingerprint == splits.fingerprint
    assert load_splits(replace(DataSettings(), **changed)).fingerprint != splits.fingerprint  # type: ignore[arg-type]


def test_another_seed_draws_other_images(splits: Splits) -> None:
    other = load_splits(DataSettings(split_seed=1))
    assert chosen(other.test) != chosen(splits.test)
    assert chosen(load_splits(DataSettings()).test) == chosen(splits.test)


def test_shares_that_leave_nothing_are_refused() -> None:
    with pytest.raises(UsageError, match=r"test_share \+ validation_share < 1, got 0\.6 \+ 0\.4"):
        load_splits(DataSettings(test_share=0.6, validation_share=0.4))


def test_an_index_outside_ends_a_loop(splits: Splits) -> None:
    with pytest.raises(IndexError):
        splits.validation[len(splits.validation)]
    assert torch.equal(splits.validation[-1][0], splits.validation[len(splits.validation) - 1][0])
