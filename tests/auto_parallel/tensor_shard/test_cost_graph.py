"""The documented names of the solver, over strategies that were written by hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import symbolic_trace

from colossalai.auto_parallel.tensor_shard.options import (
    DataloaderOption,
    ShardOption,
    SolverOptions,
    SolverPerference,
)
from colossalai.auto_parallel.tensor_shard.sharding_strategy import (
    CommAction,
    CommType,
    MemoryCost,
    OperationData,
    OperationDataType,
    ShardingStrategy,
    StrategiesVector,
    TrainCycleItem,
)
from colossalai.auto_parallel.tensor_shard.solver import CostGraph, InfeasibleBudgetError, Solver
from colossalai.device import DeviceMesh
from colossalai.tensor.comm_spec import CollectiveCommPattern, CommSpec
from colossalai.tensor.sharding_spec import ShardingSpec


def item(fwd: float, bwd: float) -> TrainCycleItem[float]:
    return TrainCycleItem(fwd, bwd, fwd + bwd)


def strategy(name: str, seconds: tuple[float, float], size: float) -> ShardingStrategy:
    """A strategy whose communication takes half of the time, with temporaries that do not add up."""
    half = item(seconds[0] / 2, seconds[1] / 2)
    fwd = MemoryCost(activation=size / 4, parameter=size / 4, temp=1e9)
    total = MemoryCost(activation=size / 2, parameter=size / 4, temp=1e9, buffer=size / 4)
    return ShardingStrategy(name, {}, half, half, TrainCycleItem(fwd, MemoryCost(), total))


def traced() -> tuple[torch.fx.Graph, list[StrategiesVector]]:
    """Two layers: cut (S) they cost less and need more than whole (R); a conversion takes three seconds."""

    class TwoLayers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.two(self.one(x))

    graph = symbolic_trace(TwoLayers()).graph
    x, one, two, _ = graph.nodes
    vectors = [
        StrategiesVector(x, [strategy("R", (0, 0), 0)]),
        StrategiesVector(one, [strategy("S", (1, 2), 100), strategy("R", (6, 2), 40)]),
        StrategiesVector(two, [strategy("S", (1, 4), 200), strategy("R", (2, 5), 80)]),
    ]
    for s in vectors[1]:
        s.resharding_costs = {x: [item(0, 0)]}
    for s in vectors[2]:
        s.resharding_costs = {one: [item(0, 0) if s.name == t.name else item(1, 2) for t in vectors[1]]}
    return graph, vectors


def solve(budget: float = -1.0, simplify: bool = True, forward_only: bool = False, **options: Any) -> Any:
    graph, vectors = traced()
    cost_graph = CostGraph(vectors, simplify, forward_only)
    constructor = SimpleNamespace(leaf_strategies=vectors)
    options = {"memory_budget": budget, "forward_only": forward_only, **options}
    return Solver(graph, constructor, cost_graph, **options).call_solver_serialized_args()


@pytest.mark.parametrize("simplify", [True, False])
def test_the_cheapest_strategies(simplify: bool) -> None:
    answer = solve(simplify=simplify)
    assert answer.strategies == [0, 0, 0]
    assert answer.cost == 3 + 5
    assert answer.plan.memory == 300
    assert answer.plan.gap == 0
    # one is whole, two is cut; one is cut, two is whole: 8 + 3 + 5, 3 + 3 + 7
    assert solve(240, simplify).strategies == [0, 0, 1]
    assert solve(240, simplify).cost == 13
    assert [(a.name, b.name, s) for (a, b), s in solve(240).resharding.items()] == [
        ("x", "one", 0.0),
        ("one", "two", 3.0),
    ]
    assert solve(120, simplify).strategies == [0, 1, 1]
    with pytest.raises(InfeasibleBudgetError, match="needs 120 bytes"):
        solve(119, simplify)


def test_forward_only() -> None:
    answer = solve(forward_only=True)
    assert (answer.cost, answer.plan.memory) == (2, 150)


def test_several_budgets(capsys: pytest.CaptureFixture[str]) -> None:
    answers = solve(120, solution_numbers=3, memory_increasing_coefficient=2.0, verbose=True)
    assert [a.strategies for a in answers] == [[0, 1, 1], [0, 0, 1], [0, 0, 0]]
    assert [a.plan.graph.memory_budget for a in answers] == [120, 240, 480]
    assert "one S\ntwo R\n" in capsys.readouterr().out
    with pytest.raises(ValueError, match=r"solution_numbers=2, memory_budget=-1\.0"):
        solve(solution_numbers=2)
    with pytest.raises(ValueError, match=r"memory_increasing_coefficient=1\.0"):
        solve(120, solution_numbers=2, memory_increasing_coefficient=1.0)


def test_solver_refuses_what_does_not_fit() -> None:
    graph, vectors = traced()
    with pytest.raises(ValueError, match="memory_budget=0"):
        solve(0)
    with pytest.raises(ValueError, match="forward_only=True, but the cost graph has False"):
        Solver(graph, None, CostGraph(vectors), forward_only=True)
    with pytest.raises(ValueError, match="nodes of another graph: one, two, x"):
        Solver(traced()[0], None, CostGraph(vectors))
    with pytest.raises(ValueError, match="different nodes"):
        Solver(graph, SimpleNamespace(leaf_strategies=vectors[:2]), CostGraph(vectors))
    with pytest.raises(ValueError, match="from 'one', which is not in leaf_strategies"):
        CostGraph([vectors[0], vectors[2]])
    vectors[2][1].resharding_costs = {vectors[1].node: [item(0, 0)]}
    with pytest.raises(
        ValueError, match="'R' of 'two' has 1 resharding costs from 'one'; expected one for each"
    ):
        CostGraph(vectors)
    vectors[2][1].resharding_costs = {}
    with pytest.raises(ValueError, match="'R' of 'two' has no resharding costs"):
        CostGraph(vectors)


def test_options() -> None:
    options = SolverOptions("dp", "distributed", "full_shard")  # type: ignore[arg-type]
    assert options == SolverOptions(SolverPerference.DP, DataloaderOption.DISTRIBUTED, ShardOption.FULL_SHARD)
    assert SolverOptions().shard_option is ShardOption.STANDARD
    with pytest.raises(ValueError, match=r"shard_option='all'; expected one of 'standard', 'shard', "):
        SolverOptions(shard_option="all")  # type: ignore[arg-type]


def test_strategies_know_their_tensors() -> None:
    mesh = DeviceMesh(torch.arange(4), (2, 2))
    x = OperationData("x", OperationDataType.INPUT, torch.empty(4, 8, device="meta"))
    assert x.logical_shape == (4, 8)
    assert x == OperationData("x", OperationDataType.INPUT, None)
    spec = ShardingSpec(mesh, torch.Size([4, 8]), {0: [0]})
    action = CommAction(
        CommSpec(CollectiveCommPattern.ALLREDUCE_FWD_IDENTITY_BWD, spec, logical_process_axis=1),
        CommType.AFTER,
    )
    cut = ShardingStrategy("S0R = S0R x RR", {x: spec}, communication_actions={x: action})
    assert cut.get_sharding_spec_by_name("x") is spec
    assert cut.communication_actions[x].arg_index == -1
    with pytest.raises(KeyError, match="has no tensor 'y'; it has x"):
        cut.get_op_data_by_name("y")
    _, vectors = traced()
    assert [n.name for n in vectors[1].predecessor_nodes] == ["x"]
    assert [n.name for n in vectors[1].successor_nodes] == ["two"]
