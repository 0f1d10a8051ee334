"""What travels, when and how much; and parameters that ranks use differently."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from colossalai.mesh import own_grad
from colossalai.mesh.collectives import count_communication
from colossalai.nn.optimizer import FusedLAMB, HybridAdam, Lars
from colossalai.testing import RankError, spawn
from colossalai.zero import LowLevelZeroOptimizer
from colossalai.zero.low_level import reducer
from tests.zero.low_level.problems import Case, Net, batches, boost, check_case, launch, loss_of, train_part


class Branches(nn.Module):
    """Each rank may take another way."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.ways = nn.ModuleList(nn.Linear(5, 5) for _ in range(4))
        self.last = nn.Linear(5, 1)

    def forward(self, x: Tensor, way: int) -> Tensor:
        return self.last(self.ways[way](x).tanh())


def check_branches(rank: int, world_size: int, port: int) -> None:
    launch()
    for stage2 in (False, True):
        for overlap in (False, True):
            model, serial = Branches(), Branches()
            optimizer = LowLevelZeroOptimizer(
                HybridAdam(model.parameters(), lr=0.1, weight_decay=0.5, eps=1e-3),
                partition_grad=stage2,
                overlap_communication=overlap,
                reduce_bucket_size=20,
            )
            plain = HybridAdam(serial.parameters(), lr=0.1, weight_decay=0.5, eps=1e-3)
            x = torch.linspace(-1, 1, 10).view(2, 5)
            for step in range(4):  # way 3 is never taken, the others by one rank or two
                ways = [(step + r) % 2 + (step == 2) for r in range(world_size)]
                optimizer.backward(model(x[rank : rank + 1], ways[rank]).mean())
                sum(serial(x[r : r + 1], ways[r]).mean() / world_size for r in range(world_size)).backward()
                optimizer.step()
                plain.step()
                optimizer.zero_grad()
                plain.zero_grad()
            for a, b in zip(model.parameters(), serial.parameters(), strict=True):
                torch.testing.assert_close(a, b)
            states = optimizer.state_dict()["state"]
            assert states.keys() == plain.state_dict()["state"].keys()  # nothing of way 3
            for number, state in plain.state_dict()["state"].items():
                assert states[number]["step"] == state["step"]


def test_ranks_may_use_different_parameters() -> None:
    spawn(check_branches, 2)


class Shared(nn.Module):
    """One weight in as many checkpointed parts as asked for: it gets a gradient for each."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.shared = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, times: int) -> Tensor:
        x = self.first(x)
        for _ in range(times):
            x = torch.utils.checkpoint.checkpoint(self.shared, x, use_reentrant=True).tanh()
        return x.square().mean()


def check_late(rank: int, world_size: int, port: int) -> None:
    launch()
    for stage2 in (False, True):
        model, serial = Shared(), Shared()
        optimizer = LowLevelZeroOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.5),
            partition_grad=stage2,
            overlap_communication=True,
            reduce_bucket_size=1,
        )
        plain = torch.optim.SGD(serial.parameters(), lr=0.5)
        x = torch.linspace(-1, 1, 16).view(4, 4)
        # more often than before, on one rank only, and less often than before
        for times in ((1, 1), (3, 3), (3, 4), (1, 2), (2, 1)):
            optimizer.backward(model(x.chunk(2)[rank], times[rank]))
            sum(serial(part, n) / 2 for part, n in zip(x.chunk(2), times, strict=True)).backward()
            optimizer.step()
            plain.step()
            optimizer.zero_grad()
            plain.zero_grad()
        for a, b in zip(model.parameters(), serial.parameters(), strict=True):
            torch.testing.assert_close(a, b)


def test_gradients_that_come_after_their_bucket_has_left() -> None:
    spawn(check_late, 2)


def check_bytes(rank: int, world_size: int, port: int) -> None:
    launch()
    for stage in (1, 2):
        model = nn.Sequential(nn.Linear(8, 16, bias=False), nn.Linear(16, 8, bias=False))
        total = sum(p.numel() for p in model.parameters())
        optimizer = LowLevelZeroOptimizer(
            HybridAdam(model.parameters()), partition_grad=stage == 2, reduce_bucket_size=128
        )
        x = torch.ones(2, 8)
        with count_communication() as log:
            for _ in range(3):
                optimizer.backward(model(x).mean(), sync_grad=False)
        assert log.calls() == 0
        with count_communication() as log:
            optimizer.backward(model(x).mean())
        assert log.calls("reduce_scatter") == 2
        assert log.bytes("reduce_scatter") == 4 * total
        assert log.bytes("all_reduce") == 4  # two parameters and two buckets, a byte each
        with count_communication() as log:
            optimizer.step()
        assert log.bytes("all_gather") == 4 * total
        assert log.calls() == log.calls("all_gather") == 2
        # all passes local, and the step still sees the gradients of all ranks
        optimizer.zero_grad()
        optimizer.backward(model(x).mean(), sync_grad=False)
        with count_communication() as log:
            optimizer.step()
        assert log.bytes("reduce_scatter") == 4 * total
        half = LowLevelZeroOptimizer(
            HybridAdam(nn.Linear(8, 8).parameters()), communication_dtype=torch.bfloat16
        )
        weight = half.pieces[0].param
        with count_communication() as log:
            half.backward(weight.sum())
        assert log.bytes("reduce_scatter") == 2 * 72


def test_bytes() -> None:
    spawn(check_bytes, 2)


def check_memory(rank: int, world_size: int, port: int) -> dict[str, int]:
    launch()
    _, model, optimizer = boost(Case(stage=2, precision="bf16", bucket=10**6), Net())
    assert all(p.dtype == torch.bfloat16 for p in model.parameters())
    optimizer.backward(loss_of(model, *batches(1)[0]))
    left = sum(grad.numel() for p in model.parameters() if (grad := own_grad(p)) is not None)
    optimizer.unscale_grad()
    grads = sum(b.grad.numel() for b in optimizer.buckets)
    padding = 8 * len(optimizer.pieces)
    optimizer.step()
    inner = optimizer.unwrap()
    states = sum(t.numel() for s in inner.state.values() for name, t in s.items() if name != "step")
    return {
        "left": left,
        "padding": padding,
        "grads": grads,
        "states": states,
        "model": sum(p.numel() for p in model.parameters() if p.requires_grad),
        "unused": sum(p.numel() for p in model.unused.parameters()),
    }


def test_memory_is_divided_by_the_ranks() -> None:
    ranks = spawn(check_memory, 4)
    model, unused, padding = (ranks[0][name] for name in ("model", "unused", "padding"))
    assert [r["left"] for r in ranks] == [0] * 4  # of stage 2 no gradient stays whole
    assert all(r["grads"] <= (model + padding) / 4 for r in ranks)
    # two moments and a tail for every element, each on one rank; what is not used only has the digits that it
    # lacks
    assert sum(r["states"] for r in ranks) == 3 * (model - unused) + unused
    assert max(r["states"] for r in ranks) <= 3 * (model + padding) / 4


def check_without_reduction(rank: int, world_size: int, port: int) -> None:
    launch()
    real = reducer.start_reduction
    reducer.start_reduction = lambda buffer, layout, group: real(buffer, layout, None)  # each rank for itself
    check_case(Case(stage=2))


def test_the_comparison_sees_a_missing_reduction() -> None:
    with pytest.raises(RankError, match="gradient 0 at step 0"):
        spawn(check_without_reduction, 2)


def check_whole(rank: int, world_size: int, port: int) -> None:
    launch()
    makers: list[Any] = [
        lambda p: FusedLAMB(p, lr=0.01, max_grad_norm=0.1),
        lambda p: Lars(p, lr=0.1, momentum=0.9, weight_decay=0.1),
        lambda p: torch.optim.Adafactor(p, lr=0.01),
    ]
    for make in makers:
        for stage2 in (False, True):
            model, serial = Net(), Net()
            optimizer = LowLevelZeroOptimizer(
                make(model.parameters()), partition_grad=stage2, reduce_bucket_size=50
            )
            plain = make(serial.parameters())
            for batch in batches(3):
                own = [t.chunk(world_size)[rank] for t in batch]
                optimizer.backward(loss_of(model, *own))
                loss_of(serial, *batch).backward()
                optimizer.step()
                plain.step()
                optimizer.zero_grad()
                plain.zero_grad()
            for a, b in zip(model.parameters(), serial.parameters(), strict=True):
                torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
            owned = sum(piece.value.numel() for piece in optimizer.pieces)
            most = max(p.numel() for p in model.parameters())
            assert abs(owned - sum(p.numel() for p in optimizer.trained_parameters()) / world_size) <= most


def test_optimizers_of_whole_parameters() -> None:
    spawn(check_whole, 4)


def check_overflow(rank: int, world_size: int, port: int) -> None:
    launch()
    case = Case(stage=2, precision="fp16", optimizer="sgd")
    booster, model, optimizer = boost(case, Net(), initial_scale=2.0**32, hysteresis=1)
    before = [p.detach().clone() for p in model.parameters()]
    (batch,) = batches(1)
    train_part(case, booster, model, optimizer, batch)
    optimizer.step()
    assert optimizer.step_was_skipped
    assert optimizer.loss_scale == 2.0**31
    assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))
    for _ in range(40):
        optimizer.zero_grad()
        train_part(case, booster, model, optimizer, batch)
        optimizer.step()
    assert not optimizer.step_was_skipped
    assert optimizer.loss_scale < 2.0**20


def test_a_loss_scale_that_is_too_large_comes_down() -> None:
    spawn(check_overflow, 2)


def check_refusals(rank: int, world_size: int, port: int) -> None:
    launch()
    layer = nn.Embedding(4, 3, sparse=True)
    sparse = LowLevelZeroOptimizer(torch.optim.SGD(layer.parameters(), lr=1))
    with pytest.raises(TypeError, match=r"dense gradients, got one in layout torch.sparse_coo .*\(4, 3\)"):
        sparse.backward(layer(torch.tensor([1])).sum())
    model = nn.Linear(3, 3)
    sgd = torch.optim.SGD(model.parameters(), lr=1)
    for wrong, error, message in (
        ({"reduce_bucket_size": 0}, ValueError, "reduce_bucket_size as a number of elements"),
        ({"communication_dtype": torch.int8}, TypeError, "floating-point dtype"),
        ({"growth_factor": 0.5}, ValueError, "growth_factor > 1"),
    ):
        with pytest.raises(error, match=message):
            LowLevelZeroOptimizer(sgd, **wrong)
    with pytest.raises(TypeError, match=r"wraps a torch.optim.Optimizer"):
        LowLevelZeroOptimizer(model)
    with pytest.raises(TypeError, match="cannot cut LBFGS"):
        LowLevelZeroOptimizer(torch.optim.LBFGS(model.parameters()))
    frozen = [nn.Parameter(torch.zeros(2), requires_grad=False)]
    with pytest.raises(ValueError, match="without parameters to train"):
        LowLevelZeroOptimizer(torch.optim.SGD(frozen, lr=1))
    apart = nn.Parameter(torch.zeros(2))
    apart._ddp_to_ignore = True
    with pytest.raises(ValueError, match="left alone by data parallelism"):
        LowLevelZeroOptimizer(torch.optim.SGD([apart], lr=1))
    optimizer = LowLevelZeroOptimizer(torch.optim.SGD([*model.parameters(), *frozen], lr=1))
    with pytest.raises(TypeError, match="does mixed precision itself"):
        LowLevelZeroOptimizer(optimizer)
    optimizer.backward(model(torch.ones(1, 3)).sum())
    frozen[0].requires_grad_()
    with pytest.raises(RuntimeError, match="was frozen when"):
        optimizer.step()
    frozen[0].requires_grad_(False)
    model.weight.data = model.weight.data.clone()
    with pytest.raises(RuntimeError, match="was given new memory"):
        optimizer.step()


def test_refusals() -> None:
    spawn(check_refusals, 2)


def check_failed_pass(rank: int, world_size: int, port: int) -> None:
    launch()
    model = nn.Linear(3, 1)
    optimizer = LowLevelZeroOptimizer(
        torch.optim.SGD(model.parameters(), lr=1), overlap_communication=True, reduce_bucket_size=1
    )

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            raise RuntimeError("a bad pass")

    with pytest.raises(RuntimeError, match="a bad pass"):
        optimizer.backward(model(Fails.apply(torch.ones(1, 3, requires_grad=True))).sum())
    optimizer.zero_grad()
    before = model.weight.detach().clone()
    optimizer.backward(model(torch.full((1, 3), float(rank))).sum())
    optimizer.step()
    torch.testing.assert_close(model.weight, before - 0.5)


def test_after_a_pass_that_failed_everywhere() -> None:
    spawn(check_failed_pass, 2)


def test_one_process_needs_no_groups() -> None:
    assert not dist.is_initialized()
    model, serial = Net(), Net()
    optimizer = LowLevelZeroOptimizer(HybridAdam(model.parameters()), partition_grad=True, clip_grad_norm=0.1)
    plain = HybridAdam(serial.parameters())
    for batch in batches(2):
        optimizer.backward(loss_of(model, *batch))
        loss_of(serial, *batch).backward()
        nn.utils.clip_grad_norm_(serial.parameters(), 0.1)
        optimizer.step()
        plain.step()
        optimizer.zero_grad()
        plain.zero_grad()
    for a, b in zip(model.parameters(), serial.parameters(), strict=True):
        torch.testing.assert_close(a, b)


def check_overlap(rank: int, world_size: int, port: int) -> None:
    launch()
    real = reducer.start_reduction
    for overlap in (False, True):
        events: list[str] = []

        def reduce(buffer: Tensor, layout: Any, group: Any, events: list[str] = events) -> Any:
            events.append("reduce")
            return real(buffer, layout, group)

        reducer.start_reduction = reduce
        model = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(4)))
        for layer in model:
            layer.weight.register_hook(lambda grad, events=events: events.append("gradient"))
        optimizer = LowLevelZeroOptimizer(
            HybridAdam(model.parameters()), overlap_communication=overlap, reduce_bucket_size=64
        )
        optimizer.backward(model(torch.ones(1, 8)).sum())
        if overlap:  # every bucket leaves as soon as its gradient is there
            assert events == ["gradient", "reduce"] * 4
        else:
            assert events == ["gradient"] * 4 + ["reduce"] * 4


def test_buckets_leave_while_the_backward_pass_goes_on() -> None:
    spawn(check_overlap, 2)
