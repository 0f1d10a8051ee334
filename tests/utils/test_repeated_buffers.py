"""A second run reads the buffers that the first one read, and changes none: gradients and buffers are those
of the plain model, bit for bit.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from colossalai.nn.checkpoint_blocks import checkpoint_blocks, group_blocks


class Reader(nn.Module):
    """Reads buffers that it changes: in place, behind autograd's back, by another in their place, and a
    spectral norm.
    """

    def __init__(self) -> None:
        super().__init__()
        self.linear = parametrizations.spectral_norm(nn.Linear(8, 8))
        self.norm = nn.BatchNorm1d(8)
        self.mean: Tensor
        self.codes: Tensor
        self.steps: Tensor
        self.register_buffer("mean", torch.ones(8))
        self.register_buffer("codes", torch.rand(8))
        self.register_buffer("steps", torch.zeros(()))
        self.register_buffer("constant", torch.ones(8))
        self.writes = False

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(torch.tanh(self.linear(x)))
        with torch.no_grad():
            self.mean.mul_(0.9).add_(hidden.abs().mean(0), alpha=0.1)
            self.codes.data.mul_(0.5).add_(hidden.mean(0))
            self.steps = self.steps + 1
            if self.writes:
                self.constant.mul_(2)
        return x + hidden * self.codes.clone() / (self.mean.clone() + self.steps) * self.constant.clone()


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Reader() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in (*self.blocks, self.blocks[1]):
            x = block(x)
        return x


def trained(model: nn.Module) -> list[Tensor]:
    torch.manual_seed(1)
    for _ in range(3):
        model(torch.randn(4, 8)).square().sum().backward()
    return [*(p.grad for p in model.parameters() if p.grad is not None), *model.buffers()]


@pytest.mark.parametrize("mode", ["selective", "full", "offload", "region"])
def test_gradients_and_buffers_are_those_of_the_plain_model(mode: Any) -> None:
    torch.manual_seed(0)
    plain = Stack()
    model = checkpoint_blocks(copy.deepcopy(plain), "keep" if mode == "region" else mode)
    if mode == "region":
        group_blocks(model, [["blocks.0", "blocks.1", "blocks.2"]])
    for got, want in zip(trained(model), trained(plain), strict=True):
        assert torch.equal(got, want)


def test_a_buffer_that_changes_late_is_refused_once() -> None:
    torch.manual_seed(0)
    plain = Stack()
    model = checkpoint_blocks(copy.deepcopy(plain), "full")
    trained(model)
    trained(plain)
    for each in (model, plain):
        each.get_submodule("blocks.0").writes = True  # type: ignore[assignment]
    with pytest.raises(RuntimeError, match=r"had left alone before \(constant of Reader\).*step again"):
        model(torch.randn(4, 8)).sum().backward()
    plain(torch.randn(4, 8))
    again = copy.deepcopy(plain)  # both have changed it once
    model.load_state_dict(plain.state_dict())
    for each in (model, again):
        each.zero_grad()
    for got, want in zip(trained(model), trained(again), strict=True):
        assert torch.equal(got, want)
