"""What the tests of this folder share: how a rank starts, small models and data, and the parity check."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from colossalai.booster import Booster
from colossalai.interface import OptimizerWrapper

TOLERANCE = {"rtol": 1e-5, "atol": 1e-6}  # fp32: sums in another order
Batch = tuple[Tensor, Tensor]


def launch(rank: int, world_size: int, port: int) -> None:
    dist.init_process_group("gloo", rank=rank, world_size=world_size, init_method=f"tcp://127.0.0.1:{port}")


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 3))


def batches(sizes: Sequence[int], features: int = 6) -> list[Batch]:
    """The same on every rank; the sizes are of the joined batches."""
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(n, features, generator=generator), torch.randint(3, (n,), generator=generator))
        for n in sizes
    ]


@dataclass
class Scenario:
    """One way to train, done serially with joined batches and by a plan with the ranks' parts of them."""

    build: Callable[[], nn.Module] = mlp
    optimizer: Callable[[Any], torch.optim.Optimizer] = field(
        default=lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9)
    )
    sizes: Sequence[int] = (8, 8, 8, 4)  # per step; the last batch is smaller
    clip: Callable[[OptimizerWrapper], Any] | None = None
    accumulate: int = 1  # backward passes per step in the plan; the serial model takes the batch in one
    options: dict[str, Any] = field(default_factory=dict)  # of the plugin
    rank_parts: bool = False  # the serial model, too, sees the ranks' parts one by one (batch statistics)


def check_equal_to_serial(
    scenario: Scenario, make_booster: Callable[..., Booster], rank: int, world_size: int
) -> None:
    """Initial weights, loss, every gradient (after clipping), weights and buffers after each step."""
    torch.manual_seed(rank)  # a plan must start every rank from the weights of rank 0
    model = scenario.build()
    torch.manual_seed(0)
    serial = scenario.build()
    serial_optimizer = OptimizerWrapper(scenario.optimizer(serial.parameters()))

    booster = make_booster(**scenario.options)
    boosted, optimizer, *_ = booster.boost(model, scenario.optimizer(model.parameters()))
    for name, value in serial.state_dict().items():
        assert torch.equal(boosted.state_dict()[name], value), f"initial {name} differs"

    for step, (x, y) in enumerate(batches(scenario.sizes)):
        expected = _serial_step(scenario, serial, serial_optimizer, x, y, world_size)
        loss = _plan_step(
            scenario, booster, boosted, optimizer, x.chunk(world_size)[rank], y.chunk(world_size)[rank]
        )
        dist.all_reduce(loss)
        assert_close(loss / world_size, expected, f"loss of step {step}")
        for (name, p), q in zip(boosted.named_parameters(), serial.parameters(), strict=True):
            assert (p.grad is None) == (q.grad is None), (
                f"gradient of {name} at step {step}: {p.grad}, {q.grad}"
            )
            if p.grad is not None:
                assert_close(p.grad, q.grad, f"gradient of {name} at step {step}")
        for name, value in serial.state_dict().items():
            if (
                rank == 0 or "running" not in name
            ):  # other ranks take rank 0's buffers at their next forward pass
                assert_close(boosted.state_dict()[name], value, f"{name} after step {step}")


def _serial_step(
    scenario: Scenario, model: nn.Module, optimizer: OptimizerWrapper, x: Tensor, y: Tensor, world_size: int
) -> Tensor:
    optimizer.zero_grad()
    if scenario.rank_parts:
        total = torch.zeros(())
        for part, (x_part, y_part) in enumerate(zip(x.chunk(world_size), y.chunk(world_size), strict=True)):
            before = copy.deepcopy(dict(model.named_buffers()))
            loss = F.cross_entropy(model(x_part), y_part) / world_size
            loss.backward()
            total += loss.detach()
            if part > 0:  # only rank 0's statistics are kept
                for name, buffer in model.named_buffers():
                    buffer.copy_(before[name])
    else:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        total = loss.detach()
    if scenario.clip:
        scenario.clip(optimizer)
    optimizer.step()
    return total


def _plan_step(
    scenario: Scenario, booster: Booster, model: nn.Module, optimizer: OptimizerWrapper, x: Tensor, y: Tensor
) -> Tensor:
    optimizer.zero_grad()
    total = torch.zeros(())
    parts = list(zip(x.chunk(scenario.accumulate), y.chunk(scenario.accumulate), strict=True))
    for x_part, y_part in parts[:-1]:
        with booster.no_sync(model):
            loss = F.cross_entropy(model(x_part), y_part) / len(parts)
            booster.backward(loss, optimizer)
        total += loss.detach()
    loss = F.cross_entropy(model(parts[-1][0]), parts[-1][1]) / len(parts)
    booster.backward(loss, optimizer)
    if scenario.clip:
        scenario.clip(optimizer)
    optimizer.step()
    return total + loss.detach()


def assert_close(actual: Tensor, expected: Tensor | None, what: str) -> None:
    torch.testing.assert_close(actual, expected, **TOLERANCE, msg=lambda text: f"{what}: {text}")
