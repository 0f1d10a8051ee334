"""The tensor itself: the page's example, moving between specs, copies, files, refusals."""

from __future__ import annotations

import copy
import io
import itertools
import pickle
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from colossalai.mesh import count_communication, full_shape, placement, unshard
from colossalai.tensor import (
    ColoInitContext,
    ColoParameter,
    ColoTensor,
    ColoTensorSpec,
    ComputePattern,
    ComputeSpec,
    DistSpecManager,
    ProcessGroup,
    ReplicaSpec,
    ShardSpec,
)
from colossalai.testing import fake_world, spawn
from tests.tensor.world import cut, start, whole

SPECS = [ReplicaSpec(), ShardSpec([0], [2]), ShardSpec([1], [2]), ShardSpec([-1], [2])]


def _page_17(rank: int, world_size: int, port: int) -> list[tuple[torch.Size, Tensor]]:
    start(rank, world_size, port)
    pg = ProcessGroup(tp_degree=2, dp_degree=2)
    torch.manual_seed(0)
    local_tensor = torch.randn(2, 3, 1)
    printed = [(local_tensor.shape, local_tensor.data)]
    spec = ColoTensorSpec(
        pg,
        ShardSpec(dims=[-1], num_partitions=[pg.tp_world_size()]),
        ComputeSpec(ComputePattern.TP1D),
    )
    t1 = ColoTensor.from_torch_tensor(local_tensor, spec)
    t1 = t1.to_replicate()
    printed.append((t1.shape, t1.data))
    spec2 = ShardSpec([0], [pg.tp_world_size()])
    t1.set_dist_spec(spec2)
    printed.append((t1.shape, t1.data))
    return printed


def test_the_example_of_page_17() -> None:
    for rank, (first, second, third) in enumerate(spawn(_page_17, 4)):
        assert [shape for shape, _ in (first, second, third)] == [(2, 3, 1), (2, 3, 2), (1, 3, 2)]
        assert type(second[1]) is Tensor
        joined = torch.cat([first[1]] * 2, -1)
        assert torch.equal(second[1], joined)
        assert torch.equal(third[1], joined.chunk(2)[rank % 2])


def _attributes(rank: int, world_size: int, port: int) -> None:
    start(rank, world_size, port)
    pg = ProcessGroup(tp_degree=2)
    t = ColoTensor(torch.arange(6.0).view(3, 2), ColoTensorSpec(pg, ShardSpec([-1], [2])))
    assert (t.shape, t.size_local(), t.size_local(1)) == ((3, 2), (3, 2), 2)
    assert (t.size(), t.size_global(), t.size_global(-1), t.size(1), len(t)) == ((3, 4), (3, 4), 4, 4, 3)
    assert (t.numel(), t.numel_global()) == (6, 12)
    assert (placement(t).state("tp"), full_shape(t)) == (1, (3, 4))
    assert t.dist_spec == ShardSpec([1], [2])
    assert (t.is_sharded(), t.is_replicate(), t.is_shard_1dcol(), t.is_shard_1drow()) == (
        True,
        False,
        True,
        False,
    )
    assert (t.get_tp_world_size(), t.get_dp_world_size()) == (2, 1)
    assert t.get_process_group() is t.process_group is pg
    assert not t.has_compute_spec()
    t.set_tensor_spec(ShardSpec([-1], [2]), ComputeSpec(ComputePattern.TP1D))
    assert t.has_compute_spec()
    assert t.has_compute_pattern(ComputePattern.TP1D)
    assert not t.has_compute_pattern(ComputePattern.TP2D)
    assert not t.is_model_data()
    assert ColoParameter(torch.ones(2)).is_model_data()
    for word in ("size=(3, 4)", "dims=(1,)", "tp_degree=2", "TP1D", f"{t.data}"):
        assert word in repr(t)
    default = ColoTensor(torch.ones(2))
    assert default.is_replicate()
    assert default.get_dp_world_size() == 2
    assert isinstance(default + 1, ColoTensor)  # whole ColoTensors stay ColoTensors
    assert isinstance(ColoParameter(torch.ones(2)) + 1, ColoTensor)

    rows = cut(torch.arange(6.0).view(2, 3), 0, pg)
    assert rows.untyped_storage().nbytes() == 3 * 4  # the rest is not kept
    with DistSpecManager.implicit_gathers():
        assert [row.tolist() for row in rows] == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]
        assert (int(rows[1, 1]), rows.max().item(), 4.0 in rows) == (4, 5.0, True)
    assert rows.contiguous() is rows
    assert rows.type() == "torch.FloatTensor"
    again = ColoParameter(rows)
    assert again.dist_spec == rows.dist_spec
    assert again.data_ptr() == rows.data_ptr()
    for whole_one in (
        ColoTensor(torch.ones(2), ColoTensorSpec(pg)),
        ColoParameter(torch.ones(2), spec=ColoTensorSpec(pg)),
    ):
        assert ColoParameter(whole_one).process_group == pg
    assert type(nn.Parameter(rows)) is ColoTensor  # torch keeps the class
    assert isinstance(nn.Parameter(rows), nn.Parameter)


def test_attributes() -> None:
    spawn(_attributes, 2)


def _moves(rank: int, world_size: int, port: int) -> None:
    """All pairs of specs: values to the bit, gradients, in place and not, recorded and not."""
    start(rank, world_size, port)
    pg = ProcessGroup(tp_degree=2)
    full = torch.randn(4, 6, generator=torch.Generator().manual_seed(1))
    weight = torch.randn(4, 6, generator=torch.Generator().manual_seed(2))
    for src, dst in itertools.product(SPECS, SPECS):
        leaf = ColoTensor(full.clone(), ColoTensorSpec(pg)).requires_grad_()
        leaf.set_dist_spec(src)  # a leaf is stored in another way
        assert leaf.is_leaf
        assert leaf.requires_grad
        for in_place in (False, True):
            leaf.grad = None
            value = leaf * 1
            before = value
            if in_place:
                value.set_dist_spec(dst)
                assert value is before
            else:
                value = value.redistribute(dst)
            assert type(value) is ColoTensor
            assert value.dist_spec == (
                dst if isinstance(dst, ReplicaSpec) else ShardSpec([dst.dims[0] % 2], [2])
            )
            assert torch.equal(unshard(value, value.placement, pg.mesh), full)
            (value.to_replicate() * weight).sum().backward()
            assert leaf.grad is not None
            assert leaf.grad.shape == leaf.shape
            assert torch.equal(unshard(leaf.grad, leaf.placement, pg.mesh), weight), f"{src} to {dst}"
        with DistSpecManager.no_grad():
            assert not leaf.redistribute(dst).requires_grad
            value = leaf * 1
            value.set_dist_spec(dst)
            assert not value.requires_grad or value.dist_spec == leaf.dist_spec
            assert torch.equal(whole(value), full)
            assert nn.functional.softmax(
                leaf, -1
            ).requires_grad  # what functions do by themselves is recorded
        assert (leaf * 1).redistribute(dst).requires_grad


def test_moves_between_specs() -> None:
    spawn(_moves, 2)


def _saved(rank: int, world_size: int, port: int) -> None:
    """Changing a tensor in place that somebody else needs is the error that torch has for it."""
    start(rank, world_size, port)
    pg = ProcessGroup(tp_degree=2)
    t = cut(torch.randn(4, 6).requires_grad_(), 0, pg) * 1
    square = t * t
    t.to_replicate_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        square.to_replicate().sum().backward()
    view = (cut(torch.randn(4, 6).requires_grad_(), 0, pg) * 1).transpose(0, 1)
    with pytest.raises(RuntimeError, match=r"is a view of another one .* t = t\.redistribute"):
        view.to_replicate_()


def test_in_place_conversion_of_a_tensor_in_use() -> None:
    spawn(_saved, 2)


def _other_group(rank: int, world_size: int, port: int) -> None:
    start(rank, world_size, port)
    two, four = ProcessGroup(tp_degree=2), ProcessGroup(tp_degree=4)
    full = torch.randn(4, 8, generator=torch.Generator().manual_seed(1)).requires_grad_()
    t = cut(full, 1, two)
    moved = t.redistribute(ShardSpec([0], [4]), four)
    assert (moved.shape, moved.process_group) == ((1, 8), four)
    assert torch.equal(whole(moved), full.data)
    (moved.to_replicate() * full).sum().backward()
    assert t.grad is not None
    assert torch.equal(unshard(t.grad, t.placement, two.mesh), full.data)
    with pytest.raises(
        ValueError, match=r"shape \(4, 8\) is cut on .*tp_degree=2.*cannot go to .*tp_degree=4.*to_replicate_"
    ):
        t.set_process_group(four)
    assert t.to_replicate_() is t
    assert torch.equal(t.grad, full.data)  # the gradient is stored like the tensor
    t.set_process_group(four)
    t.set_dist_spec(ShardSpec([1], [4]))
    assert torch.equal(whole(t), full.data)
    one = ColoTensor(full.data, ColoTensorSpec(ProcessGroup(), ShardSpec([0], [1])))
    one.set_process_group(two)  # was cut into one piece, which is whole
    assert one.is_replicate()
    assert torch.equal(one.data, full.data)


def test_from_one_process_group_to_another() -> None:
    spawn(_other_group, 4)


BAD_SPECS: list[tuple[Any, type[Exception], str]] = [
    (ShardSpec([2], [2]), ValueError, r"names dim 2 of a tensor of 2 dims, shape \(4, 5\)"),
    (ShardSpec([-3], [2]), ValueError, "names dim -3 of a tensor of 2 dims"),
    (
        ShardSpec([0], [4]),
        ValueError,
        r"asks for 4 pieces, but ProcessGroup.* cuts a tensor into 2: write ShardSpec",
    ),
    (
        ShardSpec([1], [2]),
        ValueError,
        r"dim 1 .*shape \(4, 5\) cannot be cut into 2 equal pieces: .* size of 4 or 6",
    ),
    ("row", TypeError, "a dist spec is a ShardSpec or a ReplicaSpec, got str 'row'"),
]


def _refusals(rank: int, world_size: int, port: int) -> None:
    """Every rank refuses, before any communication, and the tensor stays as it was."""
    start(rank, world_size, port)
    pg = ProcessGroup(tp_degree=2)
    whole_one, rows = cut(torch.randn(4, 5), None, pg), cut(torch.randn(4, 5), 0, pg)
    with count_communication() as log:
        for spec, kind, message in BAD_SPECS:
            for t in (whole_one, rows):
                before = t.data.clone(), t.dist_spec
                for call in (t.set_dist_spec, t.redistribute, lambda s, t=t: t.set_tensor_spec(s, None)):
                    with pytest.raises(kind, match=message):
                        call(spec)
                assert torch.equal(t.data, before[0])
                assert t.dist_spec == before[1]
        with pytest.raises(
            TypeError, match="set_tensor_spec takes a ComputeSpec or None, got ComputePattern"
        ):
            rows.set_tensor_spec(ReplicaSpec(), ComputePattern.TP1D)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="set_process_group takes a ProcessGroup, got int 2"):
            rows.set_process_group(2)  # type: ignore[arg-type]
    assert log.calls() == 0
    assert rows.is_shard_1drow()


def test_refusals() -> None:
    spawn(_refusals, 2)


def test_refusals_without_ranks() -> None:
    for dims, parts in (([], []), ([0, 1], [2, 2]), ([0], [2, 2]), ([0.5], [2])):
        with pytest.raises(
            ValueError, match=r"the tp ranks cut one dim, so (dims|num_partitions) is a list of one integer"
        ):
            ShardSpec(dims, parts)
    with pytest.raises(TypeError, match="ShardSpec takes dims as a list of one integer, got 0"):
        ShardSpec(0, 2)  # type: ignore[arg-type]
    for pattern in (ComputePattern.TP2D, ComputePattern.TP2P5D, ComputePattern.TP3D):
        with pytest.raises(ValueError, match=r"one tensor axis.*colossalai\.nn offer 2D, 2\.5D and 3D"):
            ComputeSpec(pattern)
    with pytest.raises(TypeError, match="ComputeSpec takes a ComputePattern, got '1d'"):
        ComputeSpec("1d")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="ColoTensorSpec takes a ProcessGroup, got int 2"):
        ColoTensorSpec(2)  # type: ignore[arg-type]
    with fake_world(rank=0, world_size=2):
        with pytest.raises(TypeError, match="takes a ComputeSpec or None as compute_attr, got ShardSpec"):
            ColoTensorSpec(ProcessGroup(), ReplicaSpec(), ShardSpec([0], [2]))  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="ColoTensor is made of a tensor, got list"):
            ColoTensor([1, 2])  # type: ignore[arg-type]


def _copies(rank: int, world_size: int, port: int) -> None:
    start(rank, world_size, port)
    pg = ProcessGroup(tp_degree=2)
    full = torch.randn(4, 6)
    param = ColoParameter(full.chunk(2)[rank].clone(), True, ColoTensorSpec(pg, ShardSpec([0], [2])))
    param.compute_spec = ComputeSpec(ComputePattern.TP1D)
    param.compute_spec.set_output_replicate(False)
    param.note = "mine"

    def through_a_file(t: Tensor) -> Any:
        file = io.BytesIO()
        torch.save({"t": t}, file)
        file.seek(0)
        return torch.load(file)["t"]  # weights_only, as is the default

    for make in (copy.deepcopy, lambda t: pickle.loads(pickle.dumps(t)), through_a_file):
        new = make(param)
        assert type(new) is ColoParameter
        assert isinstance(new, torch.nn.Parameter)
        assert torch.equal(new.data, param.data)
        assert new.data_ptr() != param.data_ptr()
        assert (new.dist_spec, new.compute_spec, new.process_group) == (
            param.dist_spec,
            param.compute_spec,
            pg,
        )
        assert new.compute_spec is not param.compute_spec
        assert (new.requires_grad, new.note, new.size()) == (True, "mine", (4, 6))
        activation = make(param.detach())
        assert type(activation) is ColoTensor
        assert activation.dist_spec == param.dist_spec
    tied = copy.deepcopy([param, param])
    assert tied[0] is tied[1]
    with pytest.raises(
        RuntimeError, match=r"only a ColoTensor without history can be copied; call detach\(\) first"
    ):
        copy.deepcopy(param * 2)


def test_copies_and_files() -> None:
    spawn(_copies, 2)


def _gradients(rank: int, world_size: int, port: int) -> None:
    """The three ways to ask for gradients; all give pieces."""
    start(rank, world_size, port)
    pg = ProcessGroup(tp_degree=2)
    t = cut(torch.arange(8.0).view(2, 4).requires_grad_(), 1, pg)
    mine = 2 * t.data
    (t * t).backward(torch.ones(2, 2))
    assert torch.equal(t.grad, mine)
    (grad,) = torch.autograd.grad((t * t).to_replicate().sum(), t)
    assert torch.equal(grad, mine)
    (grad,) = torch.autograd.grad(t * t, [t], cut(torch.ones(2, 4), 1, pg))
    assert torch.equal(grad, mine)
    t.grad = None
    other = cut(torch.ones(2, 4).requires_grad_(), 1, pg)
    torch.autograd.backward((t * t * other).to_replicate().sum(), inputs=[t])
    assert torch.equal(t.grad, mine)
    assert other.grad is None
    leaf = torch.ones(2, 2).requires_grad_()
    inside = ColoTensor(leaf * 3, ColoTensorSpec(pg, ShardSpec([1], [2])))  # a history goes on
    inside.to_replicate().sum().backward()
    assert torch.equal(leaf.grad, torch.full((2, 2), 3.0))
    for make in (ColoTensor, ColoTensor.from_torch_tensor):
        for spec in (ColoTensorSpec(pg, ShardSpec([1], [2])), ColoTensorSpec(pg), None):
            leaf.grad = None
            of_leaf = make(leaf, spec)
            (of_leaf.to_replicate() * 2).sum().backward()
            assert torch.equal(leaf.grad, torch.full((2, 2), 2.0)), spec
            assert not make(leaf.detach(), spec).requires_grad
    with torch.no_grad():
        assert not ColoTensor.from_torch_tensor(leaf).requires_grad


def test_gradients() -> None:
    spawn(_gradients, 2)


def _results(rank: int, world_size: int, port: int) -> None:
    """What functions make of ColoTensors are ColoTensors, cut or whole, also with one tp rank."""
    start(rank, world_size, port)
    functional, generator = nn.functional, torch.Generator().manual_seed(1)
    pg = ProcessGroup(tp_degree=world_size)
    full = torch.randn(4, 6, generator=generator)
    x, bias = torch.randn(2, 6, generator=generator), torch.randn(4, generator=generator)
    whole_one, cut_one = cut(full, None, pg), cut(full, 0, pg)
    shard = ShardSpec([0], [world_size]) if world_size > 1 else ReplicaSpec()
    across = ShardSpec([1], [world_size]) if world_size > 1 else ReplicaSpec()
    weight = ColoParameter(full.clone(), spec=ColoTensorSpec(pg))
    columns = cut(full, 0, pg, False)
    results: list[tuple[Any, Tensor, Any]] = [
        (functional.linear(x, weight, bias), functional.linear(x, full, bias), ReplicaSpec()),
        (functional.linear(x, cut(full, 0, pg, True)), functional.linear(x, full), ReplicaSpec()),
        (functional.linear(x, cut(full, 1, pg, True)), functional.linear(x, full), ReplicaSpec()),
        (functional.linear(x, columns, bias), functional.linear(x, full, bias), across),
        (torch.addmm(bias, x, weight.t()), torch.addmm(bias, x, full.t()), ReplicaSpec()),
        (whole_one.view(2, 12), full.view(2, 12), ReplicaSpec()),
        (cut_one.view(4, 2, 3), full.view(4, 2, 3), shard),
        (whole_one.abs(), full.abs(), ReplicaSpec()),
        (cut_one.abs(), full.abs(), shard),
        (torch.zeros_like(whole_one), torch.zeros(4, 6), ReplicaSpec()),
        (torch.zeros_like(cut_one), torch.zeros(4, 6), cut_one.dist_spec),
        (weight.sum(), full.sum(), ReplicaSpec()),
        (whole_one.max(dim=1).values, full.max(dim=1).values, ReplicaSpec()),
        (torch.cat([whole_one, full]), torch.cat([full, full]), ReplicaSpec()),
        (weight.split(2)[1], full.split(2)[1], ReplicaSpec()),
        (functional.softmax(cut_one, 0), full.softmax(0), ReplicaSpec()),
        (functional.embedding(torch.tensor([0, 3]), columns), full[[0, 3]], ReplicaSpec()),
        (functional.cross_entropy(columns.t(), torch.ones(6).long()), None, ReplicaSpec()),
    ]
    for i, (result, expected, spec) in enumerate(results):
        assert type(result) is ColoTensor, i
        assert (result.process_group, result.dist_spec) == (pg, spec), i
        if expected is not None:
            torch.testing.assert_close(whole(result), expected, msg=lambda m, i=i: f"{i}: {m}")
    assert type(weight.to_replicate()) is type(cut_one.to_replicate()) is ColoTensor
    assert cut_one.to_replicate_().dist_spec == ReplicaSpec()
    # what is made like a parameter is plain memory of its optimizer
    assert type(torch.zeros_like(weight)) is Tensor
    # a plain tensor that is written to stays what it is; a view still is a view for autograd
    plain = torch.zeros(4, 6)
    assert plain.add_(whole_one) is plain
    assert type(plain) is Tensor
    leaf = full.clone().requires_grad_()
    twice = ColoTensor.from_torch_tensor(leaf) * 2
    twice[0].mul_(3)
    twice.sum().backward()
    assert leaf.grad is not None
    assert leaf.grad.tolist() == [[6.0] * 6] + [[2.0] * 6] * 3
    turned = (whole_one * 1).t_().unsqueeze_(0)
    assert turned.size() == turned.shape == (1, 6, 4)
    loss = twice.detach().sum()
    assert f"{loss:.2f}" == f"{loss.item():.2f}"
    assert f"{loss}" == f"{loss.item()}"


def test_results_are_colo_tensors() -> None:
    for world_size in (1, 2):
        spawn(_results, world_size)


def _alone(rank: int, world_size: int, port: int) -> None:
    """A function that needs the whole of a tensor is refused where one rank calls it alone; none waits."""
    start(rank, world_size, port)
    pg = ProcessGroup(tp_degree=2)
    full = torch.arange(32.0).view(4, 8)
    t = cut(full, 0, pg)
    param = ColoParameter(t.data.clone(), spec=t.spec())
    other = cut(full, 1, pg)
    with count_communication() as log:
        if rank == 0:
            calls: list[Any] = [
                lambda: torch.testing.assert_close(t, cut_alike),
                lambda: torch.equal(t, t),
                lambda: t.sum(),
                lambda: param.norm(),
                lambda: t[1].tolist(),
                lambda: bool((t == t).all()),
                lambda: t + other,
                lambda: torch.zeros(4, 8).copy_(t),
                lambda: torch.cat([t, t]),
                lambda: t.tolist(),
            ]
            cut_alike = ColoTensor(t.data.clone(), t.spec())
            for call in calls:
                with pytest.raises(RuntimeError) as caught:
                    call()
                error = caught.value.__cause__ or caught.value  # assert_close puts words of its own around it
                words = r"needs the whole of a tensor of shape \(4, 8\).*wait for the ranks \[0, 1\]\. Call"
                assert re.search(words, str(error)), error
            assert str(t.shape) in repr(t) or repr(t)
            assert t.data.sum() == full[:2].sum()
    assert log.calls() == 0
    torch.testing.assert_close(t.to_replicate().data, full)  # the ranks are in step
    with DistSpecManager.implicit_gathers():
        assert t.sum().item() == full.sum().item()
        assert torch.equal(t + other, full * 2)
    with pytest.raises(RuntimeError, match="sum needs the whole"):
        t.sum()


def test_one_rank_alone_does_not_wait() -> None:
    spawn(_alone, 2)


def _specs(rank: int, world_size: int, port: int) -> None:
    start(rank, world_size, port)
    pg, compute = ProcessGroup(tp_degree=2), ComputeSpec(ComputePattern.TP1D)
    t = cut(torch.randn(4, 6), 1, pg)
    before = t.data.clone()
    t.set_tensor_spec(dist_spec=None, compute_spec=compute)
    assert t.compute_spec is compute
    assert t.is_shard_1dcol()
    assert torch.equal(t.data, before)
    t.set_tensor_spec(ShardSpec([0], [2]))
    assert t.compute_spec is compute
    assert t.is_shard_1drow()
    with pytest.raises(TypeError, match="a dist spec is a ShardSpec or a ReplicaSpec, got NoneType"):
        t.set_dist_spec(None)  # type: ignore[arg-type]


def test_none_keeps_a_spec() -> None:
    spawn(_specs, 2)


def _built_before_launch(rank: int, world_size: int, port: int) -> None:
    torch.manual_seed(0)
    with ColoInitContext():
        model = nn.Linear(4, 6)
    before = ColoTensor(torch.ones(2, 4))
    assert model.weight.process_group == before.process_group
    assert "all ranks of the job" in repr(model.weight)
    assert model.weight.get_tp_world_size() == 1
    expected = model(before).data.clone()
    copied = pickle.loads(pickle.dumps(copy.deepcopy(model)))
    with pytest.raises(RuntimeError, match=r"call colossalai\.launch first"):
        model.weight.get_dp_world_size()
    with pytest.raises(RuntimeError, match=r"call colossalai\.launch first"):
        ProcessGroup()
    start(rank, world_size, port)
    assert model.weight.process_group == copied.weight.process_group == ProcessGroup()
    assert model.weight.get_dp_world_size() == 2
    pg = ProcessGroup(tp_degree=2)
    for param in model.parameters():
        param.set_process_group(pg)
        param.set_tensor_spec(ShardSpec([0], [2]), ComputeSpec(ComputePattern.TP1D))
    torch.testing.assert_close(model(torch.ones(2, 4)).data, expected)


def test_init_context_before_launch() -> None:
    spawn(_built_before_launch, 2)
