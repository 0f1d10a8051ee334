"""The tensor itself: the page's example, moving between specs, copies, files, refusals."""

from __future__ import annotations

import copy
import io
import itertools
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from colossalai.mesh import count_communication, full_shape, placement, unshard
from colossalai.tensor import (
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
    assert type(ColoParameter(torch.ones(2)) + 1) is Tensor  # what is computed from whole parameters is plain

    rows = cut(torch.arange(6.0).view(2, 3), 0, pg)
    assert rows.untyped_storage().nbytes() == 3 * 4  # the rest is not kept
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
        leaf = ColoTensor(full.clone().requires_grad_(), ColoTensorSpec(pg))
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
            assert leaf.softmax(-1).requires_grad  # what functions do by themselves is recorded
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
        square.sum().backward()


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
    (None, TypeError, "a dist spec is a ShardSpec or a ReplicaSpec, got NoneType"),
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
    (grad,) = torch.autograd.grad((t * t).sum(), t)
    assert torch.equal(grad, mine)
    (grad,) = torch.autograd.grad(t * t, [t], cut(torch.ones(2, 4), 1, pg))
    assert torch.equal(grad, mine)
    t.grad = None
    other = cut(torch.ones(2, 4).requires_grad_(), 1, pg)
    torch.autograd.backward((t * t * other).sum(), inputs=[t])
    assert torch.equal(t.grad, mine)
    assert other.grad is None
    leaf = torch.ones(2, 2).requires_grad_()
    inside = ColoTensor(leaf * 3, ColoTensorSpec(pg, ShardSpec([1], [2])))  # a history goes on
    inside.sum().backward()
    assert torch.equal(leaf.grad, torch.full((2, 2), 3.0))


def test_gradients() -> None:
    spawn(_gradients, 2)
