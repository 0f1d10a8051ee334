"""What the tests of this folder share: how a rank starts, a small model with data, and a boosted run for
`check_plan`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import colossalai
from colossalai.booster import Booster
from colossalai.booster.plugin import Plugin
from colossalai.testing.boosted import BoosterRun
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


class PluginRun(BoosterRun):
    """A problem under a plugin, whose ranks start from different weights: the plan must bring those of rank 0
    to all.
    """

    def __init__(
        self,
        problem: Problem,
        plugin: Plugin,
        *,
        optimizer: Callable[[Any], torch.optim.Optimizer] | None = None,
        **options: Any,
    ) -> None:
        own = replace(problem, loss=loss_of, optimizer=optimizer or problem.optimizer)
        super().__init__(own, Booster(device="cpu", plugin=plugin), **options)

    def build(self) -> nn.Module:
        model = super().build()
        with torch.no_grad():
            for p in model.parameters():
                p.add_(self.rank)
        return model


@dataclass
class Case:
    """A row of a parity test: a problem, the arguments of the plugin and those of the run."""

    problem: Callable[[], Problem] = problem
    plugin: dict[str, Any] = field(default_factory=dict)
    run: dict[str, Any] = field(default_factory=dict)


def sgd(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def clipping(
    serial: Callable[[Any], Any],
    boosted: Callable[[Any], Any],
    problem: Callable[..., Problem] = problem,
    **run: Any,
) -> Case:
    """The serial optimizer clips by itself at each step; the boosted one is plain and told to clip."""

    def clipping_sgd(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        params = list(params)
        optimizer = sgd(params)

        def clip(*_: Any) -> None:
            serial(params)

        optimizer.register_step_pre_hook(clip)
        return optimizer

    return Case(lambda: problem(optimizer=clipping_sgd), run={"optimizer": sgd, "clip": boosted, **run})
