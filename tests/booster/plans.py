"""What the tests of this folder share: how a rank starts, a small model with data, and a boosted run for `check_plan`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import colossalai
from colossalai.booster import Booster
from colossalai.booster.plugin import Plugin
from colossalai.interface import OptimizerWrapper
from colossalai.testing.parity import Problem

Batch = tuple[Tensor, Tensor]


def launch(rank: int, world_size: int, port: int) -> None:
    colossalai.launch({}, rank, world_size, "127.0.0.1", port, backend="gloo", verbose=False)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 3))


def batches(sizes: Sequence[int]) -> list[Batch]:
    """Global batches of these sizes, the same on every rank."""
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(n, 6, generator=generator), torch.randint(3, (n,), generator=generator)) for n in sizes
    ]


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def problem(
    build: Callable[[], nn.Module] = mlp,
    sizes: Sequence[int] = (8, 8, 8, 4),  # the last batch is smaller
    **options: Any,
) -> Problem:
    def seeded() -> nn.Module:
        torch.manual_seed(0)
        return build()

    return Problem(build=seeded, batches=batches(sizes), **{"loss": loss_of, **options})


class BoosterRun:
    """A problem under a plugin: each rank takes its part of every batch, in ``accumulate`` backward passes."""

    def __init__(
        self,
        problem: Problem,
        plugin: Plugin,
        *,
        accumulate: int = 1,
        clip: Callable[[OptimizerWrapper], Any] | None = None,
        optimizer: Callable[[Any], torch.optim.Optimizer] | None = None,
    ) -> None:
        self.accumulate, self.clip = accumulate, clip
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        model = problem.build()
        if self.rank > 0:  # a plan must start every rank from the weights of rank 0
            with torch.no_grad():
                for p in model.parameters():
                    p.add_(1)
        self.booster = Booster(device="cpu", plugin=plugin)
        raw = (optimizer or problem.optimizer)(model.parameters())
        self.model, self.optimizer, *_ = self.booster.boost(model, raw)

    def weights(self) -> dict[str, Tensor]:
        return {name: p.detach().clone() for name, p in self.model.named_parameters()}

    def forward_backward(self, batch: Batch) -> Tensor:
        x, y = (tensor.chunk(self.world_size)[self.rank] for tensor in batch)
        parts = list(zip(x.chunk(self.accumulate), y.chunk(self.accumulate), strict=True))
        total = torch.zeros(())
        for part in parts[:-1]:
            with self.booster.no_sync(self.model):
                total += self._backward(part)
        total += self._backward(parts[-1])
        dist.all_reduce(total)
        return total / self.world_size

    def _backward(self, part: Batch) -> Tensor:
        loss = loss_of(self.model, part) / self.accumulate
        self.booster.backward(loss, self.optimizer)
        return loss.detach()

    def gradients(self) -> dict[str, Tensor]:
        return {name: p.grad.clone() for name, p in self.model.named_parameters() if p.grad is not None}

    def gradient_norm(self) -> Tensor:
        return self.optimizer.clip_grad_by_norm(float("inf"))

    def update(self) -> None:
        if self.clip:
            self.clip(self.optimizer)
        self.optimizer.step()
        self.optimizer.zero_grad()
