"""First-layer filters as pictures."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from prunekit.errors import UsageError
from prunekit.inspection.visualize.filters import draw_filters, first_filters

IMAGE = (3, 8, 8)


def conv(count: int, channels: int = 3) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Identity(), nn.Conv2d(channels, count, 3), nn.ReLU())


def colors(picture: np.ndarray, color: tuple[int, int, int]) -> int:
    return int((picture == color).all(2).sum())


def test_pruned_filters_are_crossed_out_and_stand_where_the_dense_ones_do() -> None:
    dense, pruned = conv(6), conv(4)
    keep = np.array([True, False, True, True, False, True])
    with torch.no_grad():
        pruned[1].weight.copy_(dense[1].weight[torch.from_numpy(keep)])  # type: ignore[operator]
    found = first_filters({"dense": dense, "pruned": pruned}, IMAGE, kept=lambda path, call: keep)
    assert found.path == "1"
    assert torch.equal(found.sides["pruned"][0], found.sides["dense"][0])
    assert found.sides["pruned"][[1, 4]].isnan().all()
    both, alone = draw_filters(found), draw_filters(first_filters({"dense": dense}, IMAGE))
    assert colors(both, (190, 18, 60)) > 2 * 100 > colors(alone, (190, 18, 60)) == 0
    assert colors(both, (229, 231, 235)) > 2 * 56 * 56 * 0.8
    assert both.shape[1] > 1.3 * alone.shape[1]


def test_a_filter_has_the_colors_of_its_weights() -> None:
    model = conv(2)
    with torch.no_grad():
        model[1].weight.zero_()  # type: ignore[operator]
        model[1].weight[1, 0] = 2.0  # type: ignore[index]  # as red as can be
    picture = draw_filters(first_filters({"dense": model}, IMAGE))
    assert colors(picture, (255, 128, 128)) == colors(picture, (128, 128, 128)) >= 56 * 56


def test_one_large_weight_does_not_leave_the_others_gray() -> None:
    model = conv(64)
    plain = draw_filters(first_filters({"dense": model}, IMAGE)).astype(int)
    with torch.no_grad():
        model[1].weight[0, 0, 0, 0] = 1e3  # type: ignore[index]
    found = draw_filters(first_filters({"dense": model}, IMAGE)).astype(int)
    assert abs(found - plain).mean() < 0.05 * abs(plain - 128).mean()
    with torch.no_grad():
        model[1].weight.zero_()  # type: ignore[operator]
        model[1].weight[3, 1, 1, 1] = 1e-3  # type: ignore[index]
    assert colors(draw_filters(first_filters({"dense": model}, IMAGE)), (128, 255, 128)) >= 18 * 18


def test_other_first_layers() -> None:
    gray = draw_filters(first_filters({"dense": conv(4, 1)}, (1, 8, 8)))
    mean = draw_filters(first_filters({"dense": conv(4, 12)}, (12, 8, 8)))
    assert gray.ndim == mean.ndim == 3
    linear = nn.Sequential(nn.Flatten(), nn.Linear(192, 5), nn.Linear(5, 2))
    assert first_filters({"dense": linear}, IMAGE).sides["dense"].shape == (5, 3, 8, 8)
    unknown = first_filters({"dense": conv(6), "pruned": conv(4)}, IMAGE, kept=lambda path, call: None)
    assert unknown.note.startswith("which of the filters the 4 are is not known")


@pytest.mark.parametrize(
    ("layer", "message"),
    [("2", "layer '2', a ReLU, has no filters that are images: expected a conv"), ("con", "layer 'con': "), (None, "")],
)
def test_a_layer_without_filters_is_refused(layer: str | None, message: str) -> None:
    model = conv(4) if layer else nn.Sequential(nn.Linear(4, 2))
    with pytest.raises(UsageError, match=message or "the model has no filters that are images"):
        first_filters({"dense": model}, IMAGE, layer)
