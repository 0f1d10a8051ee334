"""``CostGraph`` and ``Solver``: the solver under its documented names, for strategies of a traced graph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from torch.fx import Graph, Node

from colossalai.auto_parallel.tensor_shard.sharding_strategy import (
    ShardingStrategy,
    StrategiesVector,
    TrainCycleItem,
)
from colossalai.auto_parallel.tensor_shard.solver.plan import StrategyPlan
from colossalai.auto_parallel.tensor_shard.solver.solve import solve_strategies
from colossalai.auto_parallel.tensor_shard.solver.strategy_graph import Floats, StrategyGraph


class CostGraph:
    """The strategies of all nodes, and what conversions between them cost, as a graph that can be solved.

    Args:
        leaf_strategies: the strategies of every node that has a choice, in the order of the graph.
        simplify: fold trivial nodes before solving.
        forward_only: count the forward pass alone, as in inference.
    """

    def __init__(
        self, leaf_strategies: Sequence[StrategiesVector], simplify: bool = True, forward_only: bool = False
    ) -> None:
        self.leaf_strategies = list(leaf_strategies)
        self.simplify = simplify
        self.forward_only = forward_only
        self.nodes: list[Node] = [vector.node for vector in self.leaf_strategies]
        self._place = {node: i for i, node in enumerate(self.nodes)}
        self.strategy_graph = StrategyGraph()
        for vector in self.leaf_strategies:
            self._add_node(vector)
        for vector in self.leaf_strategies:
            for source in dict.fromkeys(n for s in vector for n in s.resharding_costs):
                self.strategy_graph.add_edge(
                    self._index(source, vector), self._place[vector.node], self._table(source, vector)
                )

    def _add_node(self, vector: StrategiesVector) -> None:
        cost = [self._seconds(s.compute_cost) + self._seconds(s.communication_cost) for s in vector]
        memory = [self._bytes(s) for s in vector]
        self.strategy_graph.add_node(vector.node.name, cost, memory, [s.name for s in vector])

    def _index(self, source: Node, vector: StrategiesVector) -> int:
        if source not in self._place:
            raise ValueError(
                f"strategies of {vector.node.name!r} have resharding costs from {source.name!r}, which is "
                "not in leaf_strategies; pass the strategies of all nodes"
            )
        return self._place[source]

    def _table(self, source: Node, vector: StrategiesVector) -> Floats:
        """Seconds from each strategy of ``source`` (rows) to each strategy of the node."""
        theirs = len(self.leaf_strategies[self._place[source]])
        columns = []
        for strategy in vector:
            costs = strategy.resharding_costs.get(source)
            if costs is None or len(costs) != theirs:
                raise ValueError(
                    f"strategy {strategy.name!r} of {vector.node.name!r} has "
                    f"{'no' if costs is None else len(costs)} resharding costs from {source.name!r}; "
                    f"expected one for each of its {theirs} strategies"
                )
            columns.append([self._seconds(c) for c in costs])
        return np.array(columns).T

    def _seconds(self, item: TrainCycleItem[float] | float | None) -> float:
        if item is None:
            return 0.0
        if isinstance(item, TrainCycleItem):
            return float(item.fwd if self.forward_only else item.total)
        return float(item)

    def _bytes(self, strategy: ShardingStrategy) -> float:
        if strategy.memory_cost is None:
            return 0.0
        item = strategy.memory_cost
        return float((item.fwd if self.forward_only else item.total).lasting)


class SolverAnswer(NamedTuple):
    """A plan as plain numbers, in the order of ``leaf_strategies``, and with its certificate."""

    strategies: list[int]
    resharding: dict[tuple[Node, Node], float]
    """The conversions of the plan, and their seconds."""
    cost: float
    plan: StrategyPlan


class Solver:
    """Chooses a strategy for every node of a graph.

    Args:
        graph: the traced graph; the plan is for its nodes.
        strategies_constructor: what made the strategies; must be those of ``cost_graph``.
        graph_analyser: accepted as documented; memory is the sum over all nodes, as it is at the end of a
            forward pass, so liveness is not needed.
        memory_budget: bytes of a rank; -1 for any.
        solution_numbers: how many plans to find, each under a budget ``memory_increasing_coefficient`` times
            the last.
        forward_only: as of ``cost_graph``, which has counted already.
        verbose: print each plan.
        options: of :func:`solve_strategies`: ``backend``, ``gap``, ``time_limit``, ``tie``.
    """

    def __init__(
        self,
        graph: Graph,
        strategies_constructor: Any,
        cost_graph: CostGraph,
        graph_analyser: Any = None,
        memory_budget: float = -1.0,
        solution_numbers: int = 1,
        forward_only: bool = False,
        memory_increasing_coefficient: float = 1.3,
        verbose: bool = False,
        **options: Any,
    ) -> None:
        if memory_budget != -1 and not memory_budget > 0:
            raise ValueError(f"memory_budget={memory_budget}; expected bytes, or -1 for no budget")
        if solution_numbers < 1 or (solution_numbers > 1 and memory_budget == -1):
            raise ValueError(
                f"solution_numbers={solution_numbers}, memory_budget={memory_budget}; expected at least one "
                "plan, and a budget for more than one: each has a larger budget than the last"
            )
        if solution_numbers > 1 and not memory_increasing_coefficient > 1:
            raise ValueError(
                f"memory_increasing_coefficient={memory_increasing_coefficient}; expected more than 1"
            )
        if forward_only != cost_graph.forward_only:
            raise ValueError(f"forward_only={forward_only}, but the cost graph has {cost_graph.forward_only}")
        strangers = {n.name for n in cost_graph.nodes if n.graph is not graph}
        if strangers:
            raise ValueError(f"the cost graph has nodes of another graph: {', '.join(sorted(strangers))}")
        theirs = getattr(strategies_constructor, "leaf_strategies", cost_graph.leaf_strategies)
        if [v.node for v in theirs] != cost_graph.nodes:
            raise ValueError(
                "strategies_constructor and cost_graph have different nodes; make one from the other"
            )
        self.graph = graph
        self.strategies_constructor = strategies_constructor
        self.cost_graph = cost_graph
        self.graph_analyser = graph_analyser
        self.memory_budget = memory_budget
        self.solution_numbers = solution_numbers
        self.memory_increasing_coefficient = memory_increasing_coefficient
        self.verbose = verbose
        self.options = options

    def call_solver_serialized_args(self) -> Any:
        """The answer, or a list of them if ``solution_numbers`` is more than one."""
        if self.memory_budget == -1:
            return self._answer(None)
        growth = [self.memory_increasing_coefficient**i for i in range(self.solution_numbers)]
        answers = [self._answer(self.memory_budget * factor) for factor in growth]
        return answers[0] if self.solution_numbers == 1 else answers

    def _answer(self, budget: float | None) -> SolverAnswer:
        whole = self.cost_graph.strategy_graph.with_budget(budget)
        plan = solve_strategies(whole, fold_nodes=self.cost_graph.simplify, **self.options)
        if self.verbose:
            print(plan)
        nodes, choice = self.cost_graph.nodes, plan.choice
        moved = {
            (nodes[e.source], nodes[e.target]): float(e.cost[choice[e.source], choice[e.target]])
            for e in whole.edges
        }
        return SolverAnswer(list(choice), moved, plan.cost, plan)
