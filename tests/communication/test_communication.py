"""Collectives and messages by ``ParallelMode`` against what each rank can compute alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import colossalai
from colossalai import communication as comm
from colossalai.communication import p2p_v2
from colossalai.context import ParallelMode
from colossalai.core import global_context as gpc
from colossalai.mesh.collectives import count_communication
from colossalai.testing import spawn
from colossalai.utils import get_current_device

TENSOR, PIPELINE, DATA = ParallelMode.TENSOR, ParallelMode.PIPELINE, ParallelMode.DATA
WORLD = {"parallel": {"pipeline": 2, "tensor": {"size": 2, "mode": "1d"}}}


def of_rank(rank: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(rank)).to(get_current_device())


def check_collectives(mode: ParallelMode) -> None:
    rank, ranks = gpc.get_global_rank(), gpc.get_ranks_in_group(mode)
    place, size = ranks.index(rank), len(ranks)
    x, every = of_rank(rank, 4, 8), [of_rank(r, 4, 8) for r in ranks]
    total = torch.stack(every).sum(0)
    for dim in (0, 1, -1):
        torch.testing.assert_close(comm.all_gather(x, dim, mode), torch.cat(every, dim), rtol=0, atol=0)
        gathered, work = comm.all_gather(x, dim, mode, async_op=True)  # type: ignore[misc]
        if work is not None:
            work.wait()
            assert work.is_completed()
        torch.testing.assert_close(gathered, torch.cat(every, dim), rtol=0, atol=0)
        torch.testing.assert_close(
            comm.reduce_scatter(x, dim, mode), total.chunk(size, dim)[place], rtol=0, atol=1e-6
        )
    largest = torch.stack(every).amax(0)
    y = x.clone()
    assert comm.all_reduce(y, mode, dist.ReduceOp.MAX) is y
    torch.testing.assert_close(y, largest, rtol=0, atol=0)
    strided = x.clone().t()  # a result that is not contiguous is put back
    same, work = comm.all_reduce(strided, mode, async_op=True)  # type: ignore[misc]
    if work is not None:
        work.wait()
    assert same is strided
    torch.testing.assert_close(strided, total.t(), rtol=0, atol=1e-6)
    z = x.clone().t()
    torch.testing.assert_close(comm.broadcast(z, ranks[-1], mode), every[-1].t(), rtol=0, atol=0)
    for dst in ranks:
        w = x.clone()
        comm.reduce(w, dst, mode)
        torch.testing.assert_close(w, total if rank == dst else x, rtol=0, atol=1e-6)
    own: list[Any] = [None]
    comm.scatter_object_list(own, [{"for": r} for r in ranks], src=ranks[0], group=mode)
    assert own == [{"for": rank}]
    torch.testing.assert_close(comm.ring_forward(x, mode), every[place - 1], rtol=0, atol=0)


def check_account() -> None:
    with count_communication() as log:
        comm.all_gather(torch.ones(4, 6), 1, TENSOR)
        comm.all_reduce(torch.ones(5), TENSOR)
        comm.all_reduce(torch.ones(5), DATA)
    assert [(t.kind, t.axis, t.bytes) for t in log.transfers] == [
        ("all_gather", "tensor", 2 * 4 * 6 * 4),
        ("all_reduce", "tensor", 20),
    ]


def check_gradients() -> None:
    """Results may be reported; a loss that uses them is refused instead of losing a part of its gradient."""
    weight = nn.Parameter(torch.ones(4, device=get_current_device()))
    loss = (weight * 2).sum()
    loss.backward()
    comm.all_reduce(loss, TENSOR)
    assert loss.item() == 16
    for call in (
        lambda x: comm.all_gather(x, 0, TENSOR),
        lambda x: comm.reduce_scatter(x, 0, TENSOR),
        lambda x: comm.all_reduce(x, TENSOR),
        lambda x: comm.ring_forward(x, TENSOR),
    ):
        with pytest.raises(RuntimeError, match=r"communication\.\w+ carries no gradients"):
            call(weight * 2).sum().backward()
    with pytest.raises(RuntimeError, match="all_reduce would change a tensor in place that requires"):
        comm.all_reduce(weight, TENSOR)
    with torch.no_grad():
        comm.all_reduce(weight, TENSOR)
    assert weight.tolist() == [2] * 4


def check_refusals() -> None:
    with pytest.raises(RuntimeError, match=r"PARALLEL_2D_ROW has no process group .* mode='2d'"):
        comm.all_reduce(torch.ones(1), ParallelMode.PARALLEL_2D_ROW)
    with pytest.raises(TypeError, match="expected a ParallelMode, got str 'data'"):
        comm.all_gather(torch.ones(1), 0, "data")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="dim 0 of size 3 cannot be cut into 2 equal parts"):
        comm.reduce_scatter(torch.ones(3), 0, TENSOR)
    other = (gpc.get_global_rank() + 2) % 4
    with pytest.raises(ValueError, match=rf"src={other} is not among the ranks .* of ParallelMode.TENSOR"):
        comm.broadcast(torch.ones(1), other, TENSOR)
    with pytest.raises(ValueError, match="a tensor of 3 elements cannot be cut into 2 equal pieces"):
        comm.split_tensor_into_1d_equal_chunks(torch.ones(3))


def check_different_calls() -> None:
    """Ranks whose calls do not fit each other all refuse them, and no rank waits."""
    here = gpc.get_local_rank(TENSOR)
    first, second = gpc.get_ranks_in_group(TENSOR)
    longer, wider = torch.ones(2 + 2 * here), torch.ones(4, dtype=(torch.float32, torch.float64)[here])
    calls: list[Any] = [
        lambda x: comm.all_gather(x, 0, TENSOR),
        lambda x: comm.reduce_scatter(x, 0, TENSOR),
        lambda x: comm.all_reduce(x, TENSOR),
        lambda x: comm.broadcast(x, first, TENSOR),
        lambda x: comm.reduce(x, second, TENSOR),
    ]
    for call in calls:
        with pytest.raises(ValueError, match=r"of shape \(2,\) on cpu.*, rank \d .* of shape \(4,\) on cpu"):
            call(longer)
        with pytest.raises(ValueError, match=r"float32 of shape \(4,\).*float64 .*; make the same call"):
            call(wider)
    with pytest.raises(ValueError, match=r"rank \d all_reduce\(.* op=SUM\), rank \d broadcast\(.* src="):
        calls[2 + here](torch.ones(2))
    assert torch.equal(longer, torch.ones(2 + 2 * here))
    _, work = comm.broadcast(longer, first, TENSOR, async_op=True)  # type: ignore[misc]
    assert work is not None
    with pytest.raises(ValueError, match="make different calls"):
        work.wait()
    with pytest.raises(RuntimeError, match=r"(?s)(refused its part of broadcast.*)?would change a tensor in"):
        comm.broadcast(nn.Parameter(torch.ones(2)), first, TENSOR)
    with pytest.raises(
        ValueError, match=r"dim=5 is no dim of a tensor of shape \(2, 2\), which has dims 0 to"
    ):
        comm.reduce_scatter(torch.ones(2, 2), 5, TENSOR)
    for mode in (TENSOR, DATA):
        with pytest.raises(ValueError, match=r"shape \(\), which has none; give tensor\.reshape\(1\)"):
            comm.all_gather(torch.tensor(1.0), 0, mode)


def stages() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(7)
    return nn.Linear(6, 8).to(get_current_device()), nn.Linear(8, 2).to(get_current_device())


def check_a_schedule_by_hand(scatter: bool) -> None:
    """Two micro-batches through two stages, the second forward beside the first backward."""
    first, second = stages()
    batches = [of_rank(50 + i, 3, 6) for i in range(2)]
    expected = [second(first(x).relu()).square().mean() for x in batches]
    sum(expected).backward()  # type: ignore[union-attr]
    wanted = [p.grad for p in (first if gpc.is_pipeline_first_stage() else second).parameters()]
    first, second = stages()
    options: dict[str, Any] = {"scatter_gather_tensors": scatter}
    if gpc.is_pipeline_first_stage():
        assert comm.recv_forward((3, 8)) is None
        outputs = [first(x).relu() for x in batches]
        assert comm.send_obj_meta(outputs[0]) is False
        assert comm.send_obj_meta(outputs[0], need_meta=False) is False
        comm.send_forward(outputs[0], **options)
        grad = comm.send_forward_recv_backward(outputs[1], (3, 8), **options)
        outputs[0].backward(grad)
        outputs[1].backward(comm.recv_backward((3, 8), dtype=torch.float32))
        comm.send_backward(None)  # the first stage has no stage to send to
        trained: nn.Module = first
    else:
        shape = comm.recv_obj_meta()
        assert shape == torch.Size([3, 8])
        assert comm.recv_obj_meta(shape) is shape
        received = [comm.recv_forward(shape)]
        loss = second(received[0]).square().mean()
        loss.backward()
        torch.testing.assert_close(loss, expected[0])
        received.append(comm.send_backward_recv_forward(received[0].grad, shape, **options))
        second(received[1]).square().mean().backward()
        comm.send_backward(received[1].grad, **options)
        assert comm.recv_backward((3, 8)) is None
        trained = second
    for p, grad in zip(trained.parameters(), wanted, strict=True):
        torch.testing.assert_close(p.grad, grad)


def check_ring_of_chunks() -> None:
    """Both directions at once, where the rank before is also the next one."""
    rank = gpc.get_global_rank()
    other = gpc.get_next_global_rank(PIPELINE)
    out, grad = of_rank(rank, 2, 3), of_rank(10 + rank, 4)
    got = comm.send_forward_backward_recv_forward_backward(out, grad, (2, 3), (4,))
    torch.testing.assert_close(got[0], of_rank(other, 2, 3), rtol=0, atol=0, check_device=True)
    torch.testing.assert_close(got[1], of_rank(10 + other, 4), rtol=0, atol=0)
    assert got[0].requires_grad
    assert not got[1].requires_grad
    is_first = gpc.is_pipeline_first_stage()
    forward = comm.send_forward_recv_forward(out if is_first else None, recv_prev=not is_first)
    assert (forward is None) == is_first
    backward = comm.send_backward_recv_backward(None if is_first else grad, recv_next=is_first)
    assert (backward is not None) == is_first
    halves = [of_rank(3, 2).half(), torch.arange(3), torch.empty(0)]
    got = comm.send_forward_recv_forward(halves, [(2,), (3,), (0,)])
    assert [t.dtype for t in got] == [torch.half, torch.int64, torch.float32]
    with pytest.raises(ValueError, match=r"was told the shape \(3, 2\), but what came has \(2, 3\)"):
        comm.send_forward_recv_forward(out, (3, 2))
    with pytest.raises(ValueError, match=r"was told dtype=torch.float16, but what came is torch.float32"):
        comm.send_forward_recv_forward(out, dtype=torch.half)
    if is_first:
        p2p_v2.send_forward({"hidden": out, "rest": ["mask", None, 3]})
    else:
        message = p2p_v2.recv_forward()
        torch.testing.assert_close(message["hidden"], of_rank(other, 2, 3), rtol=0, atol=0)
        assert message["rest"] == ["mask", None, 3]
    assert p2p_v2.recv_forward() is None if is_first else p2p_v2.recv_backward() is None


def check_pieces() -> None:
    x = of_rank(1, 4, 3)
    piece = comm.split_tensor_into_1d_equal_chunks(x, new_buffer=True)
    assert piece.shape == (6,)
    torch.testing.assert_close(comm.gather_split_1d_tensor(piece).view(4, 3), x, rtol=0, atol=0)


def check_all(rank: int, world_size: int, port: int) -> None:
    colossalai.launch(WORLD, rank, world_size, "127.0.0.1", port, backend="gloo", verbose=False)
    for mode in (TENSOR, ParallelMode.MODEL, DATA, ParallelMode.GLOBAL):
        check_collectives(mode)
    check_account()
    check_gradients()
    check_refusals()
    check_different_calls()
    for scatter in (False, True):
        check_a_schedule_by_hand(scatter)
    check_ring_of_chunks()
    check_pieces()


def test_communication() -> None:
    spawn(check_all, 4)


def test_without_a_launch() -> None:
    with pytest.raises(RuntimeError, match=r"has no process group yet; call colossalai\.launch first"):
        comm.all_reduce(torch.ones(1), DATA)
