"""``solve_strategies``: the cheapest strategy for every node of a graph, within memory, with a proof.

The default goes from what is cheap to what is complete, and stops as soon as the gap is small enough: fold,
search for the price of memory by elimination, leave out strategies that no better plan can take, and give
what is left to HiGHS.  A plan without a budget needs one sweep.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from math import prod

import numpy as np

from colossalai.auto_parallel.tensor_shard.solver.elimination import MAX_CELLS
from colossalai.auto_parallel.tensor_shard.solver.folding import FoldedGraph, contract, equal_layers, fold
from colossalai.auto_parallel.tensor_shard.solver.lagrangian import (
    FlatGraph,
    PlanBounds,
    polish,
    search_price,
)
from colossalai.auto_parallel.tensor_shard.solver.milp import MilpAnswer, cbc, highs
from colossalai.auto_parallel.tensor_shard.solver.plan import StrategyPlan
from colossalai.auto_parallel.tensor_shard.solver.strategy_graph import (
    InfeasibleBudgetError,
    NoPlanError,
    StrategyGraph,
)

BACKENDS = ("auto", "milp", "pulp", "brute")
_MOST_PLANS = 2_000_000  # that brute force looks at


@dataclass(frozen=True)
class _Settings:
    """What a search was asked for."""

    backend: str
    gap: float
    clock: _Clock
    fold_nodes: bool
    max_cells: int


class _Clock:
    """Seconds per phase, and whether there is time left."""

    def __init__(self, limit: float | None) -> None:
        self.seconds: dict[str, float] = {}
        self._start, self._limit = time.perf_counter(), limit

    def left(self) -> float | None:
        if self._limit is None:
            return None
        return max(0.0, self._limit - (time.perf_counter() - self._start))

    def is_over(self) -> bool:
        return self.left() == 0.0

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start


def solve_strategies(
    graph: StrategyGraph,
    *,
    backend: str = "auto",
    gap: float = 1e-3,
    time_limit: float | None = None,
    tie: bool = False,
    fold_nodes: bool = True,
    max_cells: int = MAX_CELLS,
) -> StrategyPlan:
    """Find the cheapest plan of a graph within its memory budget.

    Args:
        backend: ``"auto"``; ``"milp"`` (HiGHS of scipy) or ``"pulp"`` (CBC) for the whole problem;
            ``"brute"`` looks at all plans of a small graph.
        gap: stop when the plan is proved to cost at most this part more than the best; zero for the best.
        time_limit: seconds, after which the best plan so far is the answer, with its gap.
        tie: let equal layers choose alike: nearly as fast as one layer, but worse under a tight budget, by
            far where only slow strategies are small; the bound is then that of tied plans.
        fold_nodes: make trivial nodes part of their neighbours first (auto only; others take all as it is).
        max_cells: cells of the largest table of the elimination; wider graphs get bounds from it, and HiGHS.

    Raises:
        InfeasibleBudgetError: no plan fits; the error names the least memory.
    """
    _check(graph, backend, gap, time_limit)
    clock = _Clock(time_limit)
    with clock.phase("fold"):
        groups = equal_layers(graph) if tie else graph.groups
        whole = contract(graph, groups)
    try:
        bounds, choice = _solve(
            whole, graph.memory_budget, _Settings(backend, gap, clock, fold_nodes, max_cells)
        )
    except (InfeasibleBudgetError, NoPlanError):
        if groups == graph.groups:
            raise
        return solve_strategies(  # alike they cannot: pairs of strategies are forbidden
            graph,
            backend=backend,
            gap=gap,
            time_limit=clock.left(),
            fold_nodes=fold_nodes,
            max_cells=max_cells,
        )
    chosen = tuple(choice[i] for i in range(len(graph.nodes)))
    cost = graph.cost(chosen)
    return StrategyPlan(
        graph,
        chosen,
        cost,
        graph.memory(chosen),
        min(bounds.lower, cost),
        backend,
        bounds.price,
        clock.seconds,
        tuple(groups) if tie else (),
    )


_NO_PLAN = "forbidden strategies and pairs (cost inf) leave no plan; allow a conversion"


def _check(graph: StrategyGraph, backend: str, gap: float, time_limit: float | None) -> None:
    if backend not in BACKENDS:
        raise ValueError(f"backend={backend!r}; expected one of {', '.join(BACKENDS)}")
    if not isinstance(gap, (int, float)) or not 0 <= gap < 1:
        raise ValueError(f"gap={gap!r}; expected a number from 0 (the best plan) up to 1")
    if time_limit is not None and (not isinstance(time_limit, (int, float)) or not time_limit >= 0):
        raise ValueError(f"time_limit={time_limit!r}; expected seconds >= 0, or None")
    budget = graph.memory_budget
    if budget is not None and not 0 <= budget < np.inf:
        raise ValueError(f"memory_budget={budget}; expected bytes >= 0, or None for no budget")


def _solve(whole: FoldedGraph, budget: float | None, ask: _Settings) -> tuple[PlanBounds, dict[int, int]]:
    clock = ask.clock
    bounds = PlanBounds(budget)
    with clock.phase("fold"):
        small = (
            fold(whole, budgeted=budget is not None) if ask.backend == "auto" and ask.fold_nodes else whole
        )
        flat = FlatGraph(small, ask.max_cells)
    if ask.backend == "auto":
        if budget is not None:
            _check_minimum(flat, budget)
        _by_elimination(flat, bounds, ask.gap, clock)
    else:
        with clock.phase(ask.backend):
            _take(flat, bounds, _within_budget(_BACKENDS[ask.backend], flat, budget, ask.gap, clock))
        if bounds.choice is None and budget is not None:  # out of time, or there is none
            _offer_smallest(flat, bounds)
    if bounds.choice is None:
        _explain_nothing(flat, bounds)
    assert bounds.choice is not None
    chosen = flat.unfold(bounds.choice)
    return bounds, whole.unfold(chosen) if small is not whole else chosen


def _within_budget(
    backend: Callable[[FlatGraph, float | None, float, float | None], MilpAnswer],
    flat: FlatGraph,
    budget: float | None,
    gap: float,
    clock: _Clock,
) -> MilpAnswer:
    """Ask a backend; if its plan is a few bytes too large, which tolerances allow, ask for a smaller one."""
    answer = backend(flat, budget, gap, clock.left())
    if budget is None or answer.choice is None:
        return answer
    excess = float(flat.measure(answer.choice[None])[1][0]) - budget
    if excess > 0:
        answer.choice = backend(flat, budget - excess, gap, clock.left()).choice
    return answer


def _offer_smallest(flat: FlatGraph, bounds: PlanBounds) -> None:
    smallest = flat.smallest()[1]
    cost, memory = flat.measure(smallest[None])
    bounds.offer(smallest, float(cost[0]), float(memory[0]))


def _check_minimum(flat: FlatGraph, budget: float) -> None:
    minimum, _, exact = flat.smallest()
    if not np.isfinite(minimum):
        raise NoPlanError(_NO_PLAN)
    if minimum > budget:
        raise InfeasibleBudgetError(budget, minimum if exact else _least_memory(flat))


def _by_elimination(flat: FlatGraph, bounds: PlanBounds, gap: float, clock: _Clock) -> None:
    """Price of memory, then fixing, then HiGHS, as far as it is needed."""
    with clock.phase("elimination"):
        search_price(flat, bounds, gap, clock.is_over)
        if bounds.gap > gap:
            polish(flat, bounds)
    if bounds.gap <= _within(gap) or clock.is_over():
        return
    with clock.phase("fixing"):
        rest = _fix(flat, bounds)
    if rest is None:  # nothing can be better
        bounds.lower = bounds.cost
        return
    with clock.phase("milp"):
        answer = _within_budget(highs, rest, bounds.budget, gap, clock)
    if answer.proved_infeasible and bounds.choice is not None:
        bounds.lower = bounds.cost
    elif answer.choice is not None:
        chosen = rest.unfold(answer.choice)
        answer.choice = np.array([chosen[v] for v in flat.nodes], dtype=np.intp)
    _take(flat, bounds, answer)


def _within(gap: float) -> float:
    return max(gap, 1e-12)  # sums in another order differ


def _fix(flat: FlatGraph, bounds: PlanBounds) -> FlatGraph | None:
    """Leave out the strategies and the pairs with which no plan can cost less than the best so far."""
    price = bounds.price
    prices = np.array([price, price * 0.98, price * 1.02, price * 0.8, price * 1.25])
    prices = prices[: flat.elimination.batch(len(prices))] if bounds.budget is not None else np.zeros(1)
    marginals = flat.elimination.marginals(flat.prices(prices), pairs=True)
    paid = flat.graph.cost + prices * (flat.graph.memory - (bounds.budget or 0.0))
    limit = bounds.cost * (1 + 1e-9) if np.isfinite(bounds.cost) else np.finfo(np.float64).max
    keep = {
        v: np.flatnonzero((m + paid[:, None] <= limit).all(axis=0))
        for v, m in zip(flat.nodes, marginals.nodes, strict=True)
    }
    if any(len(k) == 0 for k in keep.values()):
        return None
    edges = dict(flat.graph.edges)
    for (u, v), table in marginals.edges.items():
        pair = flat.nodes[u], flat.nodes[v]
        possible = (table + paid[:, None, None] <= limit).all(axis=0)
        edges[pair] = np.where(possible, edges[pair], np.inf)
    costs, memories = flat.graph.costs, flat.graph.memories
    narrowed = FoldedGraph(
        costs,
        memories,
        edges,
        {v: np.arange(len(c)) for v, c in costs.items()},
        flat.graph.cost,
        flat.graph.memory,
    )
    return FlatGraph(fold(narrowed, keep, bounds.budget is not None))


def _take(flat: FlatGraph, bounds: PlanBounds, answer: MilpAnswer) -> None:
    """Note what a backend found: a plan that is better so far, and its bound."""
    if answer.choice is not None:
        cost, memory = flat.measure(answer.choice[None])
        bounds.offer(answer.choice, float(cost[0]), float(memory[0]))
    bounds.infeasible = answer.proved_infeasible and bounds.choice is None
    bounds.lower = max(bounds.lower, min(answer.lower, bounds.cost))


def _explain_nothing(flat: FlatGraph, bounds: PlanBounds) -> None:
    """Say why there is no plan."""
    if bounds.budget is not None:
        _check_minimum(flat, bounds.budget)
        if bounds.infeasible:  # but the bound of a wide graph did not say so
            raise InfeasibleBudgetError(bounds.budget, _least_memory(flat))
    if bounds.infeasible or not np.isfinite(flat.smallest()[0]):
        raise NoPlanError(_NO_PLAN)
    raise TimeoutError("the time limit ended before a plan was found; raise time_limit")


def _least_memory(flat: FlatGraph) -> float:
    """The memory of the smallest plan of a graph that is too wide for elimination."""
    graph = flat.graph
    by_size = FoldedGraph(
        {v: np.where(np.isfinite(graph.costs[v]), graph.memories[v], np.inf) for v in graph.costs},
        {v: np.zeros_like(m) for v, m in graph.memories.items()},
        {pair: np.where(np.isfinite(t), 0.0, np.inf) for pair, t in graph.edges.items()},
        graph.kept,
        graph.memory,
    )
    answer = highs(FlatGraph(by_size), None, 0.0, None)
    if answer.choice is None:
        raise NoPlanError(_NO_PLAN)
    return float(flat.measure(answer.choice[None])[1][0])


def _brute(flat: FlatGraph, budget: float | None, gap: float, time_limit: float | None) -> MilpAnswer:
    """Look at every plan."""
    plans = prod(flat.sizes)
    if plans > _MOST_PLANS:
        raise ValueError(f"backend='brute': the graph has {plans:.3g} plans; expected at most {_MOST_PLANS}")
    choices = np.array(list(product(*(range(k) for k in flat.sizes))), dtype=np.intp)
    choices = choices.reshape(plans, len(flat.sizes))
    cost, memory = flat.measure(choices)
    if budget is not None:
        cost = np.where(memory <= budget, cost, np.inf)
    best = int(cost.argmin())
    if not np.isfinite(cost[best]):
        return MilpAnswer(None, 0.0, proved_infeasible=True)
    return MilpAnswer(choices[best], float(cost[best]))


_BACKENDS = {"milp": highs, "pulp": cbc, "brute": _brute}
