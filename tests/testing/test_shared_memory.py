"""The process group in shared memory does what gloo does."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from colossalai.mesh._compat import all_gather_single, reduce_scatter_single
from colossalai.testing import spawn
from tests import shared_memory
from tests.shared_memory import CELL, RING

Collective = Callable[[Tensor, dist.ProcessGroup], Tensor]


def _world(rank: int, world_size: int, port: int) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    shared_memory.register()
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=world_size)
    gloo = dist.group.WORLD
    assert gloo is not None
    return gloo, dist.new_group(backend=shared_memory.NAME)


def _reduced(op: dist.ReduceOp.RedOpType) -> Collective:
    def collective(own: Tensor, group: dist.ProcessGroup) -> Tensor:
        dist.all_reduce(own, op=op, group=group)
        return own

    return collective


def _broadcast(own: Tensor, group: dist.ProcessGroup) -> Tensor:
    dist.broadcast(own, src=1, group=group)
    return own


def _to_one(own: Tensor, group: dist.ProcessGroup) -> Tensor:
    dist.reduce(own, dst=1, group=group)
    return own if dist.get_rank() == 1 else own.new_empty(0)  # elsewhere gloo leaves what is not said


def _gathered(own: Tensor, group: dist.ProcessGroup) -> Tensor:
    whole = own.new_empty(own.numel() * dist.get_world_size())
    all_gather_single(whole, own.view(-1), group=group)
    return whole


def _listed(own: Tensor, group: dist.ProcessGroup) -> Tensor:
    parts = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, own, group=group)
    return torch.stack(parts)


def _scattered(own: Tensor, group: dist.ProcessGroup) -> Tensor:
    ranks = dist.get_world_size()
    whole = own.view(-1).repeat(ranks) * torch.arange(ranks, dtype=own.dtype).repeat_interleave(own.numel())
    part = torch.empty_like(own).view(-1)
    reduce_scatter_single(part, whole, group=group)
    return part


COLLECTIVES: tuple[Collective, ...] = (
    _reduced(dist.ReduceOp.SUM),
    _reduced(dist.ReduceOp.MAX),
    _reduced(dist.ReduceOp.MIN),
    _reduced(dist.ReduceOp.PRODUCT),
    _broadcast,
    _to_one,
    _gathered,
    _listed,
    _scattered,
)
SHAPES = ((), (1,), (3, 5), (CELL // 8,), (CELL // 4 + 7,))  # the last is too long for a cell


def _like_gloo(rank: int, world_size: int, port: int) -> None:
    gloo, ours = _world(rank, world_size, port)
    for dtype in (torch.float32, torch.float64, torch.int64, torch.uint8):
        for shape in SHAPES:
            # small whole numbers: sums are exact in any order
            draw = torch.Generator().manual_seed(rank)
            own = torch.randint(0, 3, shape, generator=draw).to(dtype)
            for collective in COLLECTIVES:
                expected = collective(own.clone(), gloo)
                got = collective(own.clone(), ours)
                assert torch.equal(got, expected), (collective.__qualname__, dtype, shape)
    found: list[object] = [None] * world_size
    dist.all_gather_object(found, {"rank": rank, "text": "x" * (rank * CELL)}, group=ours)
    assert [len(one["text"]) for one in found] == [i * CELL for i in range(world_size)]  # type: ignore[index]
    dist.barrier(group=ours)


@pytest.mark.parametrize("ranks", [2, 4])
def test_every_collective_gives_what_gloo_gives(ranks: int) -> None:
    spawn(_like_gloo, ranks)


def _in_other_orders(rank: int, world_size: int, port: int) -> None:
    _, first = _world(rank, world_size, port)
    groups = [first, dist.new_group(backend=shared_memory.NAME)]
    order = groups if rank % 2 == 0 else groups[::-1]
    for step in range(3 * RING):
        numbers = {group: torch.tensor([rank + step]) for group in groups}
        works = [dist.all_reduce(numbers[group], group=group, async_op=True) for group in order]
        for work in works:
            assert work is not None
            work.wait()
        expected = sum(range(world_size)) + world_size * step
        assert [int(n) for n in numbers.values()] == [expected, expected]
    # many begun before the first is waited for: their rows are used again
    many = [torch.tensor([i]) for i in range(3 * RING)]
    works = [dist.all_reduce(number, group=first, async_op=True) for number in many]
    for work in works:
        assert work is not None
        work.wait()
    assert [int(n) for n in many] == [world_size * i for i in range(len(many))]


def test_ranks_may_begin_the_collectives_of_two_groups_in_different_orders() -> None:
    spawn(_in_other_orders, 2)


def _alone(rank: int, world_size: int, port: int) -> None:
    shared_memory.register()
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=world_size)
    ours = dist.new_group(backend=shared_memory.NAME, timeout=timedelta(seconds=1))
    if rank == 0:
        with pytest.raises(RuntimeError, match=r"rank 0 has waited 1 s; the ranks have arrived at \[1, 0\]"):
            dist.barrier(group=ours)
    dist.barrier()


def test_whoever_waits_too_long_says_who_is_missing() -> None:
    spawn(_alone, 2)


def test_nothing_is_left_behind() -> None:
    before = {name for name in os.listdir("/dev/shm") if name.startswith("colossalai_ring_")}
    spawn(_in_other_orders, 2)
    assert {name for name in os.listdir("/dev/shm") if name.startswith("colossalai_ring_")} <= before
