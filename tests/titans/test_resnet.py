"""ResNets: published sizes, shapes, and a block written out."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import batch_norm, conv2d, relu

from titans.model.resnet import BasicBlock, Bottleneck, ResNet, resnet18, resnet34, resnet50, resnet152


def parameters(layers: tuple[int, ...], bottleneck: bool, classes: int, first: int) -> int:
    """Convolutions without bias, two numbers per channel for each norm, and the classifier."""
    expansion = 4 if bottleneck else 1
    total, width = 3 * 64 * first**2 + 2 * 64, 64
    for i, depth in enumerate(layers):
        inner, outer = 64 << i, (64 << i) * expansion
        for j in range(depth):
            convs = (
                [(width, inner, 1), (inner, inner, 3), (inner, outer, 1)]
                if bottleneck
                else [(width, inner, 3), (inner, outer, 3)]
            )
            if j == 0 and (i or width != outer):
                convs.append((width, outer, 1))
            total += sum(a * b * k * k + 2 * b for a, b, k in convs)
            width = outer
    return total + (width + 1) * classes


CASES = [
    (resnet18, (2, 2, 2, 2), False, 11_689_512),
    (resnet34, (3, 4, 6, 3), False, 21_797_672),
    (resnet50, (3, 4, 6, 3), True, 25_557_032),
    (resnet152, (3, 8, 36, 3), True, 60_192_808),
]


@pytest.mark.parametrize(("build", "layers", "bottleneck", "published"), CASES)
def test_parameter_counts(
    build: type[ResNet], layers: tuple[int, ...], bottleneck: bool, published: int
) -> None:
    assert parameters(layers, bottleneck, 1000, 7) == published
    with torch.device("meta"):
        large, small = build(), build(num_classes=10, small_images=True)
    assert sum(p.numel() for p in large.parameters()) == published
    assert sum(p.numel() for p in small.parameters()) == parameters(layers, bottleneck, 10, 3)


def test_shapes_at_each_stage() -> None:
    for small, size, sides in ((False, 64, (16, 8, 4, 2)), (True, 32, (32, 16, 8, 4))):
        with torch.device("meta"):
            model = resnet50(num_classes=7, in_chans=1, small_images=small)
            x = model.maxpool(model.relu(model.bn1(model.conv1(torch.empty(2, 1, size, size)))))
            for stage, side, width in zip(
                (model.layer1, model.layer2, model.layer3, model.layer4),
                sides,
                (256, 512, 1024, 2048),
                strict=True,
            ):
                x = stage(x)
                assert x.shape == (2, width, side, side)
            assert model(torch.empty(2, 1, size, size)).shape == (2, 7)


def test_parts_are_named_as_in_torchvision() -> None:
    names = [name for name, _ in resnet18().named_children()]
    assert names == [
        "conv1",
        "bn1",
        "relu",
        "maxpool",
        "layer1",
        "layer2",
        "layer3",
        "layer4",
        "avgpool",
        "fc",
    ]
    assert "layer2.0.downsample.1.running_mean" in resnet18().state_dict()


@pytest.mark.parametrize("kind", [BasicBlock, Bottleneck])
def test_blocks_equal_their_definition(kind: type[BasicBlock] | type[Bottleneck]) -> None:
    torch.manual_seed(0)
    block = kind(4, 6, stride=2).double().train()
    x = torch.randn(3, 4, 8, 8, dtype=torch.float64)
    strides = (2, 1) if kind is BasicBlock else (1, 2, 1)
    y = x
    for i, stride in enumerate(strides, start=1):
        weight = getattr(block, f"conv{i}").weight
        y = conv2d(y, weight, stride=stride, padding=weight.shape[-1] // 2)
        y = batch_norm(y, None, None, training=True)
        y = relu(y) if i < len(strides) else y
    assert block.downsample is not None
    shortcut = batch_norm(conv2d(x, block.downsample[0].weight, stride=2), None, None, training=True)
    torch.testing.assert_close(block(x), relu(y + shortcut))


def test_gradients_reach_every_weight() -> None:
    torch.manual_seed(0)
    model = resnet18(num_classes=3, small_images=True)
    model(torch.randn(2, 3, 8, 8)).square().sum().backward()
    for name, p in model.named_parameters():
        assert p.grad is not None, name
        assert p.grad.abs().sum() > 0, name
