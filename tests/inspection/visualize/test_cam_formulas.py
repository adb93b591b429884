"""The formulas of class activation maps against the papers', written out index by index."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from prunekit.inspection.visualize.class_maps import class_activation_map, eigen_cam, grad_cam_pp, layer_cam
from prunekit.inspection.visualize.spatial_outputs import layout_of


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_grad_cam_plus_plus_is_equation_19_with_the_exponential_of_the_score() -> None:
    activations, gradients, score = draw(1, 3, 2, 4).relu(), draw(1, 3, 2, 4, seed=1), 0.7
    gradients[0, 0, 0, 0] = 0
    expected = torch.zeros(2, 4, dtype=torch.float64)
    for channel, gradient in zip(activations[0], gradients[0], strict=True):
        weight = 0.0
        for g in gradient.flatten().tolist():
            first, second, third = (math.exp(score) * g**power for power in (1, 2, 3))  # of Y = exp(S)
            below = 2 * second + float(channel.sum()) * third
            weight += (second / below if below else 0.0) * max(first, 0.0)
        expected += weight * channel
    torch.testing.assert_close(grad_cam_pp(activations, gradients)[0] * math.exp(score), expected.relu())
    assert torch.isfinite(grad_cam_pp(activations, torch.zeros_like(gradients))).all()


def test_layer_cam_weighs_each_place_by_its_own_positive_gradient() -> None:
    activations, gradients = draw(2, 3, 2, 2), draw(2, 3, 2, 2, seed=1)
    found = layer_cam(activations, gradients)
    for image, row, column in [(0, 0, 0), (1, 1, 0)]:
        pairs = zip(activations[image, :, row, column].tolist(), gradients[image, :, row, column].tolist(), strict=True)
        assert float(found[image, row, column]) == pytest.approx(max(0, sum(a * max(g, 0) for a, g in pairs)))


def test_eigen_cam_is_what_the_first_principal_direction_of_the_places_sees() -> None:
    profile, mixture = draw(6).abs(), draw(5).abs()
    activations = torch.einsum("c,p->cp", mixture, profile).unflatten(1, (2, 3))[None]
    # Of rank one, the map is the profile of places, whatever the signs of the channels.
    expected = profile.unflatten(0, (2, 3)) * mixture.norm()
    torch.testing.assert_close(eigen_cam(activations)[0], expected)
    torch.testing.assert_close(eigen_cam(-activations)[0], expected)
    noisy = activations + 0.1 * draw(1, 5, 2, 3, seed=2)
    rows = noisy[0].flatten(1).T
    vector = torch.linalg.eigh(rows.T @ rows).eigenvectors[:, -1]
    torch.testing.assert_close(eigen_cam(noisy)[0].flatten(), (rows @ vector).abs())


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
