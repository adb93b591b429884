"""Each criterion against its paper, written down in plain NumPy."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from criteria_nets import Scored, Scores, data, randomize_norms, scored, small_net
from torch import nn
from torch.nn import functional as F
from torchvision import models
from torchvision.models.resnet import BasicBlock

FEW = 4
"""Labels of each group that are checked on the large net."""


@pytest.fixture(scope="module", params=["small", "resnet"])
def net(request: pytest.FixtureRequest) -> Scored:
    if request.param == "small":
        return scored(small_net(), data())
    torch.manual_seed(0)
    model = models.ResNet(BasicBlock, [1, 1, 1, 1], num_classes=4).double().eval()
    randomize_norms(model)
    return scored(model, data(size=32))


def weight(net: Scored, name: str) -> Scores:
    return net.model.get_parameter(name).detach().numpy()


def slots(net: Scored, label: int) -> Iterator[tuple[str, int, np.ndarray]]:
    """Weights of two or more axes that carry a label: name, axis and the indices."""
    for name, axes in net.chart.labels.items():
        for axis, labels in enumerate(axes):
            if labels is not None and (labels == label).any() and name.endswith("weight") and len(axes) > 1:
                yield name, axis, np.flatnonzero(labels == label)


def check(net: Scored, criterion: str, expected: Callable[[int], float]) -> None:
    found = net(criterion)
    assert found[0] == np.inf
    for group in net.chart.groups:
        for label in group.labels[:: max(1, len(group.labels) // FEW)]:
            assert found[label] == pytest.approx(expected(label), rel=1e-9), f"label {label} of {group.name}"


@pytest.mark.slow
def test_taylor_is_molchanov_et_al_2019(net: Scored) -> None:
    gradients: list[dict[str, np.ndarray]] = []
    for images, labels in data(images_like(net)):
        net.model.zero_grad()
        F.cross_entropy(net.model(images), labels).backward()
        gradients.append({name: p.grad.numpy().copy() for name, p in net.model.named_parameters()})  # type: ignore[union-attr]
    net.model.zero_grad()

    def contribution(name: str, axis: int, index: np.ndarray) -> float:
        terms = [(weight(net, name) * gradient[name]).take(index, axis).sum() for gradient in gradients]
        return float(np.mean(np.square(terms)))

    check(net, "taylor", lambda label: float(np.mean([contribution(*slot) for slot in slots(net, label)])))


def images_like(net: Scored) -> int:
    return 2 if hasattr(net.model, "norm1") else 32


@pytest.mark.slow
def test_fpgm_is_he_et_al_2019(net: Scored) -> None:
    def distance(name: str, index: np.ndarray) -> float:
        filters = weight(net, name).reshape(len(weight(net, name)), -1)
        total = [np.linalg.norm(filters - filters[i], axis=1).sum() for i in index]
        return float(np.mean(total)) / len(filters) / np.sqrt(filters.shape[1])

    def expected(label: int) -> float:
        return float(np.mean([distance(name, index) for name, axis, index in slots(net, label) if axis == 0]))

    check(net, "fpgm", expected)


def test_bn_scale_is_liu_et_al_2017(net: Scored) -> None:
    norms = [path for path, module in net.model.named_modules() if isinstance(module, nn.BatchNorm2d)]

    def expected(label: int) -> float:
        carriers = [(path, net.chart.labels[f"{path}.weight"][0]) for path in norms]
        return float(np.mean([abs(weight(net, f"{path}.weight")[on == label]) for path, on in carriers if label in on]))  # type: ignore[operator]

    check(net, "bn_scale", expected)


def test_lamp_is_lee_et_al_2021(net: Scored) -> None:
    l2, lamp = net("l2"), net("lamp")
    for group in net.chart.groups:
        squares = l2[group.labels] ** 2
        expected = [square / squares[squares >= square].sum() for square in squares]
        np.testing.assert_allclose(lamp[group.labels], expected, rtol=1e-9)
        assert lamp[group.labels].max() == 1


def test_lamp_counts_equal_ones_by_their_index() -> None:
    model = small_net()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.5)
        model.conv2.weight[:, 2:4] = 0.25
        model.conv1.weight[2:4], model.norm1.weight[2:4], model.norm1.bias[2:4] = 0.25, 0.25, 0.25
        model.conv1.bias[2:4] = 0.25  # type: ignore[index]
    net = scored(model, data())
    along = net.along("lamp", "conv1.weight")
    np.testing.assert_allclose(along, [1 / 4, 1 / 3, 1 / 18, 1 / 17, 1 / 2, 1], rtol=1e-9)
    np.testing.assert_allclose(net.along("lamp", "conv2.weight"), [1 / 5, 1 / 4, 1 / 3, 1 / 2, 1], rtol=1e-9)


def test_apoz_is_hu_et_al_2016(net: Scored) -> None:
    outputs: dict[tuple[str, int], list[np.ndarray]] = {}

    def keep(path: str) -> Callable[..., None]:
        def hook(module: nn.Module, arguments: object, result: torch.Tensor) -> None:
            calls[path] = calls.get(path, -1) + 1
            zeros = (result == 0).double().mean((0, 2, 3)).numpy()
            outputs.setdefault((path, calls[path]), []).append(zeros)

        return hook

    handles = [m.register_forward_hook(keep(p)) for p, m in net.model.named_modules() if isinstance(m, nn.ReLU)]
    with torch.no_grad():
        for images, _ in data(images_like(net)):
            calls: dict[str, int] = {}
            net.model(images)
    for handle in handles:
        handle.remove()

    def expected(label: int) -> float:
        zeros = []
        for (path, call), batches in outputs.items():
            on = net.chart.activations[path, "output", call] == label
            zeros += [np.mean(batches, axis=0)[on].mean()] if on.any() else []
        return 1 - float(np.mean(zeros))

    check(net, "apoz", expected)
