"""Several blocks that are computed again together give the gradients of the plain model, bit for bit."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from colossalai.nn.checkpoint_blocks import RecomputedBlock, checkpoint_blocks, group_blocks
from colossalai.utils.memory.live_bytes import LiveBytes


class Block(nn.Module):
    """Dropout, statistics of batches, a mask by name, and a pair as output."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(
            nn.Linear(width, 2 * width), nn.BatchNorm1d(2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )
        self.drop = nn.Dropout(0.3)

    def forward(self, x: Tensor, *, mask: Tensor) -> tuple[Tensor, Tensor]:
        return x + self.drop(self.inner(x)) * mask, mask


class Stack(nn.Module):
    """Blocks with code of the model between them: in place, and with random numbers."""

    def __init__(self, blocks: int = 6, width: int = 8, between: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(width) for _ in range(blocks))
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.rand_like(x)
        seen = []
        for layer in self.layers:
            x, _ = layer(x, mask=mask)
            if self.between:
                x = x * 1.5 + torch.rand_like(x)
                x += 1
            seen.append(x.mean())
        return x.square().sum() + torch.stack(seen).sum()


REGIONS = {
    "two": [[0, 1, 2], [3, 4, 5]],
    "all": [[0, 1, 2, 3, 4, 5]],
    "nested": [[0, 1, 2, 3], [1, 2], [4, 5]],
    "thrice": [[0, 1, 2, 3, 4, 5], [1, 2, 3, 4], [2, 3]],
}


def grouped(model: nn.Module, regions: list[list[int]], mode: Any) -> nn.Module:
    checkpoint_blocks(model, mode)
    group_blocks(model, [[f"layers.{place}" for place in region] for region in regions])
    return model


def trained(model: nn.Module, autocast: bool = False) -> list[Tensor]:
    torch.manual_seed(5)
    x = torch.randn(4, 8).requires_grad_()
    found = []
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = model(x)
        between = torch.rand(2)
        loss.backward()
        found += [loss.detach(), between, torch.rand(2)]
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    assert x.grad is not None
    return [*found, x.grad, *gradients, *model.buffers()]


@pytest.mark.parametrize("regions", REGIONS)
@pytest.mark.parametrize("mode", ["keep", "full"])
@pytest.mark.parametrize("between", [False, True])
def test_gradients_are_those_of_the_plain_model(regions: str, mode: str, between: bool) -> None:
    torch.manual_seed(0)
    plain = Stack(between=between)
    model = grouped(copy.deepcopy(plain), REGIONS[regions], mode)
    for autocast in (False, True):
        for got, want in zip(trained(model, autocast), trained(plain, autocast), strict=True):
            assert torch.equal(got, want)


def kept(model: nn.Module, x: Tensor) -> tuple[int, int]:
    """Bytes after the forward pass, and the peak of both passes, above the weights and gradients."""
    with LiveBytes() as memory:
        loss = model(x)
        after = memory.now
        loss.backward()
    model.zero_grad()
    return after, memory.peak


def test_less_is_kept() -> None:
    """Of a region only its input is kept; nested ones need less than blocks that are computed one by one."""
    x = torch.randn(256, 8)
    plain = kept(Stack(16), x)
    full = kept(grouped(Stack(16), [], "full"), x)
    four = [list(range(start, start + 4)) for start in range(0, 16, 4)]
    nested = kept(grouped(Stack(16), four, "full"), x)
    assert full[0] < 0.3 * plain[0]
    assert nested[0] < 0.55 * full[0]
    assert nested[1] < 0.85 * full[1] < plain[1]


def test_retained_graphs_and_copies() -> None:
    torch.manual_seed(0)
    model = grouped(Stack(), REGIONS["nested"], "keep")
    again = copy.deepcopy(model)
    x = torch.randn(4, 8)
    torch.manual_seed(1)
    loss = again(x)
    loss.backward(retain_graph=True)
    first = [p.grad.clone() for p in again.parameters() if p.grad is not None]
    loss.backward()
    for p, one in zip(again.parameters(), first, strict=True):
        assert p.grad is not None
        assert torch.equal(p.grad, 2 * one)
    copy.deepcopy(again)
    group_blocks(model, [])
    assert all(not block.regions for block in model.modules() if isinstance(block, RecomputedBlock))
    with pytest.raises(ValueError, match="takes blocks that checkpoint_blocks has changed"):
        group_blocks(Stack(), [["layers.0", "layers.1"]])


class Fickle(Block):
    """Takes another way in its second run."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.times: list[int] = []

    def forward(self, x: Tensor, *, mask: Tensor) -> tuple[Tensor, Tensor]:
        self.times.append(1)
        x, mask = super().forward(x, mask=mask)
        return (x.exp(), mask) if len(self.times) == 1 else (x, mask)


def test_another_way_is_refused() -> None:
    model = Stack()
    model.layers[1] = Fickle(8)
    loss = grouped(model, [[0, 1, 2]], "keep")(torch.randn(4, 8))
    with pytest.raises(RuntimeError, match="a block must take the same way both times"):
        loss.backward()


def test_written_inputs_are_refused() -> None:
    """What the model writes over after a block has taken it cannot be computed with again."""
    model = grouped(Stack(), [[0, 1, 2]], "keep")
    mask = torch.rand(4, 8)
    x = model.layers[0](torch.randn(4, 8), mask=mask)[0]
    x = model.layers[1](x, mask=mask)[0]
    mask.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        x.sum().backward()
