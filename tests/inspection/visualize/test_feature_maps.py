from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import prunekit
from prunekit.errors import ModelError, UsageError
from prunekit.hooks.hook import count_hooks
from prunekit.inspection.visualize.feature_maps import feature_maps, layout_of, view_of
from prunekit.inspection.visualize.image_grids import columns, draw

IMAGE = torch.randn(1, 3, 16, 16, generator=torch.Generator().manual_seed(0))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.relu = nn.Conv2d(3, 8, 3, 2, 1), nn.ReLU(inplace=True)
        self.inner, self.head = nn.Conv2d(8, 12, 3, padding=1), nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.relu(self.inner(self.relu(self.stem(x)))).mean((2, 3)))  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def sides() -> tuple[dict[str, nn.Module], prunekit.Plan]:
    model = Net().eval()
    plan = prunekit.plan(model, (IMAGE,), channels=0.5)
    return {"dense": model, "pruned": prunekit.compact(model, plan)}, plan


def kept(plan: prunekit.Plan, path: str, call: int) -> np.ndarray:
    return plan.keep[plan.channel_map.activations[path, "output", call]]


def test_pruned_channels_stand_where_the_dense_ones_do(sides: tuple[dict[str, nn.Module], prunekit.Plan]) -> None:
    models, plan = sides
    found = feature_maps(models, IMAGE, ["inner", "relu"], kept=lambda path, call: kept(plan, path, call))
    assert [(one.path, one.call, one.channels) for one in found] == [("relu", 0, 8), ("inner", 0, 12), ("relu", 1, 12)]
    assert [one.name for one in found] == ["relu", "inner", "relu, call 2"]
    inner = found[1]
    assert inner.kept is not None
    assert inner.kept.sum() == 6
    with torch.no_grad():
        hidden = {name: model.inner(model.stem(IMAGE).relu())[0] for name, model in models.items()}
    assert torch.equal(inner.sides["dense"], hidden["dense"])
    assert torch.equal(inner.sides["pruned"][torch.from_numpy(inner.kept)], hidden["pruned"])
    assert inner.sides["pruned"][torch.from_numpy(~inner.kept)].isnan().all()
    low, high = inner.limits()
    both = torch.stack([inner.sides["dense"], inner.sides["pruned"].nan_to_num()]).flatten(2)
    assert torch.equal(low[inner.kept], both.amin((0, 2))[inner.kept])
    assert torch.equal(high[~inner.kept], hidden["dense"].amax((1, 2))[~inner.kept])
    assert count_hooks(models["dense"]) == count_hooks(models["pruned"]) == 0


def test_where_nobody_knows_what_is_gone_channels_stand_in_their_own_order(
    sides: tuple[dict[str, nn.Module], prunekit.Plan],
) -> None:
    (inner,) = feature_maps(sides[0], IMAGE, "inner", kept=lambda path, call: None)
    assert inner.kept is None
    assert [len(values) for values in inner.sides.values()] == [12, 6]
    assert inner.note.startswith("which of the channels the 6 are is not known")
    assert draw(inner).shape[2] == 3


def test_a_picture_has_a_panel_for_each_model_with_pruned_channels_crossed_out(
    sides: tuple[dict[str, nn.Module], prunekit.Plan],
) -> None:
    models, plan = sides
    (inner,) = feature_maps(models, IMAGE, "inner", kept=lambda path, call: kept(plan, path, call))
    picture = draw(inner)
    (alone,) = feature_maps({"dense": models["dense"]}, IMAGE, "inner")
    assert picture.dtype == np.uint8
    assert picture.shape[1] > 1.3 * draw(alone).shape[1]
    red, gray = ((picture == color).all(2) for color in ((190, 18, 60), (229, 231, 235)))
    half = picture.shape[1] // 2
    assert red[:, :half].sum() > 6 * 100  # six crosses over the dense maps
    assert gray[:, half:].sum() > 6 * 56 * 56 * 0.8  # and six empty places
    assert not gray[:, :half].any()
    few = draw(inner, "cat.png", most=4)
    assert few.shape[0] < picture.shape[0]


def test_the_children_are_shown_where_no_layer_is_named(sides: tuple[dict[str, nn.Module], prunekit.Plan]) -> None:
    found = feature_maps({"dense": sides[0]["dense"]}, IMAGE)
    assert [(one.name, one.view) for one in found] == [
        ("stem", "maps"), ("relu", "maps"), ("inner", "maps"), ("relu, call 2", "maps"), ("head", "bars")
    ]  # fmt: skip
    assert all(draw(one).ndim == 3 for one in found)


def test_a_layer_with_two_paths_is_shown_once() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU())
    model.again = nn.ModuleList([model[0]])
    model.forward = lambda x: model[1](model[0](x))  # type: ignore[method-assign, assignment]
    assert [one.path for one in feature_maps({"dense": model}, IMAGE)] == ["0", "1"]


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


@pytest.mark.parametrize(
    ("shape", "view", "sizes", "what"),
    [
        ((1, 8, 4, 4), "maps", (8, 4, 4), "8 maps of 4 x 4"),
        ((1, 4, 4, 8), "maps", (8, 4, 4), "8 maps of 4 x 4"),  # channels last
        ((1, 17, 8), "tokens", (8, 4, 4), "17 tokens of 8 channels (4 x 4 and 1 more)"),
        ((1, 16, 8), "tokens", (8, 4, 4), "16 tokens of 8 channels (4 x 4)"),
        ((1, 8), "bars", (8, 1, 1), "a vector of 8 values"),
        ((1, 8, 1, 1), "bars", (8, 1, 1), "a vector of 8 values"),
    ],
)
def test_each_output_is_shown_as_it_fits(shape: tuple[int, ...], view: str, sizes: tuple[int, ...], what: str) -> None:
    values = torch.arange(float(np.prod(shape))).reshape(shape)
    found = view_of(values, (1, 3, 32, 32), "layer")
    assert (found.view, tuple(found.values.shape), found.what) == (view, sizes, what)
    if view == "tokens":
        assert torch.equal(found.values[:, 1, 2], values[0, shape[1] - 16 + 6])


def test_an_output_that_no_view_fits_is_refused() -> None:
    with pytest.raises(UsageError, match="qkv: its output, 4 x 49 x 24, is neither maps of an image, nor tokens"):
        view_of(torch.zeros(4, 49, 24), (1, 3, 32, 32), "qkv")


def test_a_layer_that_is_not_there_or_a_model_that_does_not_run(
    sides: tuple[dict[str, nn.Module], prunekit.Plan],
) -> None:
    models, _ = sides
    with pytest.raises(UsageError, match="layers: 'iner' matches no module path; did you mean 'inner'"):
        feature_maps(models, IMAGE, "iner")
    with pytest.raises(ModelError, match=r"the dense model does not run on float32 \(1, 4, 16, 16\): RuntimeError"):
        feature_maps(models, torch.zeros(1, 4, 16, 16), "inner")


class InList(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.ModuleList([nn.Conv2d(3, 4, 1), nn.ReLU()]), nn.Conv2d(4, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.body:
            x = layer(x)
        return self.head(x)  # type: ignore[no-any-return]


def test_features_of_children_in_lists() -> None:
    found = feature_maps({"dense": InList().eval()}, torch.rand(1, 3, 8, 8))
    assert [one.path for one in found] == ["body.0", "body.1", "head"]


def test_tiles_fill_their_rows() -> None:
    assert [columns(count, (60, 60)) for count in (1, 2, 12, 16, 64, 512)] == [1, 1, 3, 4, 8, 23]
    assert columns(64, (79, 64)) == 8
