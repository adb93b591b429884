"""The ResNets for 32x32 images (He et al. 2016, "Deep residual learning", section 4.2), with option-A shortcuts.

`resnet8` is the smallest of the family, with 78 thousand parameters, for tests and first trials.
"""

from torch import Tensor, nn
from torch.nn import functional as F


class BasicBlock(nn.Module):
    """Two 3x3 convolutions beside a shortcut without parameters."""

    def __init__(self, inputs: int, planes: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, planes, 3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(planes)
        self.relu1 = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(planes, planes, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(planes)
        self.relu2 = nn.ReLU(inplace=True)
        self.widened = planes - inputs

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, inputs, H, W) to (B, planes, H / stride, W / stride)."""
        out = self.bn2(self.conv2(self.relu1(self.bn1(self.conv1(x)))))
        if self.widened:  # option A: every other position, and zeros for half of the new channels on either side
            x = F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, self.widened // 2, self.widened // 2))
        return self.relu2(out + x)  # type: ignore[no-any-return]


class CifarResNet(nn.Module):
    """A residual network of 6n + 2 layers: three stages of n blocks, with 16, 32 and 64 channels."""

    def __init__(self, depth: int, num_classes: int = 10) -> None:
        super().__init__()
        if depth < 8 or depth % 6 != 2:
            raise ValueError(f"expected a depth of 6n + 2 layers, got {depth}")
        blocks = (depth - 2) // 6
        self.conv1 = nn.Conv2d(3, 16, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(16)
        self.relu = nn.ReLU(inplace=True)
        self.layer1 = _stage(16, 16, blocks)
        self.layer2 = _stage(16, 32, blocks)
        self.layer3 = _stage(32, 64, blocks)
        self.linear = nn.Linear(64, num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Map images (B, 3, H, W), as a rule 32x32, to logits (B, num_classes)."""
        x = self.relu(self.bn1(self.conv1(x)))
        x = self.layer3(self.layer2(self.layer1(x)))
        return self.linear(x.mean((2, 3)))  # type: ignore[no-any-return]


def _stage(inputs: int, planes: int, blocks: int) -> nn.Sequential:
    first = BasicBlock(inputs, planes, stride=planes // inputs)
    return nn.Sequential(first, *(BasicBlock(planes, planes, stride=1) for _ in range(blocks - 1)))
