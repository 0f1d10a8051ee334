"""Gradient handlers: one all-reduce in buckets."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from colossalai.context import ParallelMode
from colossalai.core import global_context as gpc
from colossalai.engine.gradient_handler import (
    SHARED_GROUP,
    BaseGradientHandler,
    DataParallelGradientHandler,
    PipelineSharedModuleGradientHandler,
    SequenceParallelGradientHandler,
    bucket_allreduce,
    build_gradient_handler,
)
from colossalai.mesh import Layout, place
from colossalai.registry import GRADIENT_HANDLER
from colossalai.testing import assert_close, spawn
from colossalai.utils import bucket
from tests.engine.plans import initialize, launch, mlp, sgd


def _params(rank: int) -> list[nn.Parameter]:
    shapes = [(3, 2), (5,), (), (4, 4)]
    params = [nn.Parameter(torch.zeros(s)) for s in shapes]
    params.append(nn.Parameter(torch.zeros(3, dtype=torch.float64)))
    for p in params:
        p.grad = torch.full_like(p, rank + 1)
    return params


def check_buckets(rank: int, world_size: int, port: int) -> None:
    launch(port, {}, rank, world_size)
    mean = sum(range(1, world_size + 1)) / world_size
    for size in (25 * 2**20, 32):  # all in one, and about one each
        bucket.BUCKET_BYTES = size
        for average, value in ((True, mean), (False, mean * world_size)):
            params = _params(rank)
            bucket_allreduce(params, average=average)
            for p in params:
                assert_close(p.grad, torch.full_like(p, value))
    params = _params(rank)
    params[0].grad = None  # nobody has one
    params[1].grad = torch.ones(5) if rank == 0 else None
    params[2].requires_grad_(False)
    bucket_allreduce(params)
    assert params[0].grad is None
    assert_close(params[1].grad, torch.full((5,), 1 / world_size))
    assert params[2].grad == rank + 1, "a frozen parameter is left alone"
    transposed = nn.Parameter(torch.zeros(2, 3))
    transposed.grad = torch.arange(6.0).view(3, 2).t()
    bucket_allreduce([transposed])
    assert_close(transposed.grad, torch.arange(6.0).view(3, 2).t())


def test_buckets() -> None:
    spawn(check_buckets, 3)


def check_groups(rank: int, world_size: int, port: int) -> None:
    launch(port, {"parallel": {"tensor": {"size": 2, "mode": "sequence"}}}, rank, world_size)
    model = mlp()

    def handled(handler: BaseGradientHandler) -> float:
        for p in model.parameters():
            p.grad = torch.full_like(p, rank)
        handler.handle_gradient()
        return float(next(model.parameters()).grad.mean())  # type: ignore[union-attr]

    optimizer = sgd(model.parameters())
    # not over data alone: the ranks of one sequence would drift apart
    assert handled(DataParallelGradientHandler(model, optimizer)) == 1.5, "all four ranks"
    assert handled(SequenceParallelGradientHandler(model, optimizer)) == 1.5, "all four ranks"
    # a parameter that a row axis cuts holds its sum over that axis: it is divided, but not mixed with others
    place(next(model.parameters()), Layout((("sp",), ())), (32, 6))
    in_data = gpc.get_ranks_in_group(ParallelMode.DATA)
    assert handled(DataParallelGradientHandler(model, optimizer)) == sum(in_data) / world_size
    place(next(model.parameters()), Layout(((), ())), (16, 6))

    group = dist.new_group([0, 3])
    assert handled(PipelineSharedModuleGradientHandler(model, optimizer)) == rank, "nothing is shared"
    if rank in (0, 3):
        for p in model.parameters():
            setattr(p, SHARED_GROUP, group)
    assert handled(PipelineSharedModuleGradientHandler(model, optimizer)) == (3 if rank in (0, 3) else rank)
    next(model.parameters())._ddp_to_ignore = True  # type: ignore[attr-defined]
    assert handled(DataParallelGradientHandler(model, optimizer)) == rank


def test_each_handler_has_its_ranks() -> None:
    spawn(check_groups, 4)


def check_shared(rank: int, world_size: int, port: int) -> None:
    launch(port, {}, rank, world_size)
    model = mlp()
    setattr(model[0].weight, SHARED_GROUP, None)  # type: ignore[index]
    engine, *_ = initialize(model=model)
    assert [type(h) for h in engine.gradient_handlers] == [PipelineSharedModuleGradientHandler]


def test_shared_parameters_get_their_handler() -> None:
    spawn(check_shared, 1)


@GRADIENT_HANDLER.register_module
class Scale(BaseGradientHandler):
    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, factor: float = 2.0) -> None:
        super().__init__(model, optimizer)
        self.factor = factor

    def handle_gradient(self) -> None:
        for p in self._model.parameters():
            if p.grad is not None:
                p.grad *= self.factor


@GRADIENT_HANDLER.register_module
class NotAHandler:
    def __init__(self, *_: object) -> None: ...


def check_steps(rank: int, world_size: int, port: int) -> None:
    launch(port, {}, rank, world_size)
    engine, *_ = initialize({"gradient_handler": [{"type": "Scale"}], "gradient_accumulation": 2})
    x, y = torch.ones(2, 6), torch.zeros(2, dtype=torch.long)
    for _ in range(2):
        engine.backward(engine.criterion(engine(x), y))  # type: ignore[misc]
        engine.step()
    engine.zero_grad()
    engine.backward(engine.criterion(engine(x), y))  # type: ignore[misc]
    engine.optimizer.step()  # in the middle of a group nothing happens
    with pytest.raises(RuntimeError, match=r"optimizer.step\(\) past the engine, .*call engine.step\(\)"):
        engine.optimizer.step()


def test_steps_past_the_handlers_are_refused() -> None:
    spawn(check_steps, 1)


def test_building_from_config() -> None:
    model = mlp()
    optimizer = sgd(model.parameters())
    by_name = build_gradient_handler({"type": "Scale", "factor": 3.0}, model, optimizer)
    assert isinstance(by_name, Scale)
    assert by_name.factor == 3.0
    assert isinstance(build_gradient_handler({"type": Scale}, model, optimizer), Scale)
    with pytest.raises(ValueError, match="gradient_handler' has no 'Scall'; did you mean 'Scale'"):
        build_gradient_handler({"type": "Scall"}, model, optimizer)
    with pytest.raises(ValueError, match="needs a 'type'"):
        build_gradient_handler({}, model, optimizer)
    with pytest.raises(TypeError, match=r"must be a subclass of .*BaseGradientHandler, got NotAHandler"):
        build_gradient_handler({"type": "NotAHandler"}, model, optimizer)


def test_sparse_gradients_are_refused() -> None:
    table = nn.Embedding(4, 2, sparse=True)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(TypeError, match=r"takes dense gradients, got one in layout torch.sparse_coo"):
        bucket_allreduce(table.parameters())
