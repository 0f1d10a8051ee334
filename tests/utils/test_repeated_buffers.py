"""A second run reads the buffers and frozen parameters that the first one read, and changes none: gradients
and buffers are those of the plain model, bit for bit.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from colossalai.nn.checkpoint_blocks import checkpoint_blocks, group_blocks
from colossalai.utils.memory.live_bytes import LiveBytes


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


class FrozenReader(nn.Module):
    """The same with parameters that are not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.mean, self.codes, self.steps, self.constant = (
            nn.Parameter(values, requires_grad=False)
            for values in (torch.ones(8), torch.rand(8), torch.zeros(()), torch.ones(8))
        )
        self.writes = False

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.linear(x)) / self.mean.clone()
        with torch.no_grad():
            self.mean.mul_(0.9).add_(hidden.abs().mean(0), alpha=0.1)
            self.codes.data.mul_(0.5).add_(hidden.mean(0))
            self.steps = nn.Parameter(self.steps + 1, requires_grad=False)
            if self.writes:
                self.constant.mul_(2)
        return x + hidden * self.codes.clone() / (self.mean.clone() + self.steps) * self.constant.clone()


class Stack(nn.Module):
    def __init__(self, reader: type[nn.Module] = Reader) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(reader() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in (*self.blocks, self.blocks[1]):
            x = block(x)
        return x


def trained(model: nn.Module) -> list[Tensor]:
    torch.manual_seed(1)
    for _ in range(3):
        model(torch.randn(4, 8)).square().sum().backward()
    frozen = [p for p in model.parameters() if not p.requires_grad]
    return [*(p.grad for p in model.parameters() if p.grad is not None), *model.buffers(), *frozen]


@pytest.mark.parametrize("reader", [Reader, FrozenReader])
@pytest.mark.parametrize("mode", ["selective", "full", "offload", "region"])
def test_gradients_and_buffers_are_those_of_the_plain_model(mode: Any, reader: type[nn.Module]) -> None:
    torch.manual_seed(0)
    plain = Stack(reader)
    model = checkpoint_blocks(copy.deepcopy(plain), "keep" if mode == "region" else mode)
    if mode == "region":
        group_blocks(model, [["blocks.0", "blocks.1", "blocks.2"]])
    for got, want in zip(trained(model), trained(plain), strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("reader", [Reader, FrozenReader])
def test_a_buffer_that_changes_late_is_refused_once(reader: type[nn.Module]) -> None:
    torch.manual_seed(0)
    plain = Stack(reader)
    model = checkpoint_blocks(copy.deepcopy(plain), "full")
    for each in (model, plain):
        torch.manual_seed(1)
        for _ in range(4):  # the next one is not watched
            each(torch.randn(4, 8)).square().sum().backward()
    for each in (model, plain):
        each.get_submodule("blocks.0").writes = True  # type: ignore[assignment]
    with pytest.raises(RuntimeError, match=r"had left alone before \(constant of \w*Reader\).*step again"):
        model(torch.randn(4, 8)).sum().backward()
    plain(torch.randn(4, 8))
    again = copy.deepcopy(plain)  # both have changed it once
    model.load_state_dict(plain.state_dict())
    for each in (model, again):
        each.zero_grad()
    for got, want in zip(trained(model), trained(again), strict=True):
        assert torch.equal(got, want)


def test_frozen_weights_are_not_copied() -> None:
    """Those of a fine-tuned model are large, and stay as they are."""
    inner = nn.Sequential(nn.Linear(256, 256).requires_grad_(False), nn.Linear(256, 8))
    model = checkpoint_blocks(nn.Sequential(inner), "full", ["0"])
    for _ in range(4):
        x = torch.randn(4, 256)
        with LiveBytes() as memory:
            memory.hold(model.parameters())
            held = memory.now
            model(x)
        assert memory.peak - held < 256 * 256 * 4


class Assigning(nn.Module):
    """Gives its values other memory, which one value shares with an activation."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.last = nn.Parameter(torch.zeros(4, 8), requires_grad=False)
        self.means = nn.Parameter(torch.ones(8))
        self.register_buffer("step", torch.zeros(4, 8))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.linear(x) + self.last.clone() * self.means + self.step.clone())
        self.last.data = self.step.data = x.detach()
        self.means = nn.Parameter(self.means * 0.9)  # as a well-known quantizer has it, though it is trained
        return x


@pytest.mark.parametrize("mode", ["selective", "full", "offload"])
def test_what_is_given_other_memory(mode: Any) -> None:
    torch.manual_seed(0)
    plain = Stack(Assigning)
    model = checkpoint_blocks(copy.deepcopy(plain), mode, ["blocks.0", "blocks.2"])
    for got, want in zip(trained(model), trained(plain), strict=True):
        assert torch.equal(got, want)


class Clamping(nn.Module):
    """Changes its trained weights in place, and its biases by writes that are not counted."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.decay = 0.9

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.linear.weight.clamp_(-0.1, 0.1).mul_(self.decay)
        self.linear.bias.data[2:] *= self.decay
        return torch.tanh(self.linear(x))


@pytest.mark.parametrize("mode", ["selective", "full", "offload", "region"])
def test_trained_weights_that_change_in_place(mode: Any) -> None:
    """They change once for each forward pass."""
    torch.manual_seed(0)
    plain = nn.Sequential(Clamping(), Clamping())
    model = checkpoint_blocks(copy.deepcopy(plain), "keep" if mode == "region" else mode, ["0", "1"])
    if mode == "region":
        group_blocks(model, [["0", "1"]])
    for got, want in zip(trained(model), trained(plain), strict=True):
        assert torch.equal(got, want)
    for got, want in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(got, want)


class Norms(nn.Module):
    """Running statistics of several kinds, which training only writes to."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.BatchNorm1d(8, momentum=None)
        self.second = nn.BatchNorm1d(8, track_running_stats=False)
        self.third = nn.InstanceNorm1d(8, affine=True, track_running_stats=True)
        self.product = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.second(self.product(self.first(x)).relu())
        result: Tensor = self.third(y[..., None].repeat(1, 1, 3)).mean(-1).relu()
        return result


@pytest.mark.parametrize("mode", ["selective", "full", "offload", "region"])
def test_running_statistics_stay_where_they_are(mode: Any) -> None:
    """A second run, which ends early, changes others in their place."""
    torch.manual_seed(0)
    plain = Stack(Norms)
    model = checkpoint_blocks(copy.deepcopy(plain), "keep" if mode == "region" else mode)
    if mode == "region":
        group_blocks(model, [["blocks.0", "blocks.1", "blocks.2"]])
    before = dict(model.named_buffers())
    for got, want in zip(trained(model), trained(plain), strict=True):
        assert torch.equal(got, want)
    after = dict(model.named_buffers())
    assert before.keys() == after.keys()
    assert all(after[name] is buffer for name, buffer in before.items())
    assert int(after["blocks.0.first.num_batches_tracked"]) == 3
