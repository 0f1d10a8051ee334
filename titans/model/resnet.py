"""ResNet-18, -34 and -50, with the names that torchvision gives to their parts.

``conv1 bn1 relu maxpool layer1 layer2 layer3 layer4 avgpool fc``; weights of torchvision load as they are.
For images as small as CIFAR's, ``small_images=True`` has a first layer that does not shrink them.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


def _conv(in_chans: int, out_chans: int, size: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(in_chans, out_chans, size, stride=stride, padding=size // 2, bias=False)


class BasicBlock(nn.Module):
    """Two 3x3 convolutions beside a shortcut."""

    expansion = 1

    def __init__(self, in_chans: int, width: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = _conv(in_chans, width, 3, stride)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU()
        self.conv2 = _conv(width, width, 3)
        self.bn2 = nn.BatchNorm2d(width)
        self.downsample = _shortcut(in_chans, width, stride)

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        return self.relu(y + (x if self.downsample is None else self.downsample(x)))


class Bottleneck(nn.Module):
    """A 3x3 convolution between two 1x1, the first of which narrows and the second widens, beside a
    shortcut.
    """

    expansion = 4

    def __init__(self, in_chans: int, width: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = _conv(in_chans, width, 1)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = _conv(width, width, 3, stride)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = _conv(width, 4 * width, 1)
        self.bn3 = nn.BatchNorm2d(4 * width)
        self.relu = nn.ReLU()
        self.downsample = _shortcut(in_chans, 4 * width, stride)

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.relu(self.bn2(self.conv2(y)))
        y = self.bn3(self.conv3(y))
        return self.relu(y + (x if self.downsample is None else self.downsample(x)))


def _shortcut(in_chans: int, out_chans: int, stride: int) -> nn.Sequential | None:
    """A projection where the block changes the shape, else nothing."""
    if stride == 1 and in_chans == out_chans:
        return None
    return nn.Sequential(_conv(in_chans, out_chans, 1, stride), nn.BatchNorm2d(out_chans))


Block = type[BasicBlock] | type[Bottleneck]


def _stage(block: Block, depth: int, in_chans: int, width: int, stride: int) -> nn.Sequential:
    rest = [block(width * block.expansion, width) for _ in range(depth - 1)]
    return nn.Sequential(block(in_chans, width, stride), *rest)


class ResNet(nn.Module):
    """``model(images)`` returns logits of shape (batch, num_classes); images of any size that four halvings
    leave something of, or three for ``small_images``.
    """

    def __init__(
        self,
        block: Block,
        layers: tuple[int, int, int, int],
        num_classes: int = 1000,
        in_chans: int = 3,
        small_images: bool = False,
    ) -> None:
        super().__init__()
        self.conv1 = _conv(in_chans, 64, 3) if small_images else _conv(in_chans, 64, 7, 2)
        self.bn1 = nn.BatchNorm2d(64)
        self.relu = nn.ReLU()
        self.maxpool = nn.Identity() if small_images else nn.MaxPool2d(3, stride=2, padding=1)
        e = block.expansion
        self.layer1 = _stage(block, layers[0], 64, 64, stride=1)
        self.layer2 = _stage(block, layers[1], 64 * e, 128, stride=2)
        self.layer3 = _stage(block, layers[2], 128 * e, 256, stride=2)
        self.layer4 = _stage(block, layers[3], 256 * e, 512, stride=2)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(512 * e, num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, images: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(images))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(torch.flatten(self.avgpool(x), 1))


def resnet18(num_classes: int = 1000, in_chans: int = 3, small_images: bool = False) -> ResNet:
    """11.7 million parameters."""
    return ResNet(BasicBlock, (2, 2, 2, 2), num_classes, in_chans, small_images)


def resnet34(num_classes: int = 1000, in_chans: int = 3, small_images: bool = False) -> ResNet:
    """21.8 million parameters."""
    return ResNet(BasicBlock, (3, 4, 6, 3), num_classes, in_chans, small_images)


def resnet50(num_classes: int = 1000, in_chans: int = 3, small_images: bool = False) -> ResNet:
    """25.6 million parameters."""
    return ResNet(Bottleneck, (3, 4, 6, 3), num_classes, in_chans, small_images)


def resnet152(num_classes: int = 1000, in_chans: int = 3, small_images: bool = False) -> ResNet:
    """60.2 million parameters."""
    return ResNet(Bottleneck, (3, 8, 36, 3), num_classes, in_chans, small_images)
