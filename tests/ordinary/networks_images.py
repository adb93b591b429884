"""Image classifiers of tutorials: from LeNet to ResNet for CIFAR, with views, lists of sizes, and blocks by hand."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from network_registry import images, ordinary
from torch import Tensor


@ordinary(images(1, 28))
class LeNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 6, 5, padding=2)
        self.conv2 = nn.Conv2d(6, 16, 5)
        self.fc1 = nn.Linear(16 * 5 * 5, 120)
        self.fc2 = nn.Linear(120, 84)
        self.fc3 = nn.Linear(84, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.conv1(x)), (2, 2))
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        x = x.view(-1, self.num_flat_features(x))
        x = F.relu(self.fc1(x))
        x = F.relu(self.fc2(x))
        return self.fc3(x)

    def num_flat_features(self, x: Tensor) -> int:
        size = x.size()[1:]
        num_features = 1
        for s in size:
            num_features *= s
        return num_features


@ordinary(images(3, 32))
class SixtyMinuteBlitz(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 6, 5)
        self.pool = nn.MaxPool2d(2, 2)
        self.conv2 = nn.Conv2d(6, 16, 5)
        self.fc1 = nn.Linear(16 * 5 * 5, 120)
        self.fc2 = nn.Linear(120, 84)
        self.fc3 = nn.Linear(84, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(F.relu(self.conv1(x)))
        x = self.pool(F.relu(self.conv2(x)))
        x = x.view(-1, 16 * 5 * 5)
        x = F.relu(self.fc1(x))
        x = F.relu(self.fc2(x))
        x = self.fc3(x)
        return x


@ordinary(images(1, 28))
class MnistExample(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 6, 3, 1)
        self.conv2 = nn.Conv2d(6, 8, 3, 1)
        self.dropout1 = nn.Dropout2d(0.25)
        self.dropout2 = nn.Dropout(0.5)
        self.fc1 = nn.Linear(1152, 64)
        self.fc2 = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.conv2(F.relu(self.conv1(x))))
        x = self.dropout1(F.max_pool2d(x, 2))
        x = torch.flatten(x, 1)
        x = self.dropout2(F.relu(self.fc1(x)))
        return F.log_softmax(self.fc2(x), dim=1)


@ordinary(images(1, 28))
class ImageMLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(784, 128)
        self.fc2 = nn.Linear(128, 64)
        self.fc3 = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = x.view(x.shape[0], -1)
        x = F.relu(self.fc1(x))
        x = F.dropout(F.relu(self.fc2(x)), p=0.2, training=self.training)
        return F.log_softmax(self.fc3(x), dim=1)


@ordinary(images(3, 64))
class AlexNet(nn.Module):
    def __init__(self, num_classes: int = 10) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 16, kernel_size=11, stride=4, padding=2),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(kernel_size=3, stride=2),
            nn.Conv2d(16, 32, kernel_size=5, padding=2),
            nn.ReLU(inplace=True),
            nn.LocalResponseNorm(5),
            nn.Conv2d(32, 48, kernel_size=3, padding=1),
            nn.ReLU(inplace=True),
            nn.Conv2d(48, 32, kernel_size=3, padding=1),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(kernel_size=3, stride=2),
        )
        self.classifier = nn.Sequential(
            nn.Dropout(), nn.Linear(32 * 3 * 3, 64), nn.ReLU(inplace=True),
            nn.Dropout(), nn.Linear(64, 64), nn.ReLU(inplace=True), nn.Linear(64, num_classes),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        x = self.features(x)
        x = x.view(x.size(0), 32 * 3 * 3)
        return self.classifier(x)


CFG: dict[str, list[Any]] = {"VGG11": [8, "M", 16, "M", 24, 24, "M", 32, 32, "M", 32, 32, "M"]}


@ordinary(images(3, 32), "VGG11")
class VGG(nn.Module):
    def __init__(self, vgg_name: str) -> None:
        super().__init__()
        self.features = self._make_layers(CFG[vgg_name])
        self.classifier = nn.Linear(32, 10)
        for m in self.modules():
            if isinstance(m, nn.Conv2d):
                n = m.kernel_size[0] * m.kernel_size[1] * m.out_channels
                m.weight.data.normal_(0, (2.0 / n) ** 0.5)
                m.bias.data.zero_()

    def forward(self, x: Tensor) -> Tensor:
        out = self.features(x)
        out = out.view(out.size(0), -1)
        out = self.classifier(out)
        return out

    def _make_layers(self, cfg: list[Any]) -> nn.Sequential:
        layers: list[nn.Module] = []
        in_channels = 3
        for x in cfg:
            if x == "M":
                layers += [nn.MaxPool2d(kernel_size=2, stride=2)]
            else:
                layers += [
                    nn.Conv2d(in_channels, x, kernel_size=3, padding=1),
                    nn.BatchNorm2d(x),
                    nn.ReLU(inplace=True),
                ]
                in_channels = x
        layers += [nn.AvgPool2d(kernel_size=1, stride=1)]
        return nn.Sequential(*layers)


class BasicBlock(nn.Module):
    expansion = 1

    def __init__(self, in_planes: int, planes: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_planes, planes, 3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(planes)
        self.conv2 = nn.Conv2d(planes, planes, 3, stride=1, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(planes)
        self.shortcut = nn.Sequential()
        if stride != 1 or in_planes != self.expansion * planes:
            self.shortcut = nn.Sequential(
                nn.Conv2d(in_planes, self.expansion * planes, 1, stride=stride, bias=False),
                nn.BatchNorm2d(self.expansion * planes),
            )

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += self.shortcut(x)
        return F.relu(out)


class Bottleneck(nn.Module):
    expansion = 4

    def __init__(self, in_planes: int, planes: int, stride: int = 1) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm2d(in_planes)
        self.conv1 = nn.Conv2d(in_planes, planes, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(planes)
        self.conv2 = nn.Conv2d(planes, planes, 3, stride=stride, padding=1, bias=False)
        self.bn3 = nn.BatchNorm2d(planes)
        self.conv3 = nn.Conv2d(planes, self.expansion * planes, 1, bias=False)
        if stride != 1 or in_planes != self.expansion * planes:
            self.shortcut = nn.Sequential(nn.Conv2d(in_planes, self.expansion * planes, 1, stride=stride, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.bn1(x))
        shortcut = self.shortcut(out) if hasattr(self, "shortcut") else x
        out = self.conv1(out)
        out = self.conv2(F.relu(self.bn2(out)))
        out = self.conv3(F.relu(self.bn3(out)))
        out += shortcut
        return out


class CifarResNet(nn.Module):
    def __init__(self, block: Any, num_blocks: list[int], num_classes: int = 10) -> None:
        super().__init__()
        self.in_planes = 8
        self.conv1 = nn.Conv2d(3, 8, kernel_size=3, stride=1, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(8)
        self.layer1 = self._make_layer(block, 8, num_blocks[0], stride=1)
        self.layer2 = self._make_layer(block, 16, num_blocks[1], stride=2)
        self.layer3 = self._make_layer(block, 32, num_blocks[2], stride=2)
        self.linear = nn.Linear(32 * block.expansion, num_classes)

    def _make_layer(self, block: Any, planes: int, num_blocks: int, stride: int) -> nn.Sequential:
        strides = [stride] + [1] * (num_blocks - 1)
        layers = []
        for stride in strides:
            layers.append(block(self.in_planes, planes, stride))
            self.in_planes = planes * block.expansion
        return nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.bn1(self.conv1(x)))
        out = self.layer3(self.layer2(self.layer1(out)))
        out = F.avg_pool2d(out, out.size()[3])
        out = out.view(out.size(0), -1)
        return self.linear(out)


@ordinary(images(3, 32))
def ResNet18() -> nn.Module:
    return CifarResNet(BasicBlock, [2, 2, 2])


@ordinary(images(3, 32))
def PreActResNet() -> nn.Module:
    return CifarResNet(Bottleneck, [1, 2, 1])


class LambdaLayer(nn.Module):
    def __init__(self, lambd: Any) -> None:
        super().__init__()
        self.lambd = lambd

    def forward(self, x: Tensor) -> Tensor:
        return self.lambd(x)


class OptionABlock(BasicBlock):
    def __init__(self, in_planes: int, planes: int, stride: int = 1) -> None:
        super().__init__(in_planes, planes, stride)
        self.shortcut = nn.Sequential()
        if stride != 1 or in_planes != planes:
            self.shortcut = LambdaLayer(
                lambda x: F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, planes // 4, planes // 4), "constant", 0)
            )


@ordinary(images(3, 32))
def ResNet20OptionA() -> nn.Module:
    return CifarResNet(OptionABlock, [2, 2, 2])


class WideBasic(nn.Module):
    def __init__(self, in_planes: int, planes: int, dropout_rate: float, stride: int = 1) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm2d(in_planes)
        self.conv1 = nn.Conv2d(in_planes, planes, kernel_size=3, padding=1, bias=True)
        self.dropout = nn.Dropout(p=dropout_rate)
        self.bn2 = nn.BatchNorm2d(planes)
        self.conv2 = nn.Conv2d(planes, planes, kernel_size=3, stride=stride, padding=1, bias=True)
        self.equal = in_planes == planes
        self.shortcut = (not self.equal and nn.Conv2d(in_planes, planes, 1, stride=stride)) or None

    def forward(self, x: Tensor) -> Tensor:
        if not self.equal:
            x = F.relu(self.bn1(x))
        else:
            out = F.relu(self.bn1(x))
        out = self.dropout(self.conv1(out if self.equal else x))
        out = self.conv2(F.relu(self.bn2(out)))
        return torch.add(x if self.equal else self.shortcut(x), out)  # type: ignore[misc]


@ordinary(images(3, 32))
class WideResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 3, padding=1)
        self.block1 = nn.Sequential(WideBasic(8, 16, 0.3), WideBasic(16, 16, 0.3))
        self.block2 = nn.Sequential(WideBasic(16, 32, 0.3, 2), WideBasic(32, 32, 0.3))
        self.bn1 = nn.BatchNorm2d(32, momentum=0.9)
        self.fc = nn.Linear(32, 10)
        self.nChannels = 32

    def forward(self, x: Tensor) -> Tensor:
        out = self.block2(self.block1(self.conv1(x)))
        out = F.avg_pool2d(F.relu(self.bn1(out)), 16)
        out = out.view(-1, self.nChannels)
        return self.fc(out)


class DenseLayer(nn.Module):
    def __init__(self, in_planes: int, growth_rate: int) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm2d(in_planes)
        self.conv1 = nn.Conv2d(in_planes, 4 * growth_rate, kernel_size=1, bias=False)
        self.bn2 = nn.BatchNorm2d(4 * growth_rate)
        self.conv2 = nn.Conv2d(4 * growth_rate, growth_rate, kernel_size=3, padding=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out = self.conv1(F.relu(self.bn1(x)))
        out = self.conv2(F.relu(self.bn2(out)))
        return torch.cat([out, x], 1)


@ordinary(images(3, 16))
class DenseNet(nn.Module):
    def __init__(self, nblocks: tuple[int, ...] = (2, 2), growth_rate: int = 6, reduction: float = 0.5) -> None:
        super().__init__()
        num_planes = 2 * growth_rate
        self.conv1 = nn.Conv2d(3, num_planes, kernel_size=3, padding=1, bias=False)
        layers: list[nn.Module] = []
        for i, n in enumerate(nblocks):
            for _ in range(n):
                layers.append(DenseLayer(num_planes, growth_rate))
                num_planes += growth_rate
            if i != len(nblocks) - 1:
                out_planes = int(num_planes * reduction)
                layers += [nn.BatchNorm2d(num_planes), nn.ReLU(), nn.Conv2d(num_planes, out_planes, 1, bias=False)]
                layers.append(nn.AvgPool2d(2))
                num_planes = out_planes
        self.dense = nn.Sequential(*layers)
        self.bn = nn.BatchNorm2d(num_planes)
        self.linear = nn.Linear(num_planes, 10)

    def forward(self, x: Tensor) -> Tensor:
        out = F.avg_pool2d(F.relu(self.bn(self.dense(self.conv1(x)))), 8)
        out = out.view(out.size(0), -1)
        return self.linear(out)


class Inception(nn.Module):
    def __init__(self, in_planes: int, n1x1: int, n3x3red: int, n3x3: int, n5x5red: int, n5x5: int, pool: int) -> None:
        super().__init__()
        self.b1 = nn.Sequential(nn.Conv2d(in_planes, n1x1, kernel_size=1), nn.BatchNorm2d(n1x1), nn.ReLU(True))
        self.b2 = nn.Sequential(
            nn.Conv2d(in_planes, n3x3red, kernel_size=1), nn.BatchNorm2d(n3x3red), nn.ReLU(True),
            nn.Conv2d(n3x3red, n3x3, kernel_size=3, padding=1), nn.BatchNorm2d(n3x3), nn.ReLU(True),
        )  # fmt: skip
        self.b3 = nn.Sequential(
            nn.Conv2d(in_planes, n5x5red, kernel_size=1), nn.BatchNorm2d(n5x5red), nn.ReLU(True),
            nn.Conv2d(n5x5red, n5x5, kernel_size=3, padding=1), nn.BatchNorm2d(n5x5), nn.ReLU(True),
            nn.Conv2d(n5x5, n5x5, kernel_size=3, padding=1), nn.BatchNorm2d(n5x5), nn.ReLU(True),
        )  # fmt: skip
        self.b4 = nn.Sequential(
            nn.MaxPool2d(3, stride=1, padding=1), nn.Conv2d(in_planes, pool, 1), nn.BatchNorm2d(pool), nn.ReLU(True)
        )

    def forward(self, x: Tensor) -> Tensor:
        y1, y2, y3, y4 = self.b1(x), self.b2(x), self.b3(x), self.b4(x)
        return torch.cat([y1, y2, y3, y4], 1)


@ordinary(images(3, 16))
class GoogLeNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.pre_layers = nn.Sequential(nn.Conv2d(3, 16, kernel_size=3, padding=1), nn.BatchNorm2d(16), nn.ReLU(True))
        self.a3 = Inception(16, 8, 8, 12, 4, 8, 4)
        self.b3 = Inception(32, 8, 8, 16, 4, 8, 8)
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1)
        self.avgpool = nn.AvgPool2d(8, stride=1)
        self.linear = nn.Linear(40, 10)

    def forward(self, x: Tensor) -> Tensor:
        out = self.maxpool(self.b3(self.a3(self.pre_layers(x))))
        out = self.avgpool(out)
        return self.linear(out.view(out.size(0), -1))


class Fire(nn.Module):
    def __init__(self, inplanes: int, squeeze_planes: int, expand_planes: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inplanes, squeeze_planes, kernel_size=1, stride=1)
        self.relu1 = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(squeeze_planes, expand_planes, kernel_size=1, stride=1)
        self.conv3 = nn.Conv2d(squeeze_planes, expand_planes, kernel_size=3, stride=1, padding=1)
        self.relu2 = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu1(self.conv1(x))
        return self.relu2(torch.cat([self.conv2(x), self.conv3(x)], 1))


@ordinary(images(3, 32))
class SqueezeNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 16, kernel_size=3, stride=2)
        self.fire2, self.fire3 = Fire(16, 4, 8), Fire(16, 4, 16)
        self.pool = nn.MaxPool2d(3, 2)
        self.conv10 = nn.Conv2d(32, 10, kernel_size=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(F.relu(self.conv1(x)))
        x = self.fire3(self.fire2(x))
        x = F.relu(self.conv10(F.dropout(x, training=self.training)))
        return x.mean([-2, -1]).view(x.shape[0], 10)


@ordinary(images(3, 32))
def NetworkInNetwork() -> nn.Module:
    def nin_block(cin: int, cout: int, kernel: int) -> list[nn.Module]:
        return [nn.Conv2d(cin, cout, kernel, padding=kernel // 2), nn.ReLU(), nn.Conv2d(cout, cout, 1), nn.ReLU()]

    return nn.Sequential(
        *nin_block(3, 16, 5), nn.MaxPool2d(2), *nin_block(16, 24, 3), nn.MaxPool2d(2), nn.Dropout(0.5),
        *nin_block(24, 10, 3), nn.AdaptiveAvgPool2d((1, 1)), nn.Flatten(),
    )  # fmt: skip


@ordinary(images(1, 28), size=64, num_layers=3, f=F.relu)
class Highway(nn.Module):
    def __init__(self, size: int, num_layers: int, f: Any) -> None:
        super().__init__()
        self.num_layers = num_layers
        self.inp = nn.Linear(784, size)
        self.nonlinear = nn.ModuleList([nn.Linear(size, size) for _ in range(num_layers)])
        self.linear = nn.ModuleList([nn.Linear(size, size) for _ in range(num_layers)])
        self.gate = nn.ModuleList([nn.Linear(size, size) for _ in range(num_layers)])
        self.f = f
        self.out = nn.Linear(size, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x.view(-1, 28 * 28))
        for layer in range(self.num_layers):
            gate = torch.sigmoid(self.gate[layer](x))
            nonlinear = self.f(self.nonlinear[layer](x))
            linear = self.linear[layer](x)
            x = gate * nonlinear + (1 - gate) * linear
        return self.out(x)


@ordinary(images(1, 28))
class SpatialTransformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 10, kernel_size=5)
        self.conv2 = nn.Conv2d(10, 20, kernel_size=5)
        self.conv2_drop = nn.Dropout2d()
        self.fc1 = nn.Linear(320, 50)
        self.fc2 = nn.Linear(50, 10)
        self.localization = nn.Sequential(
            nn.Conv2d(1, 8, kernel_size=7), nn.MaxPool2d(2, stride=2), nn.ReLU(True),
            nn.Conv2d(8, 10, kernel_size=5), nn.MaxPool2d(2, stride=2), nn.ReLU(True),
        )  # fmt: skip
        self.fc_loc = nn.Sequential(nn.Linear(10 * 3 * 3, 32), nn.ReLU(True), nn.Linear(32, 3 * 2))
        self.fc_loc[2].weight.data.zero_()
        self.fc_loc[2].bias.data.copy_(torch.tensor([1, 0, 0, 0, 1, 0], dtype=torch.float))

    def stn(self, x: Tensor) -> Tensor:
        xs = self.localization(x)
        xs = xs.view(-1, 10 * 3 * 3)
        theta = self.fc_loc(xs)
        theta = theta.view(-1, 2, 3)
        grid = F.affine_grid(theta, list(x.size()), align_corners=False)
        return F.grid_sample(x, grid, align_corners=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stn(x)
        x = F.relu(F.max_pool2d(self.conv1(x), 2))
        x = F.relu(F.max_pool2d(self.conv2_drop(self.conv2(x)), 2))
        x = x.view(-1, 320)
        x = F.relu(self.fc1(x))
        x = F.dropout(x, training=self.training)
        return F.log_softmax(self.fc2(x), dim=1)
