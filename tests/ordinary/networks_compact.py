"""Small image classifiers and blocks with attention to channels: separable convolutions, shuffles, gates."""

from __future__ import annotations

import math
from typing import Any

import torch
from network_registry import images, ordinary
from torch import Tensor, nn
from torch.nn import functional as F


@ordinary(images(3, 32))
class MobileNetV1(nn.Module):
    def __init__(self) -> None:
        super().__init__()

        def conv_bn(inp: int, oup: int, stride: int) -> nn.Sequential:
            return nn.Sequential(
                nn.Conv2d(inp, oup, 3, stride, 1, bias=False), nn.BatchNorm2d(oup), nn.ReLU(inplace=True)
            )

        def conv_dw(inp: int, oup: int, stride: int) -> nn.Sequential:
            return nn.Sequential(
                nn.Conv2d(inp, inp, 3, stride, 1, groups=inp, bias=False), nn.BatchNorm2d(inp), nn.ReLU(inplace=True),
                nn.Conv2d(inp, oup, 1, 1, 0, bias=False), nn.BatchNorm2d(oup), nn.ReLU(inplace=True),
            )  # fmt: skip

        self.model = nn.Sequential(
            conv_bn(3, 8, 2), conv_dw(8, 16, 1), conv_dw(16, 32, 2), conv_dw(32, 32, 1), nn.AvgPool2d(8)
        )
        self.fc = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.model(x)
        x = x.view(-1, 32)
        return self.fc(x)


class InvertedResidual(nn.Module):
    def __init__(self, inp: int, oup: int, stride: int, expand_ratio: int) -> None:
        super().__init__()
        hidden_dim = round(inp * expand_ratio)
        self.identity = stride == 1 and inp == oup
        self.conv = nn.Sequential(
            nn.Conv2d(inp, hidden_dim, 1, 1, 0, bias=False), nn.BatchNorm2d(hidden_dim), nn.ReLU6(inplace=True),
            nn.Conv2d(hidden_dim, hidden_dim, 3, stride, 1, groups=hidden_dim, bias=False),
            nn.BatchNorm2d(hidden_dim), nn.ReLU6(inplace=True),
            nn.Conv2d(hidden_dim, oup, 1, 1, 0, bias=False), nn.BatchNorm2d(oup),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        if self.identity:
            return x + self.conv(x)
        else:
            return self.conv(x)


@ordinary(images(3, 32))
class MobileNetV2(nn.Module):
    cfgs = ((1, 8, 1, 1), (6, 12, 2, 2), (6, 16, 2, 1))

    def __init__(self) -> None:
        super().__init__()
        input_channel = 8
        layers: list[nn.Module] = [nn.Conv2d(3, 8, 3, 2, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU6()]
        for t, c, n, s in self.cfgs:
            for i in range(n):
                layers.append(InvertedResidual(input_channel, c, s if i == 0 else 1, t))
                input_channel = c
        self.features = nn.Sequential(*layers)
        self.conv = nn.Sequential(nn.Conv2d(input_channel, 64, 1, bias=False), nn.BatchNorm2d(64), nn.ReLU6())
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.classifier = nn.Linear(64, 10)
        self._initialize_weights()

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(self.features(x))
        x = self.avgpool(x)
        x = x.view(x.size(0), -1)
        return self.classifier(x)

    def _initialize_weights(self) -> None:
        for m in self.modules():
            if isinstance(m, nn.Conv2d):
                n = m.kernel_size[0] * m.kernel_size[1] * m.out_channels
                m.weight.data.normal_(0, math.sqrt(2.0 / n))
            elif isinstance(m, nn.BatchNorm2d):
                m.weight.data.fill_(1)
                m.bias.data.zero_()
            elif isinstance(m, nn.Linear):
                m.weight.data.normal_(0, 0.01)
                m.bias.data.zero_()


class hswish(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * F.relu6(x + 3, inplace=True) / 6


class hsigmoid(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.relu6(x + 3, inplace=True) / 6


class SeModule(nn.Module):
    def __init__(self, in_size: int, reduction: int = 4) -> None:
        super().__init__()
        self.se = nn.Sequential(
            nn.AdaptiveAvgPool2d(1), nn.Conv2d(in_size, in_size // reduction, 1, bias=False),
            nn.BatchNorm2d(in_size // reduction), nn.ReLU(inplace=True),
            nn.Conv2d(in_size // reduction, in_size, 1, bias=False), nn.BatchNorm2d(in_size), hsigmoid(),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return x * self.se(x)


class MobileV3Block(nn.Module):
    def __init__(self, kernel: int, cin: int, expand: int, cout: int, act: nn.Module, se: Any, stride: int) -> None:
        super().__init__()
        self.stride = stride
        self.se = se
        self.conv1, self.bn1, self.act1 = nn.Conv2d(cin, expand, 1, bias=False), nn.BatchNorm2d(expand), act
        self.conv2 = nn.Conv2d(expand, expand, kernel, stride, kernel // 2, groups=expand, bias=False)
        self.bn2, self.act2 = nn.BatchNorm2d(expand), act
        self.conv3, self.bn3 = nn.Conv2d(expand, cout, 1, bias=False), nn.BatchNorm2d(cout)
        self.shortcut = nn.Sequential()
        if stride == 1 and cin != cout:
            self.shortcut = nn.Sequential(nn.Conv2d(cin, cout, 1, bias=False), nn.BatchNorm2d(cout))

    def forward(self, x: Tensor) -> Tensor:
        out = self.act1(self.bn1(self.conv1(x)))
        out = self.act2(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        if self.se != None:  # noqa: E711
            out = self.se(out)
        out = out + self.shortcut(x) if self.stride == 1 else out
        return out


@ordinary(images(3, 32))
class MobileNetV3(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1, self.hs1 = nn.Conv2d(3, 8, 3, 2, 1, bias=False), nn.BatchNorm2d(8), hswish()
        self.bneck = nn.Sequential(
            MobileV3Block(3, 8, 16, 8, nn.ReLU(inplace=True), SeModule(8), 2),
            MobileV3Block(3, 8, 24, 12, nn.ReLU(inplace=True), None, 1),
            MobileV3Block(5, 12, 32, 16, hswish(), SeModule(16), 1),
        )
        self.conv2, self.bn2, self.hs2 = nn.Conv2d(16, 48, 1, bias=False), nn.BatchNorm2d(48), hswish()
        self.linear3, self.bn3, self.hs3 = nn.Linear(48, 64), nn.BatchNorm1d(64), hswish()
        self.linear4 = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        out = self.hs1(self.bn1(self.conv1(x)))
        out = self.bneck(out)
        out = self.hs2(self.bn2(self.conv2(out)))
        out = F.avg_pool2d(out, 8)
        out = out.view(out.size(0), -1)
        out = self.hs3(self.bn3(self.linear3(out)))
        return self.linear4(out)


class ShuffleBlock(nn.Module):
    def __init__(self, groups: int) -> None:
        super().__init__()
        self.groups = groups

    def forward(self, x: Tensor) -> Tensor:
        N, C, H, W = x.size()
        g = self.groups
        return x.view(N, g, C // g, H, W).permute(0, 2, 1, 3, 4).reshape(N, C, H, W)


class ShuffleV1Unit(nn.Module):
    def __init__(self, in_planes: int, out_planes: int, stride: int, groups: int) -> None:
        super().__init__()
        self.stride = stride
        mid_planes = out_planes // 4
        self.conv1 = nn.Conv2d(in_planes, mid_planes, kernel_size=1, groups=groups, bias=False)
        self.bn1 = nn.BatchNorm2d(mid_planes)
        self.shuffle1 = ShuffleBlock(groups=groups)
        self.conv2 = nn.Conv2d(mid_planes, mid_planes, 3, stride=stride, padding=1, groups=mid_planes, bias=False)
        self.bn2 = nn.BatchNorm2d(mid_planes)
        self.conv3 = nn.Conv2d(mid_planes, out_planes, kernel_size=1, groups=groups, bias=False)
        self.bn3 = nn.BatchNorm2d(out_planes)
        self.shortcut = nn.Sequential()
        if stride == 2:
            self.shortcut = nn.Sequential(nn.AvgPool2d(3, stride=2, padding=1))

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.bn1(self.conv1(x)))
        out = self.shuffle1(out)
        out = F.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        res = self.shortcut(x)
        return F.relu(torch.cat([out, res], 1)) if self.stride == 2 else F.relu(out + res)


@ordinary(images(3, 16))
class ShuffleNetV1(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 16, kernel_size=1, bias=False)
        self.bn1 = nn.BatchNorm2d(16)
        self.layer1 = nn.Sequential(ShuffleV1Unit(16, 32 - 16, 2, 2), ShuffleV1Unit(32, 32, 1, 2))
        self.linear = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.bn1(self.conv1(x)))
        out = F.avg_pool2d(self.layer1(out), 8)
        out = out.view(out.size(0), -1)
        return self.linear(out)


def channel_shuffle(x: Tensor, groups: int) -> Tensor:
    batchsize, num_channels, height, width = x.data.size()
    channels_per_group = num_channels // groups
    x = x.view(batchsize, groups, channels_per_group, height, width)
    x = torch.transpose(x, 1, 2).contiguous()
    return x.view(batchsize, -1, height, width)


class ShuffleV2Unit(nn.Module):
    def __init__(self, inp: int, oup: int, stride: int) -> None:
        super().__init__()
        self.stride = stride
        branch = oup // 2
        if stride == 2:
            self.branch1 = nn.Sequential(
                nn.Conv2d(inp, inp, 3, stride, 1, groups=inp, bias=False), nn.BatchNorm2d(inp),
                nn.Conv2d(inp, branch, 1, bias=False), nn.BatchNorm2d(branch), nn.ReLU(inplace=True),
            )  # fmt: skip
        inp = inp if stride == 2 else branch
        self.branch2 = nn.Sequential(
            nn.Conv2d(inp, branch, 1, bias=False), nn.BatchNorm2d(branch), nn.ReLU(inplace=True),
            nn.Conv2d(branch, branch, 3, stride, 1, groups=branch, bias=False), nn.BatchNorm2d(branch),
            nn.Conv2d(branch, branch, 1, bias=False), nn.BatchNorm2d(branch), nn.ReLU(inplace=True),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        if self.stride == 1:
            x1 = x[:, : (x.shape[1] // 2), :, :]
            x2 = x[:, (x.shape[1] // 2) :, :, :]
            out = torch.cat((x1, self.branch2(x2)), 1)
        else:
            out = torch.cat((self.branch1(x), self.branch2(x)), 1)
        return channel_shuffle(out, 2)


@ordinary(images(3, 16))
class ShuffleNetV2(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Sequential(nn.Conv2d(3, 12, 3, 1, 1, bias=False), nn.BatchNorm2d(12), nn.ReLU(inplace=True))
        self.features = nn.Sequential(ShuffleV2Unit(12, 24, 2), ShuffleV2Unit(24, 24, 1), ShuffleV2Unit(24, 24, 1))
        self.conv_last = nn.Sequential(nn.Conv2d(24, 32, 1, bias=False), nn.BatchNorm2d(32), nn.ReLU(inplace=True))
        self.classifier = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv_last(self.features(self.conv1(x)))
        x = x.mean(3).mean(2)
        return self.classifier(x)


class SELayer(nn.Module):
    def __init__(self, channel: int, reduction: int = 4) -> None:
        super().__init__()
        self.avg_pool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Sequential(
            nn.Linear(channel, channel // reduction, bias=False), nn.ReLU(inplace=True),
            nn.Linear(channel // reduction, channel, bias=False), nn.Sigmoid(),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        b, c, _, _ = x.size()
        y = self.avg_pool(x).view(b, c)
        y = self.fc(y).view(b, c, 1, 1)
        return x * y.expand_as(x)


class ChannelAttention(nn.Module):
    def __init__(self, in_planes: int, ratio: int = 4) -> None:
        super().__init__()
        self.avg_pool = nn.AdaptiveAvgPool2d(1)
        self.max_pool = nn.AdaptiveMaxPool2d(1)
        self.fc1 = nn.Conv2d(in_planes, in_planes // ratio, 1, bias=False)
        self.relu1 = nn.ReLU()
        self.fc2 = nn.Conv2d(in_planes // ratio, in_planes, 1, bias=False)
        self.sigmoid = nn.Sigmoid()

    def forward(self, x: Tensor) -> Tensor:
        avg_out = self.fc2(self.relu1(self.fc1(self.avg_pool(x))))
        max_out = self.fc2(self.relu1(self.fc1(self.max_pool(x))))
        return self.sigmoid(avg_out + max_out)


class SpatialAttention(nn.Module):
    def __init__(self, kernel_size: int = 7) -> None:
        super().__init__()
        assert kernel_size in (3, 7), "kernel size must be 3 or 7"
        self.conv1 = nn.Conv2d(2, 1, kernel_size, padding=3 if kernel_size == 7 else 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        avg_out = torch.mean(x, dim=1, keepdim=True)
        max_out, _ = torch.max(x, dim=1, keepdim=True)
        x = torch.cat([avg_out, max_out], dim=1)
        return torch.sigmoid(self.conv1(x))


class GatedResidual(nn.Module):
    def __init__(self, planes: int, gate: nn.Module) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(planes, planes, 3, 1, 1, bias=False), nn.BatchNorm2d(planes)
        self.conv2, self.bn2 = nn.Conv2d(planes, planes, 3, 1, 1, bias=False), nn.BatchNorm2d(planes)
        self.gate = gate

    def forward(self, x: Tensor) -> Tensor:
        residual = x
        out = F.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out = self.gate(out)
        out += residual
        return F.relu(out)


class CBAM(nn.Module):
    def __init__(self, planes: int) -> None:
        super().__init__()
        self.ca = ChannelAttention(planes)
        self.sa = SpatialAttention()

    def forward(self, x: Tensor) -> Tensor:
        x = self.ca(x) * x
        return self.sa(x) * x


class GatedResNet(nn.Module):
    def __init__(self, gate: Any) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 16, 3, 2, 1)
        self.layer1 = GatedResidual(16, gate(16))
        self.down = nn.Conv2d(16, 32, 3, 2, 1)
        self.layer2 = GatedResidual(32, gate(32))
        self.fc = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer2(self.down(self.layer1(self.conv1(x))))
        x = F.adaptive_avg_pool2d(x, 1)
        return self.fc(x.view(x.size(0), -1))


@ordinary(images(3, 32))
def SENet() -> nn.Module:
    return GatedResNet(SELayer)


@ordinary(images(3, 32))
def CBAMNet() -> nn.Module:
    return GatedResNet(CBAM)


class ECALayer(nn.Module):
    def __init__(self, channel: int, k_size: int = 3) -> None:
        super().__init__()
        self.avg_pool = nn.AdaptiveAvgPool2d(1)
        self.conv = nn.Conv1d(1, 1, kernel_size=k_size, padding=(k_size - 1) // 2, bias=False)
        self.sigmoid = nn.Sigmoid()

    def forward(self, x: Tensor) -> Tensor:
        y = self.avg_pool(x)
        y = self.conv(y.squeeze(-1).transpose(-1, -2)).transpose(-1, -2).unsqueeze(-1)
        y = self.sigmoid(y)
        return x * y.expand_as(x)


@ordinary(images(3, 32))
def ECANet() -> nn.Module:
    return GatedResNet(ECALayer)


class GhostModule(nn.Module):
    def __init__(self, inp: int, oup: int, ratio: int = 2) -> None:
        super().__init__()
        self.oup = oup
        init_channels = math.ceil(oup / ratio)
        new_channels = init_channels * (ratio - 1)
        self.primary_conv = nn.Sequential(nn.Conv2d(inp, init_channels, 1), nn.BatchNorm2d(init_channels), nn.ReLU())
        self.cheap_operation = nn.Sequential(
            nn.Conv2d(init_channels, new_channels, 3, 1, 1, groups=init_channels, bias=False),
            nn.BatchNorm2d(new_channels), nn.ReLU(inplace=True),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        x1 = self.primary_conv(x)
        x2 = self.cheap_operation(x1)
        out = torch.cat([x1, x2], dim=1)
        return out[:, : self.oup, :, :]


@ordinary(images(3, 16))
def GhostNet() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 12, 3, 2, 1), GhostModule(12, 24), GhostModule(24, 32), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(32, 10),
    )  # fmt: skip


class SKUnit(nn.Module):
    def __init__(self, features: int, branches: int = 2) -> None:
        super().__init__()
        self.features = features
        self.convs = nn.ModuleList([])
        for i in range(branches):
            self.convs.append(
                nn.Sequential(nn.Conv2d(features, features, 3, padding=1 + i, dilation=1 + i), nn.BatchNorm2d(features))
            )
        self.fc = nn.Linear(features, 8)
        self.fcs = nn.ModuleList([])
        for _ in range(branches):
            self.fcs.append(nn.Linear(8, features))
        self.softmax = nn.Softmax(dim=1)

    def forward(self, x: Tensor) -> Tensor:
        for i, conv in enumerate(self.convs):
            fea = conv(x).unsqueeze_(dim=1)
            feas = fea if i == 0 else torch.cat([feas, fea], dim=1)
        fea_U = torch.sum(feas, dim=1)
        fea_s = fea_U.mean(-1).mean(-1)
        fea_z = self.fc(fea_s)
        for i, fc in enumerate(self.fcs):
            vector = fc(fea_z).unsqueeze_(dim=1)
            attention_vectors = vector if i == 0 else torch.cat([attention_vectors, vector], dim=1)
        attention_vectors = self.softmax(attention_vectors)
        attention_vectors = attention_vectors.unsqueeze(-1).unsqueeze(-1)
        return (feas * attention_vectors).sum(dim=1)


@ordinary(images(3, 16))
def SKNet() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, 2, 1), nn.ReLU(), SKUnit(16), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(16, 10),
    )  # fmt: skip


@ordinary(images(3, 16))
class ConvMixer(nn.Module):
    def __init__(self, dim: int = 24, depth: int = 2) -> None:
        super().__init__()

        class Residual(nn.Module):
            def __init__(self, fn: nn.Module) -> None:
                super().__init__()
                self.fn = fn

            def forward(self, x: Tensor) -> Tensor:
                return self.fn(x) + x

        self.net = nn.Sequential(
            nn.Conv2d(3, dim, kernel_size=4, stride=4), nn.GELU(), nn.BatchNorm2d(dim),
            *[
                nn.Sequential(
                    Residual(nn.Sequential(nn.Conv2d(dim, dim, 3, groups=dim, padding="same"), nn.GELU(), nn.BatchNorm2d(dim))),
                    nn.Conv2d(dim, dim, kernel_size=1), nn.GELU(), nn.BatchNorm2d(dim),
                )
                for _ in range(depth)
            ],
            nn.AdaptiveAvgPool2d((1, 1)), nn.Flatten(), nn.Linear(dim, 10),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)
