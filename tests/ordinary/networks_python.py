"""What people do with Python in their networks: lists, names, configurations, branches, dictionaries, own layers."""

from __future__ import annotations

import math
from collections import OrderedDict
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from network_registry import images, ordinary, series, vectors
from torch import Tensor


@ordinary(images(3, 16))
class MultiTaskNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(
            OrderedDict(
                [
                    ("conv1", nn.Conv2d(3, 16, 3, 2, 1)), ("relu1", nn.ReLU()), ("conv2", nn.Conv2d(16, 32, 3, 2, 1)),
                    ("relu2", nn.ReLU()), ("pool", nn.AdaptiveAvgPool2d(1)),
                ]
            )
        )  # fmt: skip
        self.heads = nn.ModuleDict({"age": nn.Linear(32, 1), "gender": nn.Linear(32, 2), "race": nn.Linear(32, 5)})

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        features = self.backbone(x).flatten(1)
        return {name: head(features) for name, head in self.heads.items()}


@ordinary(vectors(10), [32, 24, 16])
class LayersByName(nn.Module):
    def __init__(self, sizes: list[int]) -> None:
        super().__init__()
        self.n = len(sizes)
        last = 10
        for i, size in enumerate(sizes):
            self.add_module("fc%d" % i, nn.Linear(last, size))  # noqa: UP031
            setattr(self, f"bn{i}", nn.BatchNorm1d(size))
            last = size
        self.activation = getattr(F, "leaky_relu")  # noqa: B009
        self.out = nn.Linear(last, 3)

    def forward(self, x: Tensor) -> Tensor:
        for i in range(self.n):
            x = getattr(self, f"fc{i}")(x)
            x = getattr(self, f"bn{i}")(x)
            x = self.activation(x)
        return self.out(x)


class FireAndForget(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.b(torch.tanh(self.a(x)))


@ordinary(vectors(12))
class BlocksInPlainLists(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(12, 16)
        self.blocks = [FireAndForget(16) for _ in range(3)]
        for i, block in enumerate(self.blocks):
            self.add_module("block" + str(i), block)
        self.out = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for block in self.blocks:
            x = block(x)
        return self.out(x)


@ordinary(images(3, 16), {"channels": [8, 16, 24], "act": "relu", "norm": "batch", "pool": [True, True, False]})
class FromConfig(nn.Module):
    def __init__(self, cfg: dict[str, Any]) -> None:
        super().__init__()
        self.cfg = SimpleNamespace(**cfg)
        acts = {"relu": nn.ReLU, "gelu": nn.GELU, "swish": nn.SiLU}
        norms = {"batch": nn.BatchNorm2d, "none": lambda c: nn.Identity()}
        layers = OrderedDict()
        in_c = 3
        for i, c in enumerate(self.cfg.channels):
            layers[f"conv{i}"] = nn.Conv2d(in_c, c, 3, padding=1)
            layers[f"norm{i}"] = norms[self.cfg.norm](c)
            layers[f"act{i}"] = acts[self.cfg.act]()
            if self.cfg.pool[i]:
                layers[f"pool{i}"] = nn.MaxPool2d(2)
            in_c = c
        self.features = nn.Sequential(layers)
        self.fc = nn.Linear(in_c * 4 * 4, 10)

    def forward(self, x: Tensor) -> Tensor:
        feats = self.features(x)
        b, c, h, w = feats.shape
        return self.fc(feats.view(b, c * h * w))


@ordinary(images(3, 16))
class AuxiliaryHead(nn.Module):
    def __init__(self, aux_logits: bool = True) -> None:
        super().__init__()
        self.aux_logits = aux_logits
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU())
        self.middle = nn.Sequential(nn.Conv2d(16, 24, 3, 2, 1), nn.ReLU())
        self.last = nn.Sequential(nn.Conv2d(24, 32, 3, 2, 1), nn.ReLU())
        if aux_logits:
            self.aux = nn.Sequential(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(96, 10))
        self.fc = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Any:
        x = self.middle(self.stem(x))
        if self.training and self.aux_logits:
            aux = self.aux(x)
        x = self.last(x).mean((2, 3))
        x = self.fc(x)
        if self.training and self.aux_logits:
            return x, aux
        return x


@ordinary(images(1, 20))
class SizesFromDummyInput(nn.Module):
    def __init__(self, shape: tuple[int, ...] = (1, 20, 20)) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 8, 3), nn.Conv2d(8, 16, 3)
        x = torch.randn(*shape).view(-1, *shape)
        self._to_linear: int | None = None
        self.convs(x)
        assert self._to_linear is not None
        self.fc1 = nn.Linear(self._to_linear, 32)
        self.fc2 = nn.Linear(32, 2)

    def convs(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.conv1(x)), (2, 2))
        x = F.max_pool2d(F.relu(self.conv2(x)), (2, 2))
        if self._to_linear is None:
            self._to_linear = x[0].shape[0] * x[0].shape[1] * x[0].shape[2]
        return x

    def forward(self, x: Tensor) -> Tensor:
        x = self.convs(x)
        x = x.view(-1, self._to_linear)
        x = F.relu(self.fc1(x))
        return F.softmax(self.fc2(x), dim=1)


class BayesLinear(nn.Module):
    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.weight_mu = nn.Parameter(torch.Tensor(out_features, in_features).uniform_(-0.2, 0.2))
        self.weight_rho = nn.Parameter(torch.Tensor(out_features, in_features).uniform_(-5, -4))
        self.bias_mu = nn.Parameter(torch.Tensor(out_features).uniform_(-0.2, 0.2))
        self.bias_rho = nn.Parameter(torch.Tensor(out_features).uniform_(-5, -4))

    def sample(self, mu: Tensor, rho: Tensor) -> Tensor:
        return mu + torch.log1p(torch.exp(rho)) * torch.randn_like(rho)

    def forward(self, input: Tensor, sample: bool = False) -> Tensor:
        if self.training or sample:
            weight = self.sample(self.weight_mu, self.weight_rho)
            bias = self.sample(self.bias_mu, self.bias_rho)
        else:
            weight, bias = self.weight_mu, self.bias_mu
        return F.linear(input, weight, bias)


@ordinary(images(1, 28))
class BayesByBackprop(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.l1, self.l2, self.l3 = BayesLinear(28 * 28, 48), BayesLinear(48, 32), BayesLinear(32, 10)

    def forward(self, x: Tensor, sample: bool = False) -> Tensor:
        x = x.view(-1, 28 * 28)
        x = F.relu(self.l1(x, sample))
        x = F.relu(self.l2(x, sample))
        return F.log_softmax(self.l3(x, sample), dim=1)


class GaussianNoise(nn.Module):
    def __init__(self, sigma: float = 0.1) -> None:
        super().__init__()
        self.sigma = sigma
        self.register_buffer("noise", torch.tensor(0.0))

    def forward(self, x: Tensor) -> Tensor:
        if self.training and self.sigma != 0:
            scale = self.sigma * x.detach()
            sampled_noise = self.noise.repeat(*x.size()).float().normal_() * scale
            x = x + sampled_noise
        return x


@ordinary(vectors(12))
def DenoisingMLP() -> nn.Module:
    return nn.Sequential(
        GaussianNoise(),
        nn.Linear(12, 32),
        nn.ReLU(),
        GaussianNoise(0.2),
        nn.Linear(32, 32),
        nn.ReLU(),
        nn.Linear(32, 12),
    )


class DropPath(nn.Module):
    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0:
            return x
        keep = 1 - self.p
        mask = torch.empty(x.shape[0], *[1] * (x.dim() - 1)).bernoulli_(keep)
        return x.div(keep) * mask


@ordinary(images(3, 16))
class StochasticDepth(nn.Module):
    def __init__(self, depth: int = 3, width: int = 16) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, 2, 1)
        dpr = [x.item() for x in torch.linspace(0, 0.2, depth)]
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(width, width, 3, 1, 1), nn.BatchNorm2d(width), nn.ReLU(), DropPath(dpr[i]))
            for i in range(depth)
        )
        self.fc = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for i in range(len(self.blocks)):
            x = x + self.blocks[i](x)
        return self.fc(F.adaptive_avg_pool2d(x, (1, 1)).squeeze(-1).squeeze(-1))


@ordinary(images(3, 16))
class EarlyExit(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stages, self.exits = nn.ModuleList(), nn.ModuleList()
        c = 3
        for width in (8, 16, 24):
            self.stages.append(nn.Sequential(nn.Conv2d(c, width, 3, 2, 1), nn.BatchNorm2d(width), nn.ReLU()))
            self.exits.append(nn.Linear(width, 10))
            c = width

    def forward(self, x: Tensor) -> list[Tensor]:
        outputs = []
        for stage, exit_ in zip(self.stages, self.exits):
            x = stage(x)
            outputs.append(exit_(x.mean(dim=(2, 3))))
        return outputs


@ordinary(vectors(2))
class NeuralODE(nn.Module):
    def __init__(self, steps: int = 4) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 32), nn.Tanh(), nn.Linear(32, 2))
        for m in self.net.modules():
            if isinstance(m, nn.Linear):
                nn.init.normal_(m.weight, mean=0, std=0.1)
                nn.init.constant_(m.bias, val=0)
        self.steps = steps

    def func(self, t: float, y: Tensor) -> Tensor:
        return self.net(torch.cat([y**3, torch.full_like(y[:, :1], t)], 1))

    def forward(self, y: Tensor) -> Tensor:
        h = 1.0 / self.steps
        for i in range(self.steps):
            t = i * h
            k1 = self.func(t, y)
            k2 = self.func(t + h / 2, y + h / 2 * k1)
            y = y + h * k2
        return y


@ordinary(vectors(8))
class MixtureOfExperts(nn.Module):
    def __init__(self, num_experts: int = 4) -> None:
        super().__init__()
        self.experts = nn.ModuleList(
            [nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)) for _ in range(num_experts)]
        )
        self.gate = nn.Linear(8, num_experts)

    def forward(self, x: Tensor) -> Tensor:
        weights = F.softmax(self.gate(x), dim=1)
        outputs = torch.stack([expert(x) for expert in self.experts], dim=2)
        return (outputs * weights.unsqueeze(1).expand_as(outputs)).sum(2)


class Maxout(nn.Module):
    def __init__(self, d_in: int, d_out: int, pool_size: int) -> None:
        super().__init__()
        self.d_in, self.d_out, self.pool_size = d_in, d_out, pool_size
        self.lin = nn.Linear(d_in, d_out * pool_size)

    def forward(self, inputs: Tensor) -> Tensor:
        shape = list(inputs.size())
        shape[-1] = self.d_out
        shape.append(self.pool_size)
        max_dim = len(shape) - 1
        out = self.lin(inputs)
        m, _i = out.view(*shape).max(max_dim)
        return m


@ordinary(vectors(10))
def MaxoutMLP() -> nn.Module:
    return nn.Sequential(Maxout(10, 16, 3), Maxout(16, 12, 3), nn.Linear(12, 3))


@ordinary(series(10, 6))
class SelfAttentivePooling(nn.Module):
    def __init__(self, hidden: int = 16, r: int = 3) -> None:
        super().__init__()
        self.lstm = nn.LSTM(6, hidden, bidirectional=True, batch_first=True)
        self.w1 = nn.Linear(2 * hidden, 12, bias=False)
        self.w2 = nn.Linear(12, r, bias=False)
        self.fc = nn.Linear(r * 2 * hidden, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h, _ = self.lstm(x)
        a = F.softmax(self.w2(torch.tanh(self.w1(h))), dim=1).permute(0, 2, 1)
        m = torch.bmm(a, h)
        return self.fc(m.view(-1, m.size()[1] * m.size()[2])), a


class Swish(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, i: Tensor) -> Tensor:
        result = i * torch.sigmoid(i)
        ctx.save_for_backward(i)
        return result

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Tensor:
        (i,) = ctx.saved_tensors
        sigmoid_i = torch.sigmoid(i)
        return grad_output * (sigmoid_i * (1 + i * (1 - sigmoid_i)))


@ordinary(images(3, 16))
class MemoryEfficientSwish(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(3, 16, 3, 2, 1), nn.Conv2d(16, 24, 3, 2, 1)
        self.fc = nn.Linear(24, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = Swish.apply(self.conv1(x))
        x = Swish.apply(self.conv2(x))
        return self.fc(x.mean([2, 3]))


@ordinary(images(3, 32), num_anchors=3, num_classes=4)
class TinyYolo(nn.Module):
    def __init__(self, num_anchors: int, num_classes: int) -> None:
        super().__init__()
        self.num_anchors, self.bbox_attrs = num_anchors, 5 + num_classes
        self.anchors = torch.tensor([[10.0, 13.0], [16.0, 30.0], [33.0, 23.0]])
        self.backbone = nn.Sequential(
            nn.Conv2d(3, 16, 3, 2, 1), nn.BatchNorm2d(16), nn.LeakyReLU(0.1),
            nn.Conv2d(16, 32, 3, 2, 1), nn.BatchNorm2d(32), nn.LeakyReLU(0.1),
        )  # fmt: skip
        self.head = nn.Conv2d(32, num_anchors * self.bbox_attrs, 1)

    def forward(self, x: Tensor) -> Tensor:
        stride = x.size(2) / 8
        p = self.head(self.backbone(x))
        b, _, gh, gw = p.size()
        p = p.view(b, self.num_anchors, self.bbox_attrs, gh, gw).permute(0, 1, 3, 4, 2).contiguous()
        yv, xv = torch.meshgrid([torch.arange(gh), torch.arange(gw)], indexing="ij")
        grid = torch.stack((xv, yv), 2).view(1, 1, gh, gw, 2).float()
        xy = (torch.sigmoid(p[..., 0:2]) + grid) * stride
        wh = torch.exp(p[..., 2:4].clamp(max=4)) * self.anchors.view(1, self.num_anchors, 1, 1, 2)
        out = torch.cat((xy, wh, torch.sigmoid(p[..., 4:])), -1)
        return out.view(b, -1, self.bbox_attrs)


@ordinary(vectors(6))
class WeightsByHand(nn.Module):
    def __init__(self, hidden: int = 32) -> None:
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.randn(6, hidden) / math.sqrt(6))])
        self.weights.append(nn.Parameter(torch.randn(hidden, hidden) / math.sqrt(hidden)))
        self.weights.append(nn.Parameter(torch.randn(hidden, 2) / math.sqrt(hidden)))
        self.biases = nn.ParameterList([nn.Parameter(torch.zeros(n)) for n in (hidden, hidden, 2)])

    def forward(self, x: Tensor) -> Tensor:
        for i, (w, b) in enumerate(zip(self.weights, self.biases)):
            x = x @ w + b
            if i < len(self.weights) - 1:
                x = x.clamp(min=0)
        return x
