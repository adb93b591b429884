"""Copies of images that repair fits on as well."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from equivalence import randomised
from torch import nn

from prunekit.channels import trace
from prunekit.planning import Plan
from prunekit.repair import RepairSettings, repair
from prunekit.repair.warping import SCALE, SHIFT, TURN, warped, with_copies

IMAGES = torch.randn(24, 3, 12, 12, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def test_copies_are_moves_and_nothing_else() -> None:
    """The images of coordinates say where each pixel came from: by an affine map within the limits."""
    side = 33
    at = (torch.arange(side, dtype=torch.float64) * 2 + 1) / side - 1
    down, right = torch.meshgrid(at, at, indexing="ij")
    found = warped(torch.stack([right, down]).expand(64, 2, side, side))
    middle = side // 2
    assert (found[:, :, middle, middle].abs() <= 2 * SHIFT + 1e-6).all()
    # the derivative of what is shown, from one pixel to the next, in the middle, where nothing is reflected
    along = (found[:, :, middle, middle + 1] - found[:, :, middle, middle - 1]) * side / 4
    across = (found[:, :, middle + 1, middle] - found[:, :, middle - 1, middle]) * side / 4
    torch.testing.assert_close(along.norm(dim=1), across.norm(dim=1))
    assert (along * across).sum(1).abs().max() < 1e-9
    assert ((along.norm(dim=1) - 1).abs() <= SCALE).all()
    assert (torch.atan2(along[:, 1].abs(), along[:, 0].abs()) <= TURN + 1e-6).all()
    mirrored = along[:, 0] < 0
    assert 16 <= int(mirrored.sum()) <= 48
    assert (across[:, 1] > 0).all()


def test_copies_keep_type_and_are_the_same_again() -> None:
    for kind in (torch.float32, torch.bfloat16, torch.float64):
        images = IMAGES.to(kind)
        found = warped(images)
        assert (found.dtype, found.shape) == (kind, images.shape)
        assert torch.equal(found, warped(images))
        assert not torch.equal(found, images)
    torch.testing.assert_close(warped(torch.ones(5, 1, 1, 1)), torch.ones(5, 1, 1, 1))


def test_what_judges_stays_as_it_is() -> None:
    (found,), judging = with_copies((IMAGES,), RepairSettings(held_out=0.25))
    assert judging == 6
    assert torch.equal(found, torch.cat([IMAGES[:18], warped(IMAGES[:18]), IMAGES[18:]]))


@pytest.mark.parametrize(
    ("inputs", "settings"),
    [
        ((IMAGES,), RepairSettings(warped=False)),
        ((IMAGES,), RepairSettings(fit="moments")),
        ((IMAGES[:, 0],), RepairSettings()),
        ((IMAGES, IMAGES), RepairSettings()),
        ((IMAGES.long(),), RepairSettings()),
    ],
)
def test_where_there_are_no_copies(inputs: tuple[torch.Tensor, ...], settings: RepairSettings) -> None:
    found, judging = with_copies(inputs, settings)
    assert all(one is other for one, other in zip(found, inputs, strict=True))
    assert judging == 3


def test_repair_fits_on_the_copies_too() -> None:
    """As a repair does that is given them, with the same images to judge by and all positions sampled."""
    layers = [nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 6, 3), nn.ReLU(), nn.Flatten(), nn.Linear(384, 4)]
    model = randomised(nn.Sequential(*layers)).double().eval()
    chart = trace(model, (IMAGES[:2],))
    keep = np.ones(chart.n_labels, dtype=bool)
    keep[chart.groups[0].labels[::2]] = False
    plan = Plan(chart, keep)
    both, _ = repair(model, plan, IMAGES, RepairSettings(held_out=0.25, rows=10**6))
    (given,), judging = with_copies((IMAGES,), RepairSettings(held_out=0.25))
    same, _ = repair(model, plan, given, RepairSettings(held_out=judging / len(given), rows=10**6, warped=False))
    alone, _ = repair(model, plan, IMAGES, RepairSettings(held_out=0.25, rows=10**6, warped=False))
    with torch.no_grad():
        torch.testing.assert_close(both(IMAGES), same(IMAGES), rtol=1e-6, atol=1e-6)
        assert float((both(IMAGES) - alone(IMAGES)).abs().max()) > 1e-3
