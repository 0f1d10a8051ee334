"""Strategies of real models: which there are, what they cost, and that the plan is the best of them."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from colossalai.auto_parallel.tensor_shard.gradient_sums import BUCKET_BYTES, sum_transfers
from colossalai.auto_parallel.tensor_shard.initialize import build_strategy_constructor, solve_solution
from colossalai.auto_parallel.tensor_shard.options import SolverOptions
from colossalai.auto_parallel.tensor_shard.solver import InfeasibleBudgetError, Solver, solve_strategies
from colossalai.auto_parallel.tensor_shard.solver.cost_graph import CostGraph
from colossalai.auto_parallel.tensor_shard.strategies.chosen import flow_transfers, predicted_step
from colossalai.auto_parallel.tensor_shard.strategies.moves import MoveCosts
from colossalai.auto_parallel.tensor_shard.strategies.problem import PlanProblem
from colossalai.fx import trace_model
from colossalai.mesh import AxisLink, Layout
from tests.auto_parallel.tensor_shard.planning import (
    constructor,
    data_parallel,
    grid,
    large_problem,
    restricted,
    tensor_parallel,
)

FAMILIES = ["mlp", "resnet", "gpt2", "bert", "opt", "vit", "t5", "llama"]


def _nodes(problem: PlanProblem) -> dict[str, Any]:
    return {v.title: v for v in problem.vertices if v.kind == "node"}


@pytest.mark.parametrize("family", FAMILIES)
def test_models_are_planned_under_budgets(family: str) -> None:
    found = constructor(family, grid(2, 2))
    assert not found.problem.whole_operations
    best = solve_solution(found)
    with pytest.raises(InfeasibleBudgetError) as refused:
        solve_solution(found, 1.0)
    least = refused.value.minimum
    assert str(int(least)) in str(refused.value)
    middle = solve_solution(found, (least + best.plan.memory) / 2, gap=1e-2)
    assert middle.plan.memory <= (least + best.plan.memory) / 2
    assert best.plan.cost <= middle.plan.cost
    for solution in (best, middle):
        step = solution.sharded.predicted
        assert step.compute + step.communication == pytest.approx(solution.plan.cost, rel=1e-9)
        assert step.memory == solution.plan.memory


def test_strategies_are_called_as_documented() -> None:
    block = _nodes(constructor("resnet", grid(2, 2)).problem)["layer1_0_conv1"]
    names = [placement.name for placement in block.placements]
    assert "S01R = S01R X RR" in names
    data = block.placements[names.index("S01R = S01R X RR")]
    assert data.inputs[0] == Layout((("0", "1"), (), (), ()))
    assert data.inputs[1] == Layout(((),) * 4, spread=frozenset("01"))  # each rank has other images
    column = block.placements[names.index("RS0 = RR X RS0")]
    assert column.inputs[1].dims == (("0",), (), (), ())  # out channels are the first dim in memory
    row = block.placements[names.index("RR = RS0 X S0R")]
    assert row.computed[0].partial == {"0"}
    assert not row.outputs[0].partial
    assert len(names) == len(set(names))


def test_work_memory_and_messages_of_a_linear_layer() -> None:
    problem = constructor("mlp", grid(2, 2)).problem
    up = _nodes(problem)["up"]
    costs = {p.name: c for p, c in zip(up.placements, up.costs, strict=True)}
    whole, data, column = costs["RR = RR X RR"], costs["S01R = S01R X RR"], costs["RS01 = RR X RS01"]
    weight, bias = 64 * 16 * 4, 64 * 4
    assert whole.memory.parameter == 4 * bias  # with its gradient and two states
    assert data.memory.parameter == whole.memory.parameter
    assert column.memory.parameter == whole.memory.parameter / 4
    rests = _rests(problem, "up.weight")
    assert {n: c.memory.parameter for n, c in rests.items()} == {
        name: 4 * weight / (4 if name in ("S01R", "RS01", "S0S1", "S1S0") else 1 if name == "RR" else 2)
        for name in ("RR", "S0R", "S1R", "S01R", "RS0", "RS1", "RS01", "S0S1", "S1S0")
    }
    assert not whole.forward
    assert not whole.backward
    assert not column.backward  # the gradient of a piece is a piece
    # gradients of weight and bias: pieces over the fast axis, which are summed over the slow one
    moved = _moved(problem, "up", "RR", "S01R = S01R X RR")
    assert not moved[0]
    sums = Counter((t.kind, t.axis, t.bytes) for t in (*data.backward, *moved[1]))
    assert sums == {
        (kind, axis, size // part): 1
        for size in (weight, bias)
        for kind, axis, part in (("reduce_scatter", "1", 1), ("all_reduce", "0", 2), ("all_gather", "1", 1))
    }


def _rests(problem: PlanProblem, name: str) -> dict[str, Any]:
    vertex = next(v for v in problem.vertices if (v.kind, v.name) == ("parameter", name))
    return {p.name: c for p, c in zip(vertex.placements, vertex.costs, strict=True)}


def _moved(problem: PlanProblem, title: str, rest: str, strategy: str) -> tuple[list[Any], list[Any]]:
    """The collectives of the weight of an operation."""
    wanted = {f"{title}.weight": rest, title: strategy}
    choice = [
        next((i for i, p in enumerate(v.placements) if p.name == wanted.get(v.title)), 0)
        for v in problem.vertices
    ]
    flow = next(f for f in problem.flows if problem.vertices[f.source].title == f"{title}.weight")
    return flow_transfers(problem, flow, choice)


def test_weights_that_rest_cut_are_gathered_and_their_gradients_scattered() -> None:
    problem = constructor("mlp", grid(1, 4)).problem
    weight = 64 * 16 * 4

    def kinds(title: str) -> list[list[tuple[str, int]]]:
        found = _moved(problem, title, "S1R", "S1R = S1R X RR")
        return [[(t.kind, t.bytes) for t in one] for one in found]

    # the input of the first layer has no gradient, which would need the weight
    assert kinds("up") == [[("all_gather", weight)], [("reduce_scatter", weight)]]
    assert kinds("down") == [
        [("all_gather", weight)],
        [("all_gather", weight), ("reduce_scatter", weight)],
    ]
    flow = next(f for f in problem.flows if problem.vertices[f.source].title == "down.weight")
    sent = [problem.model.moves.time(t) for t in _moved(problem, "down", "S1R", "S1R = S1R X RR")]
    source, target = problem.vertices[flow.source].placements, problem.vertices[flow.target].placements
    row, column = [p.name for p in source].index("S1R"), [p.name for p in target].index("S1R = S1R X RR")
    assert problem.table(flow)[row, column] == pytest.approx(sum(sent))


def test_no_gradient_comes_back_from_a_comparison() -> None:
    class Leaky(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.fc(x)
            return torch.where(x > 0, x, 0.1 * x).mean()

    problem = build_strategy_constructor(trace_model(Leaky(), torch.zeros(8, 8)), grid(1, 2)).problem
    compared = next(f for f in problem.flows if problem.vertices[f.target].name == "gt")
    assert not compared.learns
    assert all(not p.inputs[0].spread for p in problem.vertices[compared.target].placements)


def test_large_batches_under_a_budget_gather_their_weights() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    found = build_strategy_constructor(trace_model(model, torch.zeros(2**14, 64)), grid(1, 4))
    free = solve_solution(found)
    assert not any(layout.sharded for layout in free.sharded.parameters.values())
    weights = 2 * 4 * 64 * 64 * 4
    tight = solve_solution(found, free.plan.memory - weights / 2)
    assert list(tight) == list(free)
    assert all(tight.sharded.parameters[f"{i}.weight"].sharded == ("1",) for i in (0, 2))
    assert "2 parameters rest cut and are gathered when they are used: 0.weight as S1R" in str(tight)
    assert tight.sharded.predicted.memory == free.sharded.predicted.memory - weights * 3 / 4


def test_fused_queries_keys_and_values_are_cut_one_by_one() -> None:
    vertices = _nodes(constructor("gpt2", grid(1, 2)).problem)
    product, split = vertices["transformer_h_0_attn_c_attn"], vertices["split"]
    fused = [p for p in product.placements if p.outputs[0].fused == (1, 3) and p.outputs[0].dims[1]]
    assert fused
    assert all(p.inputs[2].fused == (1, 3) and p.inputs[0].fused == (3,) for p in fused)
    assert any(p.inputs[0].fused == (1, 1, 3) and p.outputs[0].dims[2] == ("1",) for p in split.placements)


def test_the_input_of_equal_products_is_moved_once() -> None:
    problem = constructor("bert", grid(1, 4)).problem
    shares = [v for v in problem.vertices if v.node is not None and "share" in v.node.fx_node.meta]
    assert len(shares) == 2  # of queries, keys and values in each of two layers
    assert any(p.outputs[0].spread for p in shares[0].placements)
    keep = {
        v.title: lambda p: p.working == ("1",) and p.outputs[0].dims[-1] == ("1",)
        for v in problem.vertices
        if v.title.endswith(("query", "key", "value"))
    }
    graph = restricted(problem, lambda v, p: keep[v.title](p) if v.title in keep else True)
    assert len(keep) == 6
    choice = _choice_in(problem, graph, solve_strategies(graph).choice)
    heads = [t for t in predicted_step(problem, choice).backward if t.kind == "all_reduce"]
    assert sum(t.bytes == 2 * 8 * 16 * 4 for t in heads) <= 2 * 2  # not three for each layer


def _choice_in(problem: PlanProblem, graph: Any, choice: tuple[int, ...]) -> list[int]:
    return [
        [p.name for p in v.placements].index(n.strategies[c])
        for v, n, c in zip(problem.vertices, graph.nodes, choice, strict=True)
    ]


@pytest.mark.parametrize("shape", [(2, 2), (2, 4)])
def test_no_plan_by_hand_is_better(shape: tuple[int, int]) -> None:
    problem = large_problem(2, grid(*shape))
    best = solve_strategies(problem.solver_graph)
    for keep in (data_parallel, tensor_parallel(("0", "1")), tensor_parallel(("1",), ("0",))):
        by_hand = solve_strategies(restricted(problem, keep))
        assert np.isfinite(by_hand.cost)
        assert best.cost <= by_hand.cost


def test_the_plan_is_that_of_brute_force_and_of_highs() -> None:
    small = constructor("mlp", grid(1, 2)).problem.solver_graph
    assert solve_strategies(small, gap=0).cost == pytest.approx(solve_strategies(small, backend="brute").cost)
    problem = constructor("bert", grid(1, 2)).problem.solver_graph
    free = solve_strategies(problem, gap=0)
    assert free.cost == pytest.approx(solve_strategies(problem, backend="milp", gap=0).cost)
    budget = problem.with_budget(free.memory * 0.7)
    tight = solve_strategies(budget, gap=0)
    assert tight.cost == pytest.approx(solve_strategies(budget, backend="milp", gap=0).cost)


def test_preferences() -> None:
    data = constructor("gpt2", grid(2, 2), solver_preference="dp")
    for vertex in _nodes(data.problem).values():
        for placement in vertex.placements:
            assert not any(any(layout.dims[1:]) for layout in placement.outputs if layout.dims)
    tensor = constructor("mlp", grid(2, 2), solver_preference="tp")
    for vertex in _nodes(tensor.problem).values():
        assert not any(p.outputs[0].dims[0] for p in vertex.placements)
    assert all(not layout.sharded for layout in solve_solution(data).sharded.parameters.values())


def test_shard_options() -> None:
    def used(option: str) -> set[frozenset[str]]:
        up = _nodes(constructor("mlp", grid(2, 2), shard_option=option).problem)["up"]
        return {
            frozenset(a for layout in (*p.inputs, *p.outputs) for a in layout.sharded) for p in up.placements
        }

    none, last, first, both = frozenset[str](), frozenset("1"), frozenset("0"), frozenset("01")
    assert used("standard") == {none, first, last, both}
    assert used("shard") == {first, last, both}
    assert used("shard_last_axis") == {last}
    assert used("full_shard") == {both}


def test_an_option_that_no_size_allows_is_refused() -> None:
    graph = trace_model(nn.Linear(3, 5), torch.zeros(7, 3))
    with pytest.raises(ValueError, match=r"shard_option='full_shard'.*can be cut so over the mesh"):
        build_strategy_constructor(graph, grid(2, 2), shard_option="full_shard")
    whole = solve_solution(build_strategy_constructor(graph, grid(2, 2)))
    assert whole.sharded.parameters["weight"] == Layout(((), ()))


def test_a_distributed_batch_comes_in_cut() -> None:
    plan = solve_solution(constructor("mlp", grid(2, 2), dataloader_option="distributed")).sharded
    rows = Layout((("0", "1"), ()))
    assert plan.inputs == {"x": rows}
    assert list(plan.outputs.values()) == [rows]
    with pytest.raises(ValueError, match="8 samples, which 16 devices do not share evenly"):
        constructor("mlp", grid(4, 4), dataloader_option="distributed")


def test_an_operation_without_a_rule_runs_whole_and_is_reported() -> None:
    class Sorted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.cdist(self.inner(x), x)

    from colossalai.auto_parallel.tensor_shard.constructor import StrategiesConstructor

    found = StrategiesConstructor(trace_model(Sorted(), torch.zeros(8, 8)), grid(2, 2))
    assert list(found.problem.whole_operations.values()) == ["no rule for cdist"]
    assert "cdist runs whole on every rank: no rule for cdist" in str(solve_solution(found))


def test_documented_names_give_the_same_plan() -> None:
    found = constructor("mlp", grid(2, 2))
    found.build_strategies_and_cost()
    cost_graph = CostGraph(found.leaf_strategies)
    answer = Solver(found.graph, found, cost_graph, memory_budget=-1.0).call_solver_serialized_args()
    assert answer.cost == pytest.approx(solve_solution(found).plan.cost)
    vector = next(v for v in found.leaf_strategies if v.node.name == "linear")
    strategy = next(s for s in vector if s.name == "S01R = S01R X RR")
    assert str(strategy.get_sharding_spec_by_name("x")) == "S01R"
    assert str(strategy.get_sharding_spec_by_name("up.weight")) == "RR"


def test_options_are_members_or_their_names() -> None:
    with pytest.raises(ValueError, match="expected one of 'standard', 'dp', 'tp'"):
        SolverOptions(solver_perference="fast")  # type: ignore[arg-type]


def test_gradients_share_the_latency_of_their_bucket() -> None:
    links = {"0": AxisLink(2, 1.0, 1e-12), "1": AxisLink(2, 0.5, 1e-12)}
    costs = MoveCosts(links)
    small = sum_transfers(1024, 4, ("0", "1"), links)
    assert [t.kind for t in small] == ["reduce_scatter", "all_reduce", "all_gather"]
    assert costs.time(small) < 1e-3
    full = sum_transfers(BUCKET_BYTES // 2, 4, ("1",), links)  # too large for a bucket with others
    assert costs.time(full) == pytest.approx(0.5, rel=1e-3)
    assert costs.time([replace(t, in_bucket=False) for t in small]) == pytest.approx(2.5)
