"""Grad-CAM against CAM, and the layouts of outputs that are images."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from prunekit.inspection.visualize.class_maps import class_activation_map
from prunekit.inspection.visualize.spatial_outputs import layout_of


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_grad_cam_is_cam_where_a_classifier_reads_the_mean() -> None:
    """Selvaraju et al. 2017, section 3.1: behind a mean over places the weights differ by the number of places."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 6, 3), nn.ReLU(inplace=True), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 4)
    ).double()
    x = draw(2, 3, 8, 8)
    grad_cam = class_activation_map(model, x, "1", target=[0, 3])
    weights = model.get_submodule("4").get_parameter("weight")[[0, 3]]
    cam = torch.einsum("bchw,bc->bhw", model[:2](x), weights).detach()
    assert float(cam.min()) < 0 < float(cam.max())
    torch.testing.assert_close(cam.relu() / 36, grad_cam.values)


@pytest.mark.parametrize(
    ("shape", "image", "expected"),
    [
        ((2, 512, 7, 7), (224, 224), ("channels_first", 7, 7, 0)),
        ((2, 7, 7, 768), (224, 224), ("channels_last", 7, 7, 0)),
        ((2, 7, 7, 7), (224, 224), ("channels_first", 7, 7, 0)),
        ((2, 15, 20, 96), (230, 300), ("channels_last", 15, 20, 0)),
        ((2, 6, 26, 26), (28, 28), ("channels_first", 26, 26, 0)),  # a convolution without padding
        ((2, 197, 768), (224, 224), ("tokens", 14, 14, 1)),
        ((2, 49, 768), (224, 224), ("tokens", 7, 7, 0)),
        ((2, 261, 384), (224, 224), ("tokens", 16, 16, 5)),  # 14 x 14 pixels each, and four registers
        ((2, 211, 192), (230, 250), ("tokens", 14, 15, 1)),  # patches at the edges dropped
        ((2, 10, 64), (32, 32), ("tokens", 3, 3, 1)),
        ((2, 512, 1, 1), (224, 224), None),
        ((2, 1000), (224, 224), None),
        ((128, 49, 96), (224, 224), None),  # windows
        ((2, 64, 8, 7, 7), (224, 224), None),
        ((2, 3, 64), (32, 32), None),
    ],
)
def test_places_of_an_output_are_found_by_the_image_over_a_stride(
    shape: tuple[int, ...], image: tuple[int, int], expected: tuple[str, int, int, int] | None
) -> None:
    layout = layout_of(shape, (2, 3, *image))
    found = None if layout is None else (layout.order, layout.height, layout.width, layout.prefix)
    assert found == expected
    if layout is not None:
        channels = shape[1] if layout.order == "channels_first" else shape[-1]
        assert layout.maps(torch.empty(shape)).shape == (2, channels, layout.height, layout.width)
