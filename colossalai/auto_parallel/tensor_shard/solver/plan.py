"""``StrategyPlan``: the answer of a solver, its certificate, and why every node chose as it did."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from colossalai.auto_parallel.tensor_shard.solver.folding import contract
from colossalai.auto_parallel.tensor_shard.solver.lagrangian import FlatGraph, PlanBounds, search_price
from colossalai.auto_parallel.tensor_shard.solver.strategy_graph import StrategyGraph


@dataclass(frozen=True)
class ChoiceReason:
    """Why a node took its strategy: what the best plan costs with it, and with the best of the others.

    Args:
        cost: the seconds of the strategy itself.
        conversion: the seconds of the node's edges in this plan.
        total: the seconds of the best plan in which this node takes this strategy.
        runner_up: the strategy that would be next; None if there is no other.
        runner_up_total: the seconds of the best plan in which the node takes that one; all other nodes may
            choose anew.  Inf if none is allowed.
        exact: whether totals are exact.  Under a budget they are lower bounds: memory is paid at the plan's
            price per byte, instead of being limited.
    """

    node: str
    strategy: str
    cost: float
    conversion: float
    total: float
    runner_up: str | None
    runner_up_total: float
    exact: bool

    @property
    def extra(self) -> float:
        """How many seconds the runner-up costs more; negative if only the budget speaks for the choice."""
        return self.runner_up_total - self.total

    def __str__(self) -> str:
        text = f"{self.node} {self.strategy}: {self.cost:.3g} s, conversions {self.conversion:.3g} s"
        if self.runner_up is None:
            return f"{text}; it has no other strategy"
        return f"{text}; {self.runner_up} would cost {'' if self.exact else 'about '}{self.extra:+.3g} s"


@dataclass(frozen=True)
class StrategyPlan:
    """One strategy per node, with a certificate.

    Args:
        choice: the index of the strategy of every node.
        cost: the seconds of the plan.
        memory: the bytes of the plan.
        lower_bound: no plan within the budget costs less (of plans whose tied layers choose alike, if layers
            are tied).
        memory_price: the seconds per byte that gave the bound; zero if the budget does not bind, and of
            backends that do not search for it.
        seconds: how long each phase took.
        tied: the nodes that were made to choose alike, besides the groups of the graph.
    """

    graph: StrategyGraph = field(repr=False)
    choice: tuple[int, ...]
    cost: float
    memory: float
    lower_bound: float
    backend: str
    memory_price: float = 0.0
    seconds: dict[str, float] = field(default_factory=dict)
    tied: tuple[tuple[int, ...], ...] = ()

    @property
    def gap(self) -> float:
        """How much cheaper another plan may be, at most, as a part of the cost."""
        return max(0.0, self.cost - self.lower_bound) / self.cost if self.cost > 0 else 0.0

    @property
    def strategies(self) -> dict[str, str]:
        """The name of the strategy of every node."""
        return {n.name: n.strategies[c] for n, c in zip(self.graph.nodes, self.choice, strict=True)}

    @cached_property
    def reasons(self) -> list[ChoiceReason]:
        """Why each node chose as it did; computed when first asked for."""
        folded = contract(self.graph, self.tied or None)
        flat = FlatGraph(folded)
        budget, price = self.graph.memory_budget, self.memory_price
        if budget is not None and self.backend != "auto":  # which found no price
            bounds = PlanBounds(budget)
            search_price(flat, bounds, 0.0, lambda: False)
            price = bounds.price
        marginals = flat.elimination.marginals(flat.prices(np.array([price]))).nodes
        paid = folded.cost - price * (budget or 0.0)
        totals = {v: m[0] + paid for v, m in zip(flat.nodes, marginals, strict=True)}
        of = {m: group[0] for group in self.tied or self.graph.groups for m in group}
        exact = flat.elimination.exact and budget is None
        moved = np.zeros(len(self.graph.nodes))
        for e in self.graph.edges:
            moved[[e.source, e.target]] += e.cost[self.choice[e.source], self.choice[e.target]]
        return [self._reason(i, totals[of.get(i, i)], float(moved[i]), exact) for i in range(len(moved))]

    def _reason(self, i: int, totals: np.ndarray, moved: float, exact: bool) -> ChoiceReason:
        node, chosen = self.graph.nodes[i], self.choice[i]
        others = [k for k in range(len(node)) if k != chosen]
        second = min(others, key=lambda k: float(totals[k]), default=None)
        return ChoiceReason(
            node.name,
            node.strategies[chosen],
            float(node.cost[chosen]),
            moved,
            float(totals[chosen]),
            None if second is None else node.strategies[second],
            np.inf if second is None else float(totals[second]),
            exact,
        )

    def explain(self, node: str) -> ChoiceReason:
        """Why the node of this name chose as it did."""
        names = [n.name for n in self.graph.nodes]
        if node not in names:
            raise KeyError(
                f"there is no node {node!r} in this plan; its nodes are {', '.join(names[:8])}, ..."
            )
        return self.reasons[names.index(node)]

    def __str__(self) -> str:
        lines = [f"{name} {strategy}" for name, strategy in self.strategies.items()]
        return "\n".join(
            [
                *lines,
                f"{self.cost:.6g} s, {self.memory / 2**30:.3f} GiB; "
                f"no plan costs less than {self.lower_bound:.6g} s (gap {self.gap:.1e})",
            ]
        )
