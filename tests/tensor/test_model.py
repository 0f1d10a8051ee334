"""Models of ColoParameters: construction, states, optimizers, gradient norms, torch's DDP."""

from __future__ import annotations

import contextlib
import copy
import io
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import colossalai.utils.model.colo_init_context
import colossalai.zero
from colossalai.mesh import clip_grads, unshard
from colossalai.nn.optimizer import CPUAdam, FusedAdam, FusedSGD, HybridAdam, Lamb
from colossalai.nn.parallel import ColoDDP
from colossalai.tensor import (
    ColoInitContext,
    ColoParameter,
    ColoTensor,
    ColoTensorSpec,
    DistSpecManager,
    ProcessGroup,
    ReplicaSpec,
    ShardSpec,
    convert_parameter,
    full_state_dict,
    load_full_state_dict,
    named_params_with_colotensor,
    post_process_colo_init_ctx,
)
from colossalai.testing import RankError, spawn
from colossalai.testing.parity import Problem, assert_equal_to_serial
from colossalai.utils.memory.live_bytes import LiveBytes
from tests.tensor.gpt2 import ColoRun
from tests.tensor.net import HIDDEN, PLANS, build, lay_out, loss, problem
from tests.tensor.world import start, whole


def plan(problem: Problem, plan: str, tp: int) -> ColoRun:
    colossalai.launch_from_torch(config={}, backend="gloo", verbose=False)
    with ColoInitContext():
        model = problem.build()
    pg = ProcessGroup(tp_degree=tp)
    lay_out(model, pg, plan)
    return ColoRun(problem, model, pg)


@pytest.mark.parametrize(("name", "nprocs", "tp"), [("megatron", 2, 2), ("hidden", 4, 2), ("nothing", 2, 2)])
def test_plan_equals_serial(name: str, nprocs: int, tp: int) -> None:
    assert_equal_to_serial(problem, partial(plan, plan=name, tp=tp), nprocs)


def _forgetful(problem: Problem) -> ColoRun:
    run = plan(problem, "megatron", 2)
    from colossalai.mesh import Layout

    Layout.dual = lambda self: self  # type: ignore[method-assign]
    return run


def test_the_check_catches_a_broken_dual() -> None:
    with pytest.raises(RankError, match=r"gradient at step 0|cannot go from"):
        assert_equal_to_serial(problem, _forgetful, 2)


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.1),
    "adam foreach": partial(torch.optim.Adam, lr=1e-2, eps=1e-4, foreach=True),
    "adamw fused": partial(torch.optim.AdamW, lr=1e-2, eps=1e-4, fused=True),
    "adagrad": partial(torch.optim.Adagrad, lr=1e-2, eps=1e-4),
    "FusedAdam": partial(FusedAdam, lr=1e-2, eps=1e-4),
    "HybridAdam": partial(HybridAdam, lr=1e-2, eps=1e-4),
    "CPUAdam": partial(CPUAdam, lr=1e-2, eps=1e-4),
    "FusedSGD": partial(FusedSGD, lr=0.1, momentum=0.9),
}


def _optimizers(rank: int, world_size: int, port: int) -> None:
    from colossalai.testing.parity import check_plan

    start(rank, world_size, port)
    pg = ProcessGroup(tp_degree=2)

    def run(problem: Problem) -> ColoRun:
        with ColoInitContext():
            model = problem.build()
        lay_out(model, pg, "megatron")
        return ColoRun(problem, model, pg)

    for name, make in OPTIMIZERS.items():
        try:
            check_plan(problem(make), run)
        except Exception as error:
            raise AssertionError(f"{name}: {error}") from error


def test_optimizers() -> None:
    spawn(_optimizers, 2)


def _half_precision(rank: int, world_size: int, port: int) -> None:
    """Masters are pieces too; optimizers that look at whole parameters refuse those that are cut."""
    start(rank, world_size, port)
    pg, ids = ProcessGroup(tp_degree=2), torch.arange(10).view(2, 5)
    for make in (FusedAdam, HybridAdam, CPUAdam):
        losses = []
        for plan in (None, "nothing", "megatron"):
            model = build().bfloat16()
            if plan is not None:
                post_process_colo_init_ctx(model, dtype=torch.bfloat16)
                lay_out(model, pg, plan)
            optimizer = make([p for p in model.parameters() if p.requires_grad], lr=1e-2, eps=1e-4)
            for _ in range(5):
                optimizer.zero_grad()
                value = loss(model, ids)
                value.backward()
                optimizer.step()
            losses.append(value.item())
        assert losses[0] == losses[1]
        assert losses[2] == pytest.approx(losses[0], rel=0.02)
        assert losses[0] < 2.0
    with pytest.raises(RuntimeError, match="Lamb needs the norm of whole parameters"):
        Lamb(model.parameters(), lr=1e-2).step()


def test_optimizers_in_half_precision() -> None:
    spawn(_half_precision, 2)


def _lost_writes(rank: int, world_size: int, port: int) -> None:
    """A view of a gathered copy can be read; what would be written there is refused."""
    start(rank, world_size, port)
    pg = ProcessGroup(tp_degree=2)
    full = torch.arange(12.0).view(4, 3)
    weight = ColoParameter(full.chunk(2)[rank].clone(), spec=ColoTensorSpec(pg, ShardSpec([0], [2])))
    with torch.no_grad(), DistSpecManager.implicit_gathers():
        for view in (weight[1], weight[1:3][0], weight.flatten()[3:6], weight.narrow(0, 1, 1).view(-1)):
            assert torch.equal(view.data, full[1])
            for write in (
                lambda v: v.fill_(0.0),
                lambda v: v.add_(1.0),
                lambda v: v.copy_(torch.zeros(3)),
                lambda v: v.normal_(),
                lambda v: torch._foreach_mul_([v], 2.0),
            ):
                with pytest.raises(
                    RuntimeError, match=r"writes into a view of a tensor that is cut.*t\.data"
                ):
                    write(view)
        assert type(weight[1] * 2) is ColoTensor
        (weight[1] * 2).add_(1)  # memory of its own
        weight[:, 1].zero_()  # each rank has its part of this view
    full[:, 1] = 0
    assert torch.equal(whole(weight), full)
    with DistSpecManager.implicit_gathers(), pytest.raises(RuntimeError, match=r"view of a leaf"):
        weight[:, 1].add_(1)  # with gradients autograd refuses such writes


def test_lost_writes() -> None:
    spawn(_lost_writes, 2)


def _clipping(rank: int, world_size: int, port: int) -> None:
    start(rank, world_size, port)
    pg, ids = (
        ProcessGroup(tp_degree=2),
        torch.randint(0, 10, (4, 6), generator=torch.Generator().manual_seed(1)),
    )
    serial, model = build(), build()
    post_process_colo_init_ctx(model)
    lay_out(model, pg, "megatron")
    for m in (serial, model):
        (100 * loss(m, ids)).backward()
    for norm_type in (2.0, float("inf")):
        expected = nn.utils.clip_grad_norm_(serial.parameters(), 1.0, norm_type)
        torch.testing.assert_close(clip_grads(model.parameters(), 1.0, pg.mesh, norm_type), expected)
        for a, b in zip(serial.parameters(), model.parameters(), strict=True):
            if a.grad is not None:
                torch.testing.assert_close(unshard(b.grad, b.placement, pg.mesh), a.grad)


def test_clipping() -> None:
    spawn(_clipping, 2)


def _check_memory(pg: ProcessGroup) -> None:
    """Beside its pieces, a rank has memory for one weight of the constructors."""
    sizes = [80] * 8
    torch.manual_seed(0)
    serial = nn.Sequential(*(nn.Linear(size, size) for size in sizes))
    torch.manual_seed(0)
    with LiveBytes() as live, ColoInitContext(default_pg=pg, default_dist_spec=ShardSpec([-1], [2])):
        model = nn.Sequential(*(nn.Linear(size, size) for size in sizes))
    weight = serial[0].weight.nbytes  # type: ignore[union-attr]
    assert live.peak < len(sizes) / 2 * weight + 2 * weight
    for (name, a), (_, b) in zip(serial.named_parameters(), model.named_parameters(), strict=True):
        assert torch.equal(whole(b), a), name


def _contexts(rank: int, world_size: int, port: int) -> None:
    start(rank, world_size, port)
    serial, pg = build(), ProcessGroup(tp_degree=2)
    original = nn.Module.__init__
    for spec in (None, ReplicaSpec(), ShardSpec([-1], [2])):
        for dtype in (torch.float, torch.bfloat16):
            with ColoInitContext(device="cpu", dtype=dtype, default_pg=pg, default_dist_spec=spec):
                model = build()
            assert nn.Module.__init__ is original
            assert all(type(p) is ColoParameter for p in model.parameters())
            assert model.head.weight is model.table.weight
            assert not model.frozen.requires_grad
            assert model.scale.dtype == torch.float
            for (name, a), (_, b) in zip(serial.named_parameters(), model.named_parameters(), strict=True):
                assert torch.equal(whole(b), a.to(dtype)), name
                assert b.is_sharded() == isinstance(spec, ShardSpec)
                assert b.process_group == pg
    with ColoInitContext(default_pg=pg) as context:
        first, second = nn.Linear(2, 2), nn.Linear(2, 2)
        with ColoInitContext():
            inner = nn.Linear(2, 2)
        clones = nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 8), 2)  # made by deepcopy
    assert not context._built
    assert inner.weight.process_group == ProcessGroup()  # the innermost context decides
    for module in (first, second, clones):
        assert all(p.process_group == pg for p in module.parameters())
    _check_memory(pg)
    with contextlib.suppress(ZeroDivisionError), ColoInitContext():
        broken = nn.Linear(2, 2)
        _ = 1 / 0
    assert type(broken.weight) is nn.Parameter
    assert nn.Module.__init__ is original
    marked = nn.Linear(2, 2)
    marked.weight.note = "mine"
    post_process_colo_init_ctx(marked, "cpu", torch.double, pg)
    assert marked.weight.note == "mine"
    assert marked.weight.dtype == torch.double
    same = marked.weight
    post_process_colo_init_ctx(marked)
    assert marked.weight is same
    odd = nn.Linear(4, 3)
    with pytest.raises(
        ValueError, match=r"parameter 'bias' of Linear: dim -1 .*shape \(3,\) cannot be cut into 2 equal"
    ):
        post_process_colo_init_ctx(odd, default_pg=pg, default_dist_spec=ShardSpec([-1], [2]))
    assert type(odd.weight) is nn.Parameter  # nothing is changed before all is checked


def test_contexts() -> None:
    spawn(_contexts, 2)


def test_documented_import_paths() -> None:
    assert colossalai.utils.model.colo_init_context.ColoInitContext is ColoInitContext
    assert colossalai.zero.ColoInitContext is ColoInitContext


def _states(rank: int, world_size: int, port: int) -> None:
    start(rank, world_size, port)
    pg, serial = ProcessGroup(tp_degree=2), build()
    models = {name: build() for name in PLANS}
    for name, model in models.items():
        post_process_colo_init_ctx(model)
        lay_out(model, pg, name)
        with torch.no_grad():
            for p in model.parameters():
                p.add_(1.0)
    state = copy.deepcopy(full_state_dict(models["megatron"]))
    assert {n: (type(t), t.shape) for n, t in state.items()} == {
        n: (Tensor, t.shape) for n, t in serial.state_dict().items()
    }
    serial.load_state_dict(state)
    for model in models.values():  # from any plan to any other
        with torch.no_grad():
            for p in model.parameters():
                p.zero_()
        load_full_state_dict(model, state)
        for name, value in full_state_dict(model).items():
            assert torch.equal(value, serial.state_dict()[name]), name
    cut_model = models["megatron"]
    file = io.BytesIO()
    torch.save(cut_model.state_dict(), file)  # each rank its own pieces
    file.seek(0)
    fresh = build()
    post_process_colo_init_ctx(fresh)
    lay_out(fresh, pg, "megatron")
    fresh.load_state_dict(torch.load(file))
    for a, b in zip(cut_model.parameters(), fresh.parameters(), strict=True):
        assert torch.equal(a.data, b.data)
    with pytest.raises(ValueError, match=r"'up.weight' has shape \(3, 3\) and must have \(32, 8\)"):
        load_full_state_dict(cut_model, {"up.weight": torch.zeros(3, 3)}, strict=False)
    with pytest.raises(RuntimeError, match="Missing key"):
        load_full_state_dict(cut_model, {})
    cut_model.up.weight.data.zero_()
    with torch.no_grad():
        cut_model.up.weight.copy_(serial.up.weight)  # a whole tensor fills all pieces
    assert torch.equal(whole(cut_model.up.weight), serial.up.weight)
    cut_model.double()
    assert type(cut_model.up.weight) is ColoParameter
    assert cut_model.up.weight.dtype == torch.double
    assert cut_model.up.weight.is_shard_1drow()


def test_states() -> None:
    spawn(_states, 2)


def _ddp(rank: int, world_size: int, port: int) -> None:
    """torch's own DDP averages over the dp ranks."""
    start(rank, world_size, port)
    pg, ids = (
        ProcessGroup(tp_degree=2),
        torch.randint(0, 10, (4, 6), generator=torch.Generator().manual_seed(1)),
    )
    serial, model = build(), build()
    post_process_colo_init_ctx(model)
    lay_out(model, pg, "megatron")
    wrapped = nn.parallel.DistributedDataParallel(model, process_group=pg.dp_process_group())
    loss(serial, ids).backward()
    loss(wrapped, ids.chunk(2)[pg.dp_local_rank()]).backward()
    for (name, a), b in zip(serial.named_parameters(), model.parameters(), strict=True):
        if a.grad is not None:
            torch.testing.assert_close(
                unshard(b.grad, b.placement, pg.mesh), a.grad, msg=lambda m, n=name: f"{n}: {m}"
            )
    assert dist.get_world_size(pg.dp_process_group()) == 2
    for rebuild_bucket in (True, False):
        _check_colo_ddp(pg, rebuild_bucket)
    _check_missing_gradients(pg)
    with pytest.raises(TypeError, match=r"ColoDDP takes a colossalai.tensor.ProcessGroup .* got str: 'dp'"):
        ColoDDP(build(), "dp")


class Checkpointed(nn.Module):
    """One of two layers, behind a reentrant checkpoint: its backward pass lies inside another."""

    def __init__(self, unused: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.unused = unused

    def forward(self, x: Tensor) -> Tensor:
        x = torch.utils.checkpoint.checkpoint(self.first, x.requires_grad_(), use_reentrant=True)
        return x if self.unused else self.second(x)


def _check_missing_gradients(pg: ProcessGroup) -> None:
    """A backward pass without some gradients is refused by both calls, before a step uses the others."""
    x = torch.full((2, 4), 1.0 + pg.dp_local_rank())
    for backward in (lambda model, loss: loss.backward(), lambda model, loss: model.backward(loss)):
        wrapped = ColoDDP(Checkpointed(unused=True), pg)
        with pytest.raises(RuntimeError, match=r"2 parameters have got no gradient .*second.weight.*rebuild"):
            backward(wrapped, wrapped(x.clone()).sum())
    wrapped = ColoDDP(Checkpointed(unused=False), pg)
    for _ in range(2):
        wrapped.zero_grad()
        wrapped(x.clone()).sum().backward()
        both = [torch.empty(4, 4) for _ in range(2)]
        dist.all_gather(both, wrapped.module.first.weight.grad, group=pg.dp_process_group())
        assert torch.equal(*both)
    assert type(wrapped.module) is Checkpointed


def _check_colo_ddp(pg: ProcessGroup, rebuild_bucket: bool) -> None:
    """Three steps are those of the serial model; ignored parameters keep what this rank has computed."""
    generator = torch.Generator().manual_seed(1)
    batches = [torch.randint(0, 10, (4, 6), generator=generator) for _ in range(3)]
    serial, model = build(), build()
    post_process_colo_init_ctx(model)
    lay_out(model, pg, "megatron")
    model.up.bias.data.add_(pg.dp_local_rank())  # all take the first one's, but of what is ignored
    model.norm.weight.data.mul_(1 + pg.dp_local_rank())
    ColoDDP.set_params_to_ignore([model.norm.weight])
    with pytest.raises(TypeError, match=r"takes parameters, got str 'norm.weight'; pass \[model.get_param"):
        ColoDDP.set_params_to_ignore(["norm.weight"])  # type: ignore[list-item]
    wrapped = ColoDDP(model, pg, bucket_cap_mb=1, rebuild_bucket=rebuild_bucket)
    assert isinstance(wrapped, nn.Module)
    assert list(wrapped.state_dict()) == list(serial.state_dict())
    assert model.norm.weight[0] == 1 + pg.dp_local_rank()
    with pytest.raises(RuntimeError, match=r"belongs to a ColoDDP already.*before ColoDDP"):
        ColoDDP.set_params_to_ignore([model.up.weight])
    with torch.no_grad():
        model.norm.weight.fill_(1.0)
    own = [ids.chunk(2)[pg.dp_local_rank()] for ids in batches]
    serial.norm.weight.requires_grad_(False)  # it would be averaged
    first, second = (
        torch.optim.SGD([p for p in m.parameters() if p.requires_grad], lr=0.1) for m in (serial, model)
    )
    for ids, mine in zip(batches, own, strict=True):
        first.zero_grad()
        second.zero_grad()
        expected, found = loss(serial, ids), loss(wrapped, mine)
        expected.backward()
        wrapped.backward(found)
        model.norm.weight.grad = None
        for (name, a), b in zip(serial.named_parameters(), model.parameters(), strict=True):
            if a.grad is not None:
                torch.testing.assert_close(
                    unshard(b.grad, b.placement, pg.mesh), a.grad, msg=lambda m, n=name: f"{n}: {m}"
                )
        first.step()
        second.step()
    for (name, a), b in zip(serial.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(whole(b), a.data, msg=lambda m, n=name: f"{n}: {m}")
    loss(wrapped, own[0]).backward()
    both = [torch.empty(HIDDEN) for _ in range(2)]
    dist.all_gather(both, model.norm.weight.grad, group=pg.dp_process_group())
    assert not torch.equal(*both)  # each rank its own


def test_torch_ddp() -> None:
    spawn(_ddp, 4)


def _names(rank: int, world_size: int, port: int) -> None:
    start(rank, world_size, port)
    pg = ProcessGroup(tp_degree=2)
    model: Any = build()
    model.up.extra = ColoTensor(torch.ones(2), ColoTensorSpec(pg))
    names = [name for name, _ in named_params_with_colotensor(model)]
    assert sorted(names) == sorted([*(n for n, _ in model.named_parameters()), "up.extra"])
    assert [n for n, _ in named_params_with_colotensor(model.up, "here", recurse=False)] == [
        "here.weight",
        "here.bias",
        "here.extra",
    ]
    before = model.up.weight
    new = convert_parameter(model.up, "weight", ColoTensorSpec(pg))
    assert model.up.weight is new
    assert type(new) is ColoParameter
    assert new.data_ptr() == before.data_ptr()
    with pytest.raises(ValueError, match="Linear has no parameter 'wait'; it has weight, bias"):
        convert_parameter(model.up, "wait")


def test_names_and_conversion() -> None:
    spawn(_names, 2)
