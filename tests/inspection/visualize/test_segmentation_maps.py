"""Class maps of models that give each pixel a class: of the mean score over the pixels."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from prunekit.errors import ModelError
from prunekit.inspection.visualize.class_maps import class_activation_map, saliency
from prunekit.inspection.visualize.feature_maps import feature_maps
from prunekit.inspection.visualize.image_grids import stretched


class Segmenter(nn.Module):
    """Knows by its weights that class 1 is red and class 2 is green."""

    def __init__(self, wrapped: bool) -> None:
        super().__init__()
        self.body = nn.ModuleList([nn.Conv2d(3, 4, 1, bias=False), nn.ReLU()])
        self.head, self.wrapped = nn.Conv2d(4, 3, 1, bias=False), wrapped
        colors = torch.eye(4)[:, :3]
        self.body[0].weight.data.copy_(colors[..., None, None])
        self.head.weight.data.copy_(colors.T.roll(1, 0)[..., None, None])

    def forward(self, x: Tensor) -> Tensor | dict[str, Tensor]:
        for layer in self.body:
            x = layer(x)
        scores: Tensor = self.head(x)
        return {"out": scores} if self.wrapped else scores


@pytest.mark.parametrize("wrapped", [False, True])
def test_maps_show_the_pixels_of_the_class(wrapped: bool) -> None:
    images = torch.zeros(2, 3, 8, 8)
    images[:, 0, :2, :2], images[:, 1, 5:, 5:] = 1.0, 2.0  # red above on the left, green below on the right
    model = Segmenter(wrapped)
    for target, place in ((1, (slice(0, 2), slice(0, 2))), (2, (slice(5, 8), slice(5, 8)))):
        found = class_activation_map(model, images, target=target)
        assert found.layer == "body.1"  # before the scores
        inside = found.values[:, *place]
        assert bool((inside > 0).all())
        assert found.values.sum() == pytest.approx(float(inside.sum()))
        scores = model(images)
        scores = scores["out"] if isinstance(scores, dict) else scores
        torch.testing.assert_close(found.probabilities, scores.detach().softmax(1).mean((2, 3))[:, target])
        assert found.predicted.tolist() == [2, 2]  # of the highest mean score
        pixels = saliency(model, images + 0.1, target=target)
        assert pixels.values.shape == (2, 8, 8)
    assert class_activation_map(model, images, layer="head").layer == "head"


def test_outputs_without_classes_are_refused_with_the_tasks_that_have_them() -> None:
    with pytest.raises(ModelError, match=r"of image_classification, .* or of segmentation, .*got \(1, 192, 1\)"):
        saliency(Tokens(), torch.rand(1, 3, 8, 8))


class Tokens(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(1)[..., None]


def test_features_of_children_in_lists() -> None:
    found = feature_maps({"dense": Segmenter(False).eval()}, torch.rand(1, 3, 8, 8))
    assert [one.path for one in found] == ["body.0", "body.1", "head"]


def test_any_values_become_an_image() -> None:
    pixels = stretched(torch.tensor([[[-2.0, 0.0], [0.0, 2.0]]]))
    assert pixels[..., 0].tolist() == [[0, 128], [128, 255]]
    assert stretched(torch.rand(5, 4, 6)).shape == (4, 6, 3)
    assert stretched(torch.ones(3, 2, 2)).max() == 0
