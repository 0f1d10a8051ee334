"""``StrategyGraph``: operations that choose one strategy each, and what every pair of choices costs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]


class InfeasibleBudgetError(ValueError):
    """No plan needs as little memory as the budget; ``minimum`` is what the smallest plan needs, in bytes."""

    def __init__(self, budget: float, minimum: float) -> None:
        self.budget, self.minimum = budget, minimum
        super().__init__(
            f"memory_budget={budget:.0f} bytes: the smallest plan needs {minimum:.0f} bytes "
            f"({minimum / 2**30:.3f} GiB); raise the budget to at least that, or use more devices"
        )


class NoPlanError(ValueError):
    """Forbidden strategies and pairs leave no plan."""


@dataclass(frozen=True, eq=False)
class StrategyNode:
    """An operation that takes exactly one of its strategies.

    Args:
        name: how answers call it.
        strategies: a name for each strategy.
        cost: the seconds of each strategy (computation and its own communication); ``inf`` forbids one.
        memory: the bytes that each strategy adds to the plan.
    """

    name: str
    strategies: tuple[str, ...]
    cost: Floats
    memory: Floats

    def __len__(self) -> int:
        return len(self.strategies)


@dataclass(frozen=True, eq=False)
class StrategyEdge:
    """The seconds of going from each strategy of ``source`` (rows) to each of ``target`` (columns).

    Both ends are indices of nodes; ``inf`` forbids a pair.
    """

    source: int
    target: int
    cost: Floats


@dataclass
class StrategyGraph:
    """A choice of strategies as plain data: nothing here knows of models, tensors or ranks.

    A plan takes one strategy per node.  It costs the seconds of its strategies and of its edges, and needs
    the bytes of its strategies.  The nodes of a group choose alike: their strategies have the same names in
    the same order.

    Args:
        memory_budget: the bytes that a plan may need; None for any.
    """

    nodes: list[StrategyNode] = field(default_factory=list)
    edges: list[StrategyEdge] = field(default_factory=list)
    groups: list[tuple[int, ...]] = field(default_factory=list)
    memory_budget: float | None = None

    def add_node(
        self,
        name: str,
        cost: ArrayLike,
        memory: ArrayLike | None = None,
        strategies: Iterable[str] | None = None,
    ) -> int:
        """Append a node and return its index; strategies without names are called by their numbers."""
        seconds = _table(cost, f"the cost of {name!r}", 1, infinite=True)
        taken = np.zeros(len(seconds)) if memory is None else memory
        bytes_ = _table(taken, f"the memory of {name!r}", 1, infinite=False)
        names = tuple(strategies) if strategies is not None else tuple(str(i) for i in range(len(seconds)))
        if not len(seconds) == len(bytes_) == len(names) > 0:
            raise ValueError(
                f"node {name!r} has {len(names)} strategies, {len(seconds)} costs and {len(bytes_)} sizes; "
                "expected as many of each, and at least one"
            )
        if not np.isfinite(seconds).any():
            raise ValueError(f"node {name!r}: every strategy costs inf; expected one that is allowed")
        self.nodes.append(StrategyNode(name, names, seconds, bytes_))
        return len(self.nodes) - 1

    def add_edge(self, source: int, target: int, cost: ArrayLike) -> None:
        """Append the costs of conversions between two nodes, which may have several edges."""
        for end in (source, target):
            if not 0 <= end < len(self.nodes):
                raise ValueError(f"edge ({source}, {target}): there is no node {end}; add nodes first")
        if source == target:
            raise ValueError(f"edge ({source}, {target}) joins a node with itself; add its cost to the node")
        ends = self.nodes[source], self.nodes[target]
        table = _table(cost, f"edge {ends[0].name!r} -> {ends[1].name!r}", 2, infinite=True)
        if table.shape != (len(ends[0]), len(ends[1])):
            raise ValueError(
                f"edge {ends[0].name!r} -> {ends[1].name!r} has costs of shape {table.shape}; expected "
                f"{(len(ends[0]), len(ends[1]))}, a row per strategy of the first and a column per strategy "
                "of the second"
            )
        self.edges.append(StrategyEdge(source, target, table))

    def add_group(self, members: Sequence[int]) -> None:
        """Let nodes choose alike."""
        unique = tuple(sorted({int(m) for m in members}))
        taken = {m for group in self.groups for m in group}
        for m in unique:
            if not 0 <= m < len(self.nodes):
                raise ValueError(f"group {unique}: there is no node {m}; add nodes first")
            if m in taken:
                raise ValueError(f"group {unique}: node {self.nodes[m].name!r} is in another group already")
            if self.nodes[m].strategies != self.nodes[unique[0]].strategies:
                raise ValueError(
                    f"nodes {self.nodes[unique[0]].name!r} and {self.nodes[m].name!r} cannot choose alike: "
                    "their strategies differ"
                )
        if len(unique) > 1:
            self.groups.append(unique)

    def with_budget(self, memory_budget: float | None) -> StrategyGraph:
        """The same graph under another budget; nodes, edges and groups are shared."""
        return replace(self, memory_budget=memory_budget)

    def cost(self, choice: Sequence[int]) -> float:
        """The seconds of a plan; inf if it takes a forbidden strategy or pair."""
        own = sum(float(n.cost[c]) for n, c in zip(self.nodes, choice, strict=True))
        return own + sum(float(e.cost[choice[e.source], choice[e.target]]) for e in self.edges)

    def memory(self, choice: Sequence[int]) -> float:
        """The bytes of a plan."""
        return sum(float(n.memory[c]) for n, c in zip(self.nodes, choice, strict=True))


def _table(values: ArrayLike, what: str, dims: int, infinite: bool) -> Floats:
    table = np.array(values, dtype=np.float64)
    if table.ndim != dims:
        raise ValueError(f"{what} has {table.ndim} dims; expected {dims}")
    bad = np.isnan(table) | (table < 0) | (False if infinite else np.isinf(table))
    if bad.any():
        expected = "seconds >= 0, inf for what is forbidden" if infinite else "finite bytes >= 0"
        raise ValueError(
            f"{what} has {table[bad][0]} at {tuple(np.argwhere(bad)[0].tolist())}; expected {expected}"
        )
    table.setflags(write=False)
    return table
