"""The account of collectives equals the formulas of the ring algorithms, forward and backward."""

from __future__ import annotations

import pytest
import torch

from colossalai.mesh import (
    Layout,
    MatmulPlan,
    Mesh,
    collectives,
    count_communication,
    matmul,
    movement,
    shard,
)
from colossalai.nn.modes import TensorParallel, mode_1d, mode_2p5d, mode_3d
from colossalai.testing import spawn
from tests.mesh.world import start


def _each_kind(rank: int, world_size: int, port: int) -> None:
    start(rank, world_size, port)
    mesh = Mesh({"dp": 1, "tp": 4})
    x = torch.ones(8, 4, requires_grad=True)  # 128 bytes
    with count_communication() as log:
        movement.gather(x, "tp", mesh).sum().backward()
    assert [(t.kind, t.axis, t.size, t.bytes, t.sent) for t in log.transfers] == [
        ("all_gather", "tp", 4, 512, 384.0),
        ("reduce_scatter", "tp", 4, 512, 384.0),
    ]
    with count_communication() as log:
        movement.total(x, "tp", mesh).sum().backward()
        movement.all_to_all(x, "tp", mesh, uncut=1, cut=0).sum().backward()
        collectives.broadcast(x.detach(), mesh, "tp", source=2)
        movement.gather(x, "dp", mesh).sum().backward()  # an axis of size 1 moves nothing
    assert (log.calls("all_reduce"), log.sent("all_reduce")) == (2, 2 * 2 * 128 * 3 / 4)
    assert (log.calls("all_to_all"), log.sent("all_to_all")) == (2, 2 * 128 * 3 / 4)
    assert (log.calls("broadcast"), log.bytes("broadcast"), log.sent("broadcast")) == (1, 128, 96.0)
    assert log.calls(axis="dp") == 0
    with pytest.raises(ValueError, match="no collective 'all_reduec'; there are all_gather"):
        log.calls("all_reduec")  # type: ignore[arg-type]
    assert log.calls() == 5
    assert "all_to_all      tp           4       2             256             192" in log.table()
    with count_communication() as outer, count_communication() as inner:
        movement.spread(x, "tp", mesh).sum().backward()
    assert outer.calls() == inner.calls() == 1
    movement.spread(x, "tp", mesh).sum().backward()
    assert outer.calls() == 1  # nothing is counted outside the block


def test_each_kind_is_counted() -> None:
    spawn(_each_kind, 4)


def _shifts(rank: int, world_size: int, port: int, device: str) -> None:
    start(rank, world_size, port)
    mesh = Mesh({"dp": 1, "sp": 3}, device)
    before, after = (rank - 1) % 3, (rank + 1) % 3
    x = torch.full((2, 5), float(rank), device=device, requires_grad=True)  # 40 bytes
    with count_communication() as log:
        y = movement.ring_shift(x.t(), "sp", mesh)  # not contiguous
        assert torch.equal(y, torch.full((5, 2), float(before), device=device))
        (y * (rank + 1)).sum().backward()
        assert x.grad is not None
        assert torch.equal(x.grad, torch.full_like(x, after + 1.0))
        assert torch.equal(
            collectives.ring_shift(x.detach(), mesh, "sp", by=-1), torch.full_like(x, float(after))
        )
        movement.ring_shift(x, "dp", mesh).sum().backward()
    assert [(t.kind, t.bytes, t.sent) for t in log.transfers] == [("shift", 40, 40)] * 3

    # rank r sends r + c rows to coordinate c: nothing from 0 to 0, and rank 0 receives 0, 1, 2 rows
    send, receive = [rank + c for c in range(3)], [c + rank for c in range(3)]
    rows = torch.tensor([10.0 * rank + c for c in range(3) for _ in range(send[c])], device=device)[:, None]
    rows = rows.expand(-1, 2).clone().requires_grad_()
    with count_communication() as log:
        got = movement.all_to_all_ragged(rows, send, receive, "sp", mesh)
        assert got[:, 0].tolist() == [10.0 * c + rank for c in range(3) for _ in range(receive[c])]
        (got * (rank + 1)).sum().backward()
    assert rows.grad is not None
    assert rows.grad[:, 0].tolist() == [c + 1.0 for c in range(3) for _ in range(send[c])]
    leaves = 8 * (sum(send) - send[rank])
    assert [(t.kind, t.sent) for t in log.transfers] == [("all_to_all", leaves)] * 2
    with pytest.raises(ValueError, match=r"axis 'sp' has 3 ranks and the tensor \d+ rows"):
        movement.all_to_all_ragged(rows, send[:2], receive, "sp", mesh)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_shifts_and_ragged_exchanges(device: str) -> None:
    spawn(_shifts, 3, device=device)


def _sent_and_saved(rank: int, world_size: int, port: int, device: str) -> None:
    start(rank, world_size, port)
    mesh = Mesh({"tp": 2})
    x = torch.full((3,), 0.5, device=device, requires_grad=True)
    saved = x.exp()  # its backward needs this very tensor
    sent = collectives.start_broadcast(saved.detach(), mesh, "tp", 0, (3,))()
    saved.sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, sent)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_sent_tensor_is_not_taken_for_changed(device: str) -> None:
    """An attention's output, which its backward needs, is a panel of 2D's products; gloo writes to what it
    sent from a GPU.
    """
    spawn(_sent_and_saved, 2, device=device)


def _moved_by_linear_pair(tp: TensorParallel, batch: int, hidden: int, rank: int) -> float:
    """Bytes one rank sends for x -> expand -> contract and back, without fetching operands again."""
    mesh = Mesh(tp.axes)
    x = shard(torch.ones(batch, 1, hidden), tp.hidden, mesh).requires_grad_()
    w1 = shard(torch.ones(hidden, hidden), tp.expand, mesh).requires_grad_()
    w2 = shard(torch.ones(hidden, hidden), tp.contract, mesh).requires_grad_()
    with count_communication() as log:
        y = matmul(x, w1, MatmulPlan(tp.hidden, tp.expand, tp.inner), mesh)
        y = matmul(y, w2, MatmulPlan(tp.inner, tp.contract, tp.hidden), mesh)
        y.sum().backward()
    return log.sent()


def _formulas(rank: int, world_size: int, port: int) -> None:
    start(rank, world_size, port)
    b, h, word = 16, 32, 4
    act, weight = b * h * word, h * h * word
    p = world_size
    # 1D: one all-reduce of the activations forward and one backward: 2 x 2 (p-1)/p
    assert _moved_by_linear_pair(mode_1d(p), b, h, rank) == 2 * 2 * (p - 1) / p * act
    # 3D: each product moves x, w and y, 1/q^2 of a matrix on an axis of size q: (q-1)/q^3 each; backward does
    # the same with dy, dw, dx and fetches x and w again
    q, depth = 2, 2
    one = (q - 1) / q**3
    forward, backward = 2 * act + weight, (2 * act + weight) + (act + weight)
    assert _moved_by_linear_pair(mode_3d(q), b, h, rank) == 2 * one * (forward + backward)
    # 2.5D: x over col and w over row, then dx, dw and both operands again, and dw is summed over depth
    gathers = (q - 1) / q * (act / (depth * q) + weight / q)
    depth_sum = 2 * (depth - 1) / depth * weight / q**2
    assert _moved_by_linear_pair(mode_2p5d(q, depth), b, h, rank) == 2 * (3 * gathers + depth_sum)


def test_bytes_of_linear_layers_follow_the_formulas() -> None:
    spawn(_formulas, 8)


def test_a_plan_that_makes_no_sense_is_refused() -> None:
    import pytest

    cut_rows, cut_features = Layout((("tp",), (), ())), Layout(((), (), ("tp",)))
    with pytest.raises(
        ValueError, match=r"axis 'tp': no matrix product takes x in state 0 and w in state I to y in state 2"
    ):
        MatmulPlan(cut_rows, Layout(((), ())), cut_features)
