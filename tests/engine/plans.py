"""What the tests of engine and trainer share: a launch, small training objects, and an engine's run for
`check_plan`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import colossalai
from colossalai.core import global_context as gpc
from colossalai.engine import Engine
from colossalai.logging import get_dist_logger
from colossalai.testing.parity import Problem
from colossalai.utils import get_current_device

Config = dict[str, Any]


def launch(port: int, config: Config | None = None, rank: int = 0, world_size: int = 1) -> None:
    colossalai.launch(config or {}, rank, world_size, "127.0.0.1", port, backend="gloo", verbose=False)


def use_config(config: Config) -> None:
    """Another config for the job that runs, as if it had been launched with it."""
    gpc.load_config(config)


def mlp(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))


def sgd(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def data(samples: int, seed: int = 1) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, 6, generator=generator)
    return TensorDataset(x, torch.randint(3, (samples,), generator=generator))


def on_device(*tensors: Tensor) -> list[Tensor]:
    """Where the model of an engine is: on the GPU, if there is one."""
    return [tensor.to(get_current_device()) for tensor in tensors]


def loader(samples: int, batch_size: int) -> DataLoader:
    return DataLoader(data(samples), batch_size=batch_size)


def initialize(config: Config | None = None, **options: Any) -> tuple[Engine, Any, Any, Any]:
    """An engine over `mlp` and SGD under ``config``, in the launched job."""
    use_config(config or {})
    model = options.pop("model", None) or mlp()
    optimizer = options.pop("optimizer", None) or sgd(model.parameters())
    criterion = options.pop("criterion", nn.CrossEntropyLoss())
    return colossalai.initialize(model, optimizer, criterion, verbose=False, **options)


@contextmanager
def logged() -> Iterator[list[str]]:
    """What this process logs in the block."""
    messages: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages.append(record.getMessage())

    handler = Keep()
    get_dist_logger()  # it exists, with its level, from here on
    logging.getLogger("colossalai").addHandler(handler)
    try:
        yield messages
    finally:
        logging.getLogger("colossalai").removeHandler(handler)


class EngineRun:
    """A problem under an engine: each rank takes its part of a batch, in ``accumulate`` iterations."""

    def __init__(self, problem: Problem, config: Config, optimizer: Callable[..., Any] | None = None) -> None:
        self.problem = problem
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.accumulate = config.get("gradient_accumulation", 1)
        model = problem.build()
        with torch.no_grad():
            for p in model.parameters():
                p.add_(self.rank)  # the engine must bring the weights of rank 0 to all
        own = (optimizer or problem.optimizer)(model.parameters())
        self.engine, *_ = initialize(config, model=model, optimizer=own)

    def weights(self) -> dict[str, Tensor]:
        return {name: p.detach().clone() for name, p in self.engine.model.named_parameters()}

    def forward_backward(self, batch: Any) -> Tensor:
        parts = [t.chunk(self.world_size)[self.rank].chunk(self.accumulate) for t in batch]
        total = torch.zeros(())
        for index, part in enumerate(zip(*parts, strict=True)):
            self.engine.zero_grad()
            _, _, loss = self.engine.execute_schedule(iter([part]))
            total += loss.cpu() / self.accumulate
            if index + 1 < self.accumulate:
                self.engine.step()
        for handler in self.engine.gradient_handlers:
            handler.handle_gradient()  # averaging again, in engine.step, changes nothing
        dist.all_reduce(total)
        return total / self.world_size

    def gradients(self) -> dict[str, Tensor]:
        return {n: p.grad.clone() for n, p in self.engine.model.named_parameters() if p.grad is not None}

    def gradient_norm(self) -> Tensor:
        return self.engine.optimizer.clip_grad_by_norm(float("inf"))

    def update(self) -> None:
        self.engine.step()
