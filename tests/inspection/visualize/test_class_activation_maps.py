"""Class activation maps against captum, against a model that returns its intermediates, and on every kind of model."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from captum.attr import LayerGradCam
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torchvision import models
from torchvision.models.vision_transformer import VisionTransformer

import prunekit
from prunekit.errors import ModelError, UsageError
from prunekit.hooks.hook import count_hooks
from prunekit.inspection.visualize.class_maps import class_activation_map, correlation, grad_cam
from prunekit.models.zoo import build_model
from prunekit.settings.inputs import ModelSettings


def images(size: int = 64, batch: int = 2, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(batch, 3, size, size, generator=torch.Generator().manual_seed(0), dtype=dtype)


def build(name: str) -> nn.Module:
    torch.manual_seed(0)
    return models.get_model(name, weights=None, num_classes=4).double().eval()


class AsImage(nn.Module):
    """Tokens (B, 1 + h w, C), handed on; those of patches pass a module in between as (B, C, h, w)."""

    def __init__(self, side: int) -> None:
        super().__init__()
        self.side, self.image = side, nn.Identity()

    def forward(self, tokens: Tensor) -> Tensor:
        image = self.image(tokens[:, 1:].transpose(1, 2).unflatten(2, (self.side, self.side)))
        return torch.cat((tokens[:, :1], image.flatten(2).transpose(1, 2)), 1)


def small_vit() -> VisionTransformer:
    torch.manual_seed(0)
    model = VisionTransformer(32, 8, num_layers=2, num_heads=2, hidden_dim=16, mlp_dim=32, num_classes=4)
    nn.init.normal_(model.heads.head.weight)  # torchvision begins with zeros, which have no gradient
    return model.double().eval()


@pytest.mark.parametrize(
    ("name", "layer"),
    [("resnet18", "layer3"), ("mobilenet_v2", "features.17.conv.2")],
)
def test_grad_cam_is_captums(name: str, layer: str) -> None:
    model, x = build(name), images()
    ours = class_activation_map(model, x, layer, target=[3, 1])
    theirs = LayerGradCam(model, model.get_submodule(layer)).attribute(x, target=torch.tensor([3, 1]))
    expected = theirs.detach()[:, 0].relu()
    assert float(expected.max()) > 0
    torch.testing.assert_close(ours.values, expected, rtol=1e-9, atol=1e-9 * float(expected.max()))
    assert ours.classes.tolist() == [3, 1]
    torch.testing.assert_close(ours.probabilities, model(x).softmax(1).detach()[[0, 1], [3, 1]])
    assert count_hooks(model) == 0


def test_grad_cam_of_tokens_is_captums_of_the_same_tokens_as_an_image() -> None:
    model, x = small_vit(), images(32)
    layers = model.encoder.layers
    layers.encoder_layer_1.ln_1 = nn.Sequential(layers.encoder_layer_1.ln_1, AsImage(4))
    ours = class_activation_map(model, x, "encoder.layers.encoder_layer_1.ln_1.0", target=2)
    theirs = LayerGradCam(model, layers.encoder_layer_1.ln_1[1].image).attribute(x, target=2)
    assert float(ours.values.max()) > 0
    torch.testing.assert_close(ours.values, theirs.detach()[:, 0].relu())


@pytest.mark.slow
def test_the_default_layer_is_the_last_that_has_places() -> None:
    """And at least 7 x 7 of them."""
    resnet = build("resnet18")
    assert class_activation_map(resnet, images()).layer == "layer2"  # (8, 8); the last one has (2, 2)
    assert class_activation_map(resnet, images(200, batch=1)).layer == "layer4"  # (7, 7)
    assert class_activation_map(resnet, images(8)).layer == "layer1"  # no layer has so many: the last of (2, 2)
    assert class_activation_map(build("densenet121"), images(batch=1)).layer == "features.transition2.conv"
    # Behind the last attention of a ViT, only the class token is read.
    assert class_activation_map(small_vit(), images(32)).layer == "encoder.layers.encoder_layer_1.ln_1"


class InPlace(nn.Module):
    """A layer whose output is overwritten: as it is, through a view of it, or as a view itself."""

    def __init__(self, how: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.how = how
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.view = nn.Unflatten(1, (4, 1))
        self.flat = nn.Flatten(1, 2)
        self.fc = nn.Linear(4, 3)

    def forward(self, x: Tensor, intermediate: list[Tensor] | None = None) -> Tensor:
        out = self.conv(x)
        if self.how == "as a view":
            out = self.flat(self.view(out))
        if intermediate is not None:
            intermediate.append(out)
            out = out.clone()
        if self.how == "through a view":
            F.relu(out[:, :2], inplace=True)
        else:
            F.relu_(out)
        return self.fc(out.square().mean((2, 3)))

    @property
    def layer(self) -> str:
        return "flat" if self.how == "as a view" else "conv"


@pytest.mark.parametrize("how", ["as it is", "through a view", "as a view"])
def test_outputs_that_are_overwritten_later(how: str) -> None:
    model, x = InPlace(how).double(), images(16)
    found = class_activation_map(model, x, model.layer, target=1)
    inner: list[Tensor] = []
    score = model(x, inner)[:, 1].sum()
    (gradient,) = torch.autograd.grad(score, inner[0])
    assert float(inner[0].detach().min()) < 0  # what the activation was before it was overwritten
    expected = grad_cam(inner[0].detach(), gradient)
    torch.testing.assert_close(found.values, expected)
    assert float(expected.max()) > 0


class Counting(TorchDispatchMode):
    """How often each operator runs."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("layer", "behind"), [("layer2", 20), ("layer4", 0), (None, 20)])
def test_one_forward_and_one_backward_down_to_the_layer(layer: str | None, behind: int) -> None:
    model = models.resnet34(num_classes=4).eval()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    with Counting() as counting:
        class_activation_map(model, images(64, 1, torch.float32), layer)
    assert counting.calls["convolution"] == 36
    # Each convolution behind the layer once; the layer's own last operation at most.
    assert counting.calls["convolution_backward"] == behind
    assert {name: parameter.grad for name, parameter in model.named_parameters()} == gradients
    assert count_hooks(model) == 0


def test_dense_masked_and_compact_models() -> None:
    torch.manual_seed(0)
    model, x = build_model(ModelSettings("resnet20", "cifar"), num_classes=4).double().eval(), images(16)
    settings = prunekit.PruneSettings(prunekit.BudgetSettings(channels=0.5), criterion="l2")
    plan = prunekit.plan(model, x[:1], settings=settings)
    small = prunekit.compact(model, plan).double()
    dense = class_activation_map(model, x, target=1)
    with prunekit.masked(model, plan, restore=True):
        masked = class_activation_map(model, x, target=1)
    compact = class_activation_map(small, x, target=1)
    assert dense.layer == masked.layer == compact.layer == "layer2"
    top = float(masked.values.abs().max())
    torch.testing.assert_close(compact.values, masked.values, rtol=1e-9, atol=1e-9 * top)
    assert not torch.allclose(dense.values, masked.values, rtol=1e-3)
    assert count_hooks(model) == count_hooks(small) == 0


def test_frozen_models_and_modes_are_left_alone() -> None:
    model = build("resnet18").train()
    model.layer1.eval()
    expected = class_activation_map(model, images(), "layer2", target=0)
    model.requires_grad_(False)
    torch.testing.assert_close(class_activation_map(model, images(), "layer2", target=0).values, expected.values)
    assert model.training
    assert model.layer4.training
    assert not model.layer1.training


@pytest.mark.parametrize(
    ("layer", "expected"),
    [
        (
            "fc",
            "fc returns (1, 4), a vector of 4 values for each image, without places in it; see them as bars: prunekit",
        ),
        ("avgpool", "avgpool returns (1, 512, 1, 1), 512 values at a single place, because all others are pooled"),
        ("layer5", "layer 'layer5': did you mean 'layer"),
    ],
)
def test_layers_that_return_no_image(layer: str, expected: str) -> None:
    model = build("resnet18")
    with pytest.raises(ModelError) as raised:
        class_activation_map(model, images(batch=1), layer)
    assert expected in str(raised.value)
    assert count_hooks(model) == 0


def test_what_no_gradient_comes_to_is_said() -> None:
    vit, x = small_vit(), images(32)
    with pytest.raises(ModelError, match="zero at all of its patches, as it is where only the class token is read"):
        class_activation_map(vit, x, "encoder")
    with pytest.raises(ModelError, match="did you mean"):
        class_activation_map(vit, x, "encoder.layers.encoder_layer_0.self_attention.out_proj")
    with pytest.raises(UsageError, match="class 4: the model has 4 classes, 0 to 3"):
        class_activation_map(vit, x, target=4)


def test_a_classifier_of_zeros_sees_no_class_anywhere() -> None:
    torch.manual_seed(0)
    model = VisionTransformer(32, 8, num_layers=2, num_heads=2, hidden_dim=16, mlp_dim=32, num_classes=4).eval()
    with pytest.raises(ModelError, match="the score does not depend on the image, as with a classifier of zeros"):
        class_activation_map(model, torch.randn(1, 3, 32, 32))


def test_correlation_is_pearsons_image_by_image() -> None:
    first = torch.rand(3, 4, 5, dtype=torch.float64)
    second = torch.stack((2 * first[0] + 1, -first[1], torch.full((4, 5), 0.3, dtype=torch.float64)))
    values = correlation(first, second)
    assert values[0] == pytest.approx(1)
    assert values[1] == pytest.approx(-1)
    assert values[2] is None
    other = torch.rand(3, 4, 5)
    for value, one, two in zip(correlation(first, other), first, other, strict=True):
        assert value == pytest.approx(float(torch.corrcoef(torch.stack((one.flatten(), two.double().flatten())))[0, 1]))
    with pytest.raises(UsageError, match="two maps of one shape"):
        correlation(first, other[:, :2])
