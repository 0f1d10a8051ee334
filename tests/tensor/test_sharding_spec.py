"""Sharding specs, their conversion, and the documented table of the heuristic."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from colossalai.device import DeviceMesh
from colossalai.tensor.comm_spec import CollectiveCommPattern, CommSpec
from colossalai.tensor.conversion import convert
from colossalai.tensor.d_tensor import Layout, LayoutConverter
from colossalai.tensor.d_tensor import ShardingSpec as BareShardingSpec
from colossalai.tensor.shape_consistency import (
    ShapeConsistencyManager,
    ShapeConsistencyOptions,
    set_shape_consistency_options,
    to_global,
)
from colossalai.tensor.sharding_spec import (
    ALLGATHER_COST,
    SHARD_COST,
    STEP_PENALTY,
    DuplicatedShardingDimensionError,
    ShardingNotDivisibleError,
    ShardingOutOfIndexError,
    ShardingSpec,
    ShardingSpecException,
    _DimSpec,
)
from colossalai.testing import spawn
from tests.mesh.test_cheapest_route import layouts_of
from tests.mesh.world import start

GRID = DeviceMesh(torch.arange(16), mesh_shape=(4, 4), mesh_alpha=[1e-5, 1e-5], mesh_beta=[1e-9, 1e-10])
SHAPE = (1024, 512, 256)
NOTHING = {"forward": 0.0, "backward": 0.0, "total": 0.0}


def spec(text: str, grid: DeviceMesh = GRID, shape: tuple[int, ...] = SHAPE) -> ShardingSpec:
    return ShardingSpec(grid, shape, sharding_sequence=text)


def test_both_forms_are_one_class() -> None:
    assert BareShardingSpec is ShardingSpec
    on_mesh = ShardingSpec(GRID, SHAPE, {0: [0, 1]})
    assert str(on_mesh) == str(ShardingSpec(3, {0: [0, 1]})) == "S01RR"
    assert on_mesh == spec("S01RR") == ShardingSpec(GRID, SHAPE, None, [_DimSpec([0, 1]), "R", "R"])
    assert on_mesh.dim_partition_dict == {0: [0, 1]}
    assert on_mesh.sharding_sequence == on_mesh.convert_dict_to_shard_sequence() == ["S01", "R", "R"]
    assert on_mesh.get_sharded_shape_per_device() == (64, 512, 256)
    assert str(ShardingSpec(dim_size=2, sharding_sequence="RS0", partial=[1])) == "RS0 P1"
    with pytest.raises(ShardingSpecException, match="has no grid of devices"):
        ShardingSpec(2).get_sharded_shape_per_device()


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"dim_partition_dict": {3: [0]}}, ShardingOutOfIndexError, "names dim 3; the tensor has the dims 0"),
        ({"dim_partition_dict": {0: [2]}}, ShardingOutOfIndexError, "uses axis 2; the grid of shape"),
        ({"sharding_sequence": "S0R"}, ShardingOutOfIndexError, "describes 2 dims, the tensor has 3"),
        (
            {"dim_partition_dict": {0: [0], 1: [0]}},
            DuplicatedShardingDimensionError,
            "axis 0 of the grid twice",
        ),
        ({"sharding_sequence": "S0RR", "partial": [0]}, DuplicatedShardingDimensionError, "axis 0"),
        ({"entire_shape": (63, 4, 4), "sharding_sequence": "S0RR"}, ShardingNotDivisibleError, "of size 63"),
        ({"dim_partition_dict": {1: 0}}, ShardingSpecException, r"got 0 for dim 1; write \{1: \[0\]\}"),
        ({"sharding_sequence": "X0RR"}, ShardingSpecException, "not a sequence of R and S"),
        ({"sharding_sequence": "RRR", "dim_partition_dict": {}}, ShardingSpecException, "not both"),
    ],
)
def test_specs_that_are_refused(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        ShardingSpec(**{"device_mesh": GRID, "entire_shape": SHAPE, **arguments})


# The rows of the documented table: the source, and what each kind of step leads to.  In the second, the page
# leaves out the cut that leads back to the first (S01RR).
TABLE = [
    ("S01RR", {"S0RR"}, set(), {"S0RS1", "S0S1R"}, "S0RR"),
    ("S0RR", {"RRR"}, {"S0S1R", "S0RS1", "S01RR"}, {"RS0R", "RRS0"}, "RS0R"),
    ("RS0R", {"RRR"}, {"RS01R", "S1S0R", "RS0S1"}, {"S0RR", "RRS0"}, "RS01R"),
]


@pytest.mark.parametrize(("source", "gathered", "cut", "exchanged", "best"), TABLE)
def test_documented_table(
    source: str, gathered: set[str], cut: set[str], exchanged: set[str], best: str
) -> None:
    manager, start_spec, target = ShapeConsistencyManager(), spec(source), spec("RS01R")
    assert {str(s) for s in manager.get_all_all_gather_spec(start_spec, NOTHING)} == gathered
    assert {str(s) for s in manager.get_all_shard_spec(start_spec, NOTHING)} == cut
    assert {str(s) for s in manager.get_all_all_to_all_spec(start_spec, NOTHING)} == exchanged
    steps = manager.get_all_one_step_transform_spec(start_spec, NOTHING)
    assert {str(s) for s in steps} == gathered | cut | exchanged
    assert str(min(steps, key=lambda s: s.sharding_sequence_difference(target))) == best


def test_documented_path() -> None:
    manager = ShapeConsistencyManager()
    before = manager.options
    set_shape_consistency_options(ShapeConsistencyOptions(search="greedy"))
    try:
        path, actions, greedy = manager.shape_consistency(spec("S01RR"), spec("RS01R"))
    finally:
        set_shape_consistency_options(before)
    assert [str(s) for s in path] == ["S01RR", "S0RR", "RS0R", "RS01R"]
    patterns = [action.comm_pattern.name.split("_")[0] for action in actions]
    assert patterns == ["GATHER", "ALL2ALL", "SPLIT"]
    path, actions, shortest = manager.shape_consistency(spec("S01RR"), spec("RS01R"))
    assert shortest["total"] < greedy["total"] / 2
    assert {action.comm_pattern for action in actions} == {CollectiveCommPattern.ALL2ALL_FWD_ALL2ALL_BWD}
    assert manager.shape_consistency(spec("S01RR"), spec("RS01R"))[0] == path
    assert (spec("S01RR"), spec("RS01R"), "shortest", False) in manager.cached_spec_pairs_transform_path


CUBE = DeviceMesh(
    torch.arange(8), mesh_shape=(2, 2, 2), mesh_alpha=[1e-5, 2e-5, 1e-6], mesh_beta=[1e-9, 1e-10, 3e-10]
)


@pytest.mark.parametrize(
    ("grid", "ndim", "every"),
    [
        (GRID, 2, 1),
        (GRID, 3, 1),
        (GRID, 4, 3),
        (CUBE, 2, 7),
        (CUBE, 3, 97),
        *(
            pytest.param(grid, ndim, 1, marks=pytest.mark.slow)
            for grid, ndim in [(GRID, 4), (CUBE, 2), (CUBE, 3), (CUBE, 4)]
        ),
    ],
)
def test_the_shortest_way_never_costs_more_than_the_heuristic(
    grid: DeviceMesh, ndim: int, every: int
) -> None:
    whole = ShardingSpec(grid, (1024,) * ndim)
    axes = tuple(map(str, range(len(grid.shape))))
    specs = [whole.with_layout(layout) for layout in layouts_of(axes, ndim)]
    better = 0
    for source, target in list(itertools.product(specs, repeat=2))[::every]:
        shortest, greedy = convert(source, target), convert(source, target, "greedy")
        assert greedy.path[-1] == shortest.path[-1] == target
        costs = [way.cost() for way in (shortest, greedy)]
        assert costs[0]["forward"] <= costs[1]["forward"] * (1 + 1e-9)
        assert costs[0]["backward"] <= costs[1]["backward"] * (1 + 1e-9)
        better += costs[0]["forward"] < costs[1]["forward"] * (1 - 1e-9)
    assert better > len(specs) / every


def test_costs_of_one_step() -> None:
    gather = CommSpec(
        CollectiveCommPattern.GATHER_FWD_SPLIT_BWD, spec("S0RR"), gather_dim=0, logical_process_axis=0
    )
    nbytes = 1024 * 512 * 256 * 4
    assert gather.get_comm_cost() == pytest.approx(
        {"forward": 1e-5 + 0.75 * nbytes * 1e-9, "backward": 0, "total": 1e-5 + 0.75 * nbytes * 1e-9}
    )
    before = {"forward": 1.0, "backward": 2.0, "total": 3.0}
    ((after, (_, cost)),) = ShapeConsistencyManager().get_all_all_gather_spec(spec("S0RR"), before).items()
    assert str(after) == "RRR"
    assert cost == pytest.approx({key: before[key] + value for key, value in gather.get_comm_cost().items()})
    assert ShapeConsistencyManager().mem_cost([gather]) == pytest.approx(
        {"forward": nbytes * 1.25, "backward": nbytes * 1.25, "total": nbytes * 1.25}
    )
    only = CommSpec(CollectiveCommPattern.SPLIT_FWD_GATHER_BWD, spec("RRR"), None, 1, 0, forward_only=True)
    assert only.get_comm_cost() == NOTHING
    assert str(only.get_sharding_spec_after()) == "RS0R"


def test_mixed_gather() -> None:
    steps = ShapeConsistencyManager().get_all_mix_gather_spec(spec("S01RR"), NOTHING)
    ((after, (action, cost)),) = steps.items()
    assert str(after) == "RRR"
    assert action.mix_gather
    assert cost["forward"] > 0
    assert ShapeConsistencyManager().get_all_mix_gather_spec(spec("S0S1R"), NOTHING) == {}


@pytest.mark.parametrize(
    ("pattern", "arguments", "message"),
    [
        ("GATHER_FWD_SPLIT_BWD", {"gather_dim": 1, "logical_process_axis": 0}, "innermost cuts of dim 1"),
        ("GATHER_FWD_SPLIT_BWD", {"gather_dim": 0}, "needs logical_process_axis"),
        (
            "SPLIT_FWD_GATHER_BWD",
            {"shard_dim": 0, "logical_process_axis": 1, "mix_gather": True},
            "does not fit",
        ),
    ],
)
def test_collectives_that_are_refused(pattern: str, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ShardingSpecException, match=message):
        CommSpec(CollectiveCommPattern[pattern], spec("S0RR"), **arguments)


def test_conversions_that_are_refused() -> None:
    other = DeviceMesh(torch.arange(16), mesh_shape=(4, 4))
    with pytest.raises(ShardingSpecException, match="the same tensor on the same grid"):
        convert(spec("S0RR"), spec("RRR", other))
    with pytest.raises(ShardingSpecException, match="search='fast' is unknown"):
        convert(spec("S0RR"), spec("RRR"), "fast")  # type: ignore[arg-type]
    with pytest.raises(ShardingSpecException, match="search='fast' is unknown"):
        LayoutConverter("fast")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="search='fast' is unknown"):
        ShapeConsistencyOptions("fast")  # type: ignore[arg-type]
    with pytest.raises(ShardingSpecException, match=r"does not lie as S0RR: .* shape \(256, 512, 256\)"):
        convert(spec("S0RR"), spec("RRR")).apply(torch.zeros(4, 4, 4))


def _convert(rank: int, world_size: int, port: int, search: Any) -> None:
    start(rank, world_size, port)
    grid = DeviceMesh(torch.arange(4), (2, 2), mesh_alpha=[1e-6, 1e-6], mesh_beta=[1e-8, 1e-9])
    shape, manager = (4, 8), ShapeConsistencyManager()
    manager.options = ShapeConsistencyOptions(search)
    full = torch.arange(32.0).view(shape)
    wanted = torch.linspace(1, 3, 32).view(shape)
    whole = ShardingSpec(grid, shape)
    specs = [whole.with_layout(layout) for layout in layouts_of(("0", "1"), 2)]
    for source, target in itertools.product(specs, repeat=2):
        x = to_piece(full, source).requires_grad_()
        x.sharding_spec = source  # type: ignore[attr-defined]
        y = manager.apply(x, target)
        assert y.sharding_spec == target  # type: ignore[attr-defined]
        assert torch.equal(y, to_piece(full, target)), f"{source} to {target}"
        (grad,) = torch.autograd.grad(y, x, to_piece(wanted, target))
        assert torch.equal(grad, to_piece(wanted, source)), f"gradient of {source} to {target}"
        assert torch.equal(to_global(y, target), full)
    # partial sums: rank i of axis 0 holds (1 + i) thirds
    summand = full * (1 + grid.convert_map[rank][0])
    for target in specs:
        for partial in (
            ShardingSpec(grid, shape, partial=[0]),
            ShardingSpec(grid, shape, {1: [1]}, partial=[0]),
        ):
            piece = to_piece(summand, ShardingSpec(grid, shape, partial.dim_partition_dict))
            moved = manager.apply_for_autoparallel_runtime(piece, partial, target)
            assert torch.equal(moved, to_piece(full * 3, target)), f"{partial} to {target}"


def to_piece(full: torch.Tensor, where: ShardingSpec) -> torch.Tensor:
    """By slicing alone, in the order of the notation."""
    grid, _ = where.on_mesh()
    place = grid.convert_map[torch.distributed.get_rank()]
    for dim, axes in where.dim_partition_dict.items():
        for axis in axes:
            full = full.chunk(grid.shape[axis], dim)[place[axis]]
    return full.clone()


@pytest.mark.parametrize("search", ["shortest", "greedy"])
def test_converted_pieces_and_their_gradients(search: str) -> None:
    spawn(_convert, 4, search=search)


def _patterns(rank: int, world_size: int, port: int) -> None:
    start(rank, world_size, port)
    grid, pattern = DeviceMesh(torch.arange(4), (2, 2)), CollectiveCommPattern
    full = torch.arange(32.0).view(4, 8)
    place = grid.convert_map[rank]

    def check(kind: CollectiveCommPattern, source: str, result: Any, grad: Any, **where: Any) -> None:
        """``grad``: of the input, where the result has (1 + this rank's place on axis 0) everywhere."""
        before = ShardingSpec(grid, (4, 8), sharding_sequence=source)
        x = to_piece(full, before).requires_grad_()
        y = CommSpec(kind, before, **where).covert_spec_to_action(x)
        assert torch.equal(y, result), kind
        assert torch.equal(torch.autograd.grad(y, x, torch.ones_like(y) * (1 + place[0]))[0], grad), kind

    own = float(1 + place[0])
    rows, columns = full.chunk(2, 0), full.chunk(2, 1)
    axis = {"logical_process_axis": 1}
    check(pattern.GATHER_FWD_SPLIT_BWD, "S1R", full, torch.full((2, 8), own), gather_dim=0, **axis)
    check(pattern.SPLIT_FWD_GATHER_BWD, "RR", rows[place[1]], torch.full((4, 8), own), shard_dim=0, **axis)
    axis = {"logical_process_axis": 0}
    thirds = torch.cat([torch.ones(2, 4), torch.full((2, 4), 2.0)])
    exchanged = {"gather_dim": 1, "shard_dim": 0, **axis}
    check(pattern.ALL2ALL_FWD_ALL2ALL_BWD, "RS0", rows[place[0]], thirds, **exchanged)
    check(pattern.ALLREDUCE_FWD_IDENTITY_BWD, "RR", full * 2, torch.full((4, 8), own), **axis)
    check(pattern.IDENTITY_FWD_ALLREDUCE_BWD, "RR", full, torch.full((4, 8), 3.0), **axis)
    halves = torch.cat([torch.ones(4, 4), torch.full((4, 4), 2.0)], 1)
    check(pattern.REDUCESCATTER_FWD_GATHER_BWD, "RR", columns[place[0]] * 2, halves, shard_dim=1, **axis)
    mixed = {"gather_dim": 0, "logical_process_axis": [0, 1], "mix_gather": True}
    check(pattern.MIXGATHER_FWD_SPLIT_BWD, "S01R", full, torch.full((1, 8), own), **mixed)


def test_every_pattern_and_its_gradient() -> None:
    spawn(_patterns, 4)


@pytest.mark.parametrize(
    ("mine", "other", "steps"),
    [
        ("RR", "RR", 0),
        ("RR", "S0R", SHARD_COST),
        ("S0R", "RR", ALLGATHER_COST),
        ("S0R", "S01R", SHARD_COST),
        ("S0R", "S1R", ALLGATHER_COST + SHARD_COST + STEP_PENALTY),
        ("S01R", "RR", 2 * ALLGATHER_COST + STEP_PENALTY),
        ("S0R", "RS0", ALLGATHER_COST + SHARD_COST),
    ],
)
def test_difference_of_specs(mine: str, other: str, steps: int) -> None:
    assert (ALLGATHER_COST, SHARD_COST, STEP_PENALTY) == (20, 5, 6)
    one, two = (ShardingSpec(2, sharding_sequence=text) for text in (mine, other))
    assert one.spec_diff(two) == one.sharding_sequence_difference(two) == steps


def test_layout_converter() -> None:
    def layout(text: str) -> Layout:
        return Layout(GRID, "cpu", ShardingSpec(3, sharding_sequence=text), SHAPE)

    converter = LayoutConverter(search="greedy")
    source, target = layout("S01RR"), layout("RS01R")
    path, actions = converter.layout_converting(source, target)
    assert [str(step.sharding_spec) for step in path] == ["S01RR", "S0RR", "RS0R", "RS01R"]
    assert len(actions) == 3
    assert converter.all_gather_transform_layouts(source).keys() == {layout("S0RR")}
    assert converter.all_to_all_transform_layout(source).keys() == {layout("S0RS1"), layout("S0S1R")}
    assert converter.shard_transform_layout(source) == {}
    assert len(converter.get_all_one_step_transform_spec(source)) == 3
    cheap = LayoutConverter().get_total_comm_cost(source, target)
    assert cheap["total"] < converter.get_total_comm_cost(source, target)["total"]
    with pytest.raises(ShardingSpecException, match="different devices"):
        converter.layout_converting(source, Layout(GRID, "meta", target.sharding_spec, SHAPE))
