"""Random shifts."""

from __future__ import annotations

import torch

from prunekit.training.augment import random_shift


def test_each_image_is_moved_whole_and_its_edges_repeated() -> None:
    torch.manual_seed(0)
    images = torch.rand(64, 3, 10, 20)
    padded = torch.nn.functional.pad(images, (5, 5, 2, 2), mode="replicate")
    moved = random_shift(images, 0.25)
    found = set()
    for index in range(64):
        matches = [
            (y, x)
            for y in range(5)
            for x in range(11)
            if torch.equal(moved[index], padded[index, :, y : y + 10, x : x + 20])
        ]
        assert len(matches) == 1
        found.add(matches[0])
    assert {y for y, _ in found} == set(range(5))
    assert {0, 10} <= {x for _, x in found}


def test_no_share_changes_nothing_and_a_seed_repeats() -> None:
    images = torch.rand(8, 3, 9, 9)
    assert torch.equal(random_shift(images, 0.0), images)
    torch.manual_seed(1)
    one = random_shift(images, 0.3)
    torch.manual_seed(1)
    assert torch.equal(random_shift(images, 0.3), one)
    assert not torch.equal(one, images)
