"""Accumulation of gradients: a group of iterations equals one large batch."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from colossalai.booster import Booster
from colossalai.engine.gradient_accumulation import (
    GradAccumDataloader,
    GradAccumGradientHandler,
    GradAccumLrSchedulerByStep,
    GradAccumOptimizer,
    accumulate_gradient,
)
from colossalai.engine.gradient_handler import BaseGradientHandler
from colossalai.interface import ModelWrapper
from colossalai.testing import assert_close, assert_equal, spawn
from tests.engine.plans import data, initialize, launch, loader, mlp, on_device, sgd

CRITERION = nn.CrossEntropyLoss()


class Stream(IterableDataset):
    """The same data, without a length that can be trusted."""

    def __init__(self, samples: TensorDataset) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return 1000

    def __iter__(self) -> Iterator[Any]:
        return iter([self.samples[i] for i in range(len(self.samples))])


class Counting(BaseGradientHandler):
    calls = 0

    def handle_gradient(self) -> None:
        self.calls += 1


def serial(
    batches: list[tuple[Tensor, Tensor]], epochs: int = 2, decay: float = 0.9
) -> tuple[nn.Module, float]:
    model = mlp()
    optimizer = sgd(model.parameters())
    scheduler = StepLR(optimizer, 1, gamma=decay)
    for x, y in batches * epochs:
        optimizer.zero_grad()
        CRITERION(model(x), y).backward()
        optimizer.step()
        scheduler.step()
    return model, scheduler.get_last_lr()[0]


@pytest.mark.parametrize("stream", [False, True])
def test_groups_equal_large_batches_with_the_last_group_and_the_scheduler(stream: bool) -> None:
    x, y = data(20).tensors
    large = [(x[:8], y[:8]), (x[8:16], y[8:16]), (x[16:], y[16:])]  # groups of 4, 4 and 2 batches of 2
    expected, expected_lr = serial(large)

    model = mlp()
    optimizer = sgd(model.parameters())
    batches = DataLoader(Stream(data(20)) if stream else data(20), batch_size=2)
    handler = Counting(model, optimizer)
    optimizer, batches, handlers, scheduler = accumulate_gradient(  # type: ignore[assignment]
        model, optimizer, batches, 4, [handler], StepLR(optimizer, 1, gamma=0.9)
    )
    moved = []
    for _ in range(2):
        for x, y in batches:
            before = copy.deepcopy(model.state_dict())
            optimizer.zero_grad()
            optimizer.backward(CRITERION(model(x), y))  # type: ignore[attr-defined]
            for each in handlers:
                each.handle_gradient()
            optimizer.step()
            scheduler.step()  # type: ignore[union-attr]
            moved.append(any(not torch.equal(v, before[k]) for k, v in model.state_dict().items()))
    one_epoch = [False, False, False, True] * 2 + [False, True]
    assert moved == one_epoch * 2
    assert handler.calls == 6
    assert scheduler.get_last_lr()[0] == pytest.approx(expected_lr)  # type: ignore[union-attr]
    for p, q in zip(model.parameters(), expected.parameters(), strict=True):
        assert_close(p, q)


def test_data_from_elsewhere_come_in_whole_groups() -> None:
    model = mlp()
    optimizer, batches, *_ = accumulate_gradient(model, sgd(model.parameters()), loader(10, 2), 4)
    for x, y in batches:  # type: ignore[union-attr]
        optimizer.backward(CRITERION(model(x), y))
        optimizer.step()
    assert optimizer.progress.group_size == 4, "the short group at the end of the epoch is over"


def test_scheduler_by_epoch_steps_at_each_end() -> None:
    model = mlp()
    optimizer = sgd(model.parameters())
    optimizer, batches, _, scheduler = accumulate_gradient(  # type: ignore[assignment]
        model, optimizer, loader(10, 2), 4, None, StepLR(optimizer, 1, gamma=0.5)
    )
    for _ in range(2):
        for x, y in batches:  # type: ignore[union-attr]
            optimizer.backward(CRITERION(model(x), y))  # type: ignore[attr-defined]
            optimizer.step()
        scheduler.step()  # type: ignore[union-attr]
    assert scheduler.get_last_lr() == [0.025]  # type: ignore[union-attr]


def test_a_pass_that_was_left_early_is_reported_and_dropped() -> None:
    model = mlp()
    optimizer, batches, *_ = accumulate_gradient(model, sgd(model.parameters()), loader(8, 2), 2)
    x, y = next(iter(batches))  # type: ignore[arg-type]
    optimizer.backward(CRITERION(model(x), y))
    optimizer.step()
    with pytest.warns(UserWarning, match="gradients of 1 iterations wait .* they are dropped"):
        iter(batches)  # type: ignore[arg-type]
    optimizer.zero_grad()
    assert all(p.grad is None for p in model.parameters())


def test_each_part_works_alone() -> None:
    model = mlp()
    raw = sgd(model.parameters())
    scheduler = GradAccumLrSchedulerByStep(StepLR(raw, 1, gamma=0.5), 2)
    handler = Counting(model, raw)
    accumulating = GradAccumGradientHandler(handler, 2)
    optimizer = GradAccumOptimizer(raw, 2)
    lrs = []
    for x, y in GradAccumDataloader(loader(8, 2), 2):
        optimizer.zero_grad()
        optimizer.backward(CRITERION(model(x), y))
        accumulating.handle_gradient()
        optimizer.step()
        scheduler.step()
        lrs.append(scheduler.get_last_lr()[0])
    assert lrs == [0.1, 0.05, 0.05, 0.025]
    assert handler.calls == 2
    assert GradAccumLrSchedulerByStep.compute_effective_steps_per_epoch(loader(10, 2), 4) == 2
    assert GradAccumLrSchedulerByStep.compute_effective_steps_per_epoch(loader(8, 2), 4) == 1


def test_clipping_waits_for_the_whole_group_also_under_fp16() -> None:
    booster = Booster(device="cpu", mixed_precision="fp16")
    raw = mlp()
    model, optimizer, *_ = booster.boost(raw, sgd(raw.parameters()))
    optimizer = GradAccumOptimizer(optimizer, 2, model)
    for x, y in loader(8, 2):
        optimizer.backward(CRITERION(model(x).float(), y))
        norm = optimizer.clip_grad_by_norm(1.0)  # under fp16, unscaling amid a group would be an error
        optimizer.clip_grad_by_value(1.0)
        optimizer.step()
        optimizer.zero_grad()
    assert norm.ndim == 0


@pytest.mark.parametrize("size", [0, -1, 1.5, True, "4"])
def test_a_size_that_is_none_is_refused(size: Any) -> None:
    with pytest.raises(ValueError, match=r"accumulate_size .* at least 1; got"):
        GradAccumOptimizer(sgd(mlp().parameters()), size)


def test_a_handler_that_is_none_is_refused() -> None:
    with pytest.raises(TypeError, match="wraps a BaseGradientHandler, got str"):
        GradAccumGradientHandler("handler", 2)  # type: ignore[arg-type]


class Plain(ModelWrapper):
    """Counts how often it was told not to synchronize, and fails on demand."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self.silent = 0
        self.fail = False

    def no_sync(self) -> Any:
        outer = self

        class Context:
            def __enter__(self) -> None:
                outer.silent += 1

            def __exit__(self, *_: Any) -> None:
                outer.silent -= 1

        return Context()

    def forward(self, x: Tensor) -> Tensor:
        if self.fail:
            raise ZeroDivisionError
        self.seen = self.silent
        return self.module(x)


def test_no_sync_ends_with_the_forward_pass_whatever_happens() -> None:
    model = Plain(mlp())
    optimizer = GradAccumOptimizer(sgd(model.parameters()), 2, model)
    x = torch.ones(1, 6)
    model(x)
    assert (model.seen, model.silent) == (1, 0)
    with torch.no_grad():
        model(x)
    assert model.seen == 0, "an evaluation has nothing to synchronize"
    model.fail = True
    with pytest.raises(ZeroDivisionError):
        model(x)
    assert model.silent == 0
    model.fail = False
    optimizer.step()
    model(x)
    assert model.seen == 0, "the last iteration of the group synchronizes"


def check_collectives(rank: int, world_size: int, port: int) -> None:
    """Under DDP, gradients travel once per group."""
    launch(port, {}, rank, world_size)
    engine, batches, *_ = initialize({"gradient_accumulation": 4}, train_dataloader=loader(20, 2))
    buckets = []
    ddp = engine.model.module  # type: ignore[union-attr]

    def count(state, bucket):  # type: ignore[no-untyped-def]  # torch looks at annotations, which are strings here
        buckets.append(engine.optimizer.progress.done)  # type: ignore[attr-defined]
        return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(lambda f: f.value()[0])  # type: ignore[union-attr]

    ddp.register_comm_hook(None, count)
    local = []
    for x, y in (on_device(*batch) for batch in batches):
        engine.zero_grad()
        engine.backward(engine.criterion(engine(x), y))  # type: ignore[misc]
        local.append(engine.optimizer.progress.done)  # type: ignore[attr-defined]
        engine.step()
    assert local == [0, 1, 2, 3, 0, 1, 2, 3, 0, 1]
    assert buckets == [3, 3, 1]


def test_ddp_synchronizes_once_per_group() -> None:
    spawn(check_collectives, 2)


def test_states_pass_through() -> None:
    model = mlp()
    raw = sgd(model.parameters())
    optimizer, batches, _, scheduler = accumulate_gradient(model, raw, loader(8, 2), 2, None, StepLR(raw, 1))
    assert optimizer.unwrap() is raw
    assert len(batches) == 4  # type: ignore[arg-type]
    assert batches.batch_size == 2  # type: ignore[union-attr]
    scheduler.load_state_dict(scheduler.state_dict())  # type: ignore[union-attr]
    assert_equal(next(iter(copy.deepcopy(batches)))[0], data(8).tensors[0][:2])  # type: ignore[arg-type]
