"""The graphs of the benchmark are what it says: a GPT whose layers are equal, with prices that make sense."""

from __future__ import annotations

import pytest

from benchmarks.auto_parallel_solver import BLOCK, MESH, Operation, Shape, gpt_graph, price, strategies
from colossalai.auto_parallel.tensor_shard.solver import equal_layers, solve_strategies


def test_work_is_divided_and_sums_are_paid() -> None:
    shape = Shape()
    fc1 = next(op for op in BLOCK if op.name == "fc1")
    assert ("b", "j") in strategies(fc1, shape)
    assert ("h", "") not in strategies(fc1, shape)
    whole, whole_bytes = price(fc1, ("", ""), shape)
    column, column_bytes = price(fc1, ("", "j"), shape)
    gradient = MESH["gpu"].seconds("all_reduce", shape.of("bti") * 2)
    assert column == pytest.approx(whole / 8 + gradient)
    assert column_bytes == whole_bytes / 8
    softmax = Operation("softmax", ("bhts",), "bhts", whole="s")
    assert not any("s" in cuts for cuts in strategies(softmax, shape))


def test_layers_are_equal_and_deeper_graphs_cost_more() -> None:
    two, three = gpt_graph(2, most=4), gpt_graph(3, most=4)
    assert max(len(group) for group in equal_layers(three)) >= 3
    assert len(three.nodes) - len(two.nodes) == len(BLOCK)
    costs = [solve_strategies(graph).cost for graph in (two, three)]
    assert costs[0] < costs[1] < 2 * costs[0]
    assert solve_strategies(three, tie=True).cost == pytest.approx(costs[1])
