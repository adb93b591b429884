"""Small nets for the mask tests: one with a channel map written by hand, and plans with random channels pruned."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from prunekit.channels.tracing.channel_map import ChannelMap, group_labels
from prunekit.planning.plan import Plan


class SmallNet(nn.Module):
    """conv-bn-relu, conv-bn with a residual added in place, conv used twice, linear behind a flatten."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.conv2, self.bn2 = nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.twice = nn.Conv2d(8, 8, 1)
        self.relu = nn.ReLU(inplace=True)
        self.fc = nn.Linear(8 * 4, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.bn1(self.conv1(x)))  # (N, 8, H, W)
        out = self.bn2(self.conv2(x))
        out += x
        out = self.twice(self.twice(self.relu(out)))
        return self.fc(nn.functional.adaptive_avg_pool2d(out, 2).flatten(1))  # type: ignore[no-any-return]


def handmade_map() -> ChannelMap:
    """All eight-channel axes of `SmallNet` carry the labels 1..8, because the residual and `twice` tie them."""
    free, image, classes = np.arange(1, 9), np.zeros(3, np.int64), np.zeros(5, np.int64)
    vector = (free,)
    labels: dict[str, tuple[np.ndarray | None, ...]] = {
        "conv1.weight": (free, image, None, None),
        "conv1.bias": vector,
        "conv2.weight": (free, free, None, None),
        "twice.weight": (free, free, None, None),
        "twice.bias": vector,
        "fc.weight": (classes, free.repeat(4)),
        "fc.bias": (classes,),
    }
    for norm in ("bn1", "bn2"):
        labels |= {f"{norm}.{name}": vector for name in ("weight", "bias", "running_mean", "running_var")}
        labels[f"{norm}.num_batches_tracked"] = ()
    state = SmallNet().state_dict()
    names = ("conv1", "bn1", "conv2", "bn2", "twice")
    activations = {(name, "output", 0): free for name in names} | {("twice", "output", 1): free}
    return ChannelMap(
        labels=labels,
        shapes={name: tuple(state[name].shape) for name in labels},
        n_labels=9,
        groups=group_labels(labels, 9),
        locks=(),
        activations=activations,
        mac_terms=(),
        source=None,
    )


def handmade_plan(*pruned: int) -> Plan:
    keep = np.ones(9, bool)
    keep[list(pruned)] = False
    return Plan(handmade_map(), keep)


def random_plan(channel_map: ChannelMap, seed: int = 0, share: float = 0.4) -> Plan:
    keep = np.random.default_rng(seed).random(channel_map.n_labels) > share
    keep[0] = True
    return Plan(channel_map, keep)


def randomized(model: nn.Module, seed: int = 0) -> nn.Module:
    """Gives every parameter and float buffer random values, so that nothing is zero by itself."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.is_floating_point():
                values = torch.rand(tensor.shape, generator=generator) + 0.1
                sign = 1 if tensor.ndim < 2 else torch.randn(tensor.shape, generator=generator).sign()
                tensor.copy_(values * sign * (0.2 if tensor.ndim >= 2 else 1.0))
    return model


def backward(model: nn.Module) -> None:
    """Gradients for a batch of random images."""
    model(torch.randn(4, 3, 8, 8)).square().sum().backward()


def step(model: nn.Module, optimizer: Optimizer) -> None:
    """One step of training."""
    optimizer.zero_grad()
    backward(model)
    optimizer.step()


def pruned_entries(model: nn.Module, plan: Plan) -> dict[str, Tensor]:
    """The values at every pruned entry of every parameter and float buffer but running_var."""
    found = {}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        mask = plan.mask(name)
        if mask is not None and not name.endswith("running_var"):
            found[name] = tensor.detach()[~mask.expand(tensor.shape)]
    return found


def assert_pruned_are_zero(model: nn.Module, plan: Plan) -> None:
    entries = pruned_entries(model, plan)
    assert sum(values.numel() for values in entries.values()) > 0
    for name, values in entries.items():
        assert (values == 0).all(), name
        assert not values.signbit().any(), name
