"""The solver: of all plans that fit into memory, the one that takes the least time, with a proof."""

from typing import Any

from colossalai.auto_parallel.tensor_shard.solver.cost_graph import CostGraph, Solver, SolverAnswer
from colossalai.auto_parallel.tensor_shard.solver.folding import equal_layers
from colossalai.auto_parallel.tensor_shard.solver.plan import ChoiceReason, StrategyPlan
from colossalai.auto_parallel.tensor_shard.solver.solve import BACKENDS, solve_strategies
from colossalai.auto_parallel.tensor_shard.solver.strategy_graph import (
    InfeasibleBudgetError,
    NoPlanError,
    StrategyEdge,
    StrategyGraph,
    StrategyNode,
)

__all__ = [
    "BACKENDS",
    "ChoiceReason",
    "CostGraph",
    "GraphAnalyser",
    "InfeasibleBudgetError",
    "NoPlanError",
    "Solver",
    "SolverAnswer",
    "StrategiesConstructor",
    "StrategyEdge",
    "StrategyGraph",
    "StrategyNode",
    "StrategyPlan",
    "equal_layers",
    "solve_strategies",
]


def __getattr__(name: str) -> Any:
    """``StrategiesConstructor`` and ``GraphAnalyser`` are documented here; they stand above the solver."""
    if name in ("GraphAnalyser", "StrategiesConstructor"):
        from colossalai.auto_parallel.tensor_shard import constructor

        return getattr(constructor, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
