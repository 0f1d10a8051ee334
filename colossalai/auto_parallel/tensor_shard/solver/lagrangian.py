"""A price for memory: the budget becomes a cost per byte, and the problem one that elimination solves.

For every price the cheapest plan, memory paid, gives a lower bound of what a plan within the budget costs:
what it pays in all, less the price of the budget.  The bound is concave in the price; its maximum is searched
for by a few sweeps with several prices each.  Plans that fit are kept; plans that nearly fit are repaired.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from colossalai.auto_parallel.tensor_shard.solver.elimination import MAX_CELLS, Elimination, Ints
from colossalai.auto_parallel.tensor_shard.solver.folding import FoldedGraph
from colossalai.auto_parallel.tensor_shard.solver.strategy_graph import Floats

_BATCH = 8  # prices of one sweep
_ROUNDS = 12
_MOST_PARTS = 1024  # that a repair looks at


class FlatGraph:
    """A folded graph as flat arrays, with its elimination."""

    def __init__(self, graph: FoldedGraph, max_cells: int = MAX_CELLS) -> None:
        self.graph = graph
        self.nodes = list(graph.costs)
        place = {v: i for i, v in enumerate(self.nodes)}
        self.edges = {(place[u], place[v]): table for (u, v), table in graph.edges.items()}
        if any(u > v for u, v in self.edges):  # nodes keep their order, so pairs do
            raise AssertionError("folding changed the order of nodes")
        self.sizes = [len(graph.costs[v]) for v in self.nodes]
        self.offsets = np.concatenate([[0], np.cumsum(self.sizes)]).astype(np.intp)
        self._max_cells = max_cells
        empty = [np.zeros(0)]
        self.cost: Floats = np.concatenate([graph.costs[v] for v in self.nodes] or empty)
        self.memory: Floats = np.concatenate([graph.memories[v] for v in self.nodes] or empty)
        self._ends = np.array(list(self.edges), dtype=np.intp).reshape(-1, 2)
        tables = list(self.edges.values())
        self._widths = np.array([t.shape[1] for t in tables], dtype=np.intp)
        self._starts = np.cumsum([0, *(t.size for t in tables)])[: len(tables)].astype(np.intp)
        self._tables: Floats = np.concatenate([t.ravel() for t in tables] or empty)

    @cached_property
    def elimination(self) -> Elimination:
        """The order of elimination; other backends do without."""
        return Elimination(self.sizes, self.edges, self._max_cells)

    def unfold(self, choice: Ints) -> dict[int, int]:
        """The choice of every node of the graph before it was folded."""
        return self.graph.unfold(dict(zip(self.nodes, choice.tolist(), strict=True)))

    def prices(self, prices: Floats) -> Floats:
        """The costs of all strategies, laid end to end, with memory paid at each of the prices."""
        return self.cost + prices[:, None] * self.memory

    def best(self, prices: Floats) -> tuple[Floats, Ints]:
        """The least cost of a plan, memory paid, for each price, and a plan."""
        values, choice = self.elimination.best(self.prices(prices))
        return values + self.graph.cost + prices * self.graph.memory, choice

    def measure(self, choice: Ints) -> tuple[Floats, Floats]:
        """The seconds and bytes of a batch of plans."""
        at = self.offsets[:-1] + choice
        u, v = choice[:, self._ends[:, 0]], choice[:, self._ends[:, 1]]
        edges = self._tables[self._starts + u * self._widths + v]
        cost = self.cost[at].sum(axis=1) + edges.sum(axis=1) + self.graph.cost
        return cost, self.memory[at].sum(axis=1) + self.graph.memory

    def smallest(self) -> tuple[float, Ints, bool]:
        """The least memory of a plan, such a plan, and whether this is exact, or a lower bound.

        Where no pair is forbidden, the plan is the cheapest of the smallest.
        """
        starts = self.offsets[:-1]
        least = (
            np.repeat(np.minimum.reduceat(self.memory, starts), self.sizes) if len(starts) else self.memory
        )
        if np.isfinite(self._tables).all() and np.isfinite(self.cost).all() and np.isfinite(self.graph.cost):
            unary = np.where(self.memory <= least, self.cost, np.inf)
            _, choice = self.elimination.best(unary[None])
            return float(self.measure(choice)[1][0]), choice[0], True
        allowed = {pair: np.where(np.isfinite(t), 0.0, np.inf) for pair, t in self.edges.items()}
        unary = np.where(np.isfinite(self.cost), self.memory, np.inf)
        by_size = Elimination(self.sizes, allowed, self._max_cells)
        value, choice = by_size.best(unary[None])
        forbidden = 0.0 if np.isfinite(self.graph.cost) else np.inf
        return float(value[0]) + self.graph.memory + forbidden, choice[0], by_size.exact


@dataclass
class PlanBounds:
    """What is known of the best plan: one that fits, and what none that fits can cost less than."""

    budget: float | None
    lower: float = 0.0
    cost: float = np.inf
    memory: float = np.inf
    choice: Ints | None = None
    price: float = 0.0
    """The price per byte that gave the lower bound."""
    infeasible: bool = False
    """Whether it is known that no plan fits."""

    @property
    def gap(self) -> float:
        """How much the plan may cost too much, as a part of its cost."""
        if not np.isfinite(self.cost):
            return np.inf
        return max(0.0, self.cost - self.lower) / self.cost if self.cost > 0 else 0.0

    def offer(self, choice: Ints, cost: float, memory: float) -> None:
        """Keep a plan that fits and costs less."""
        if cost < self.cost and (self.budget is None or memory <= self.budget):
            self.choice, self.cost, self.memory = np.array(choice), float(cost), float(memory)


@dataclass
class _Point:
    """A price and the plan that is best for it."""

    price: float
    value: float
    cost: float
    memory: float
    choice: Ints = field(repr=False)


def search_price(flat: FlatGraph, bounds: PlanBounds, gap: float, out_of_time: Callable[[], bool]) -> None:
    """Improve ``bounds`` until the gap is small, or the best price is known."""
    if bounds.budget is None:
        _sweep(flat, bounds, np.zeros(1))
        return
    budget = bounds.budget
    points = _sweep(flat, bounds, _first_prices(flat))
    if points[0].memory <= budget and flat.elimination.exact:
        return
    smallest = flat.smallest()[1]
    cost, memory = (float(a[0]) for a in flat.measure(smallest[None]))
    bounds.offer(smallest, cost, memory)
    floor = _Point(np.inf, np.inf, cost, memory, smallest)
    for _ in range(_ROUNDS):
        points.sort(key=lambda p: p.price)
        _cross_over(flat, bounds, points, floor)
        if bounds.gap <= gap or out_of_time():
            return
        prices, done = _next_prices(points, floor, budget, flat)
        if done or not len(prices):
            return
        points += _sweep(flat, bounds, prices)


def _first_prices(flat: FlatGraph) -> Floats:
    """Zero, and powers around the price at which saving memory begins to pay."""
    starts, guess = flat.offsets[:-1], 1e-12
    if len(starts):
        seconds, bytes_ = (
            float((np.maximum.reduceat(a, starts) - np.minimum.reduceat(a, starts)).sum())
            for a in (np.where(np.isfinite(flat.cost), flat.cost, 0.0), flat.memory)
        )
        guess = seconds / bytes_ if seconds > 0 and bytes_ > 0 else guess
    count = flat.elimination.batch(_BATCH) - 1
    return np.concatenate([[0.0], guess * 4.0 ** (np.arange(count) - count // 2 - 1)])


def _sweep(flat: FlatGraph, bounds: PlanBounds, prices: Floats) -> list[_Point]:
    values, choices = flat.best(prices)
    costs, memories = flat.measure(choices)
    budget = bounds.budget or 0.0
    points = []
    for price, value, cost, memory, choice in zip(prices, values, costs, memories, choices, strict=True):
        if value - price * budget > bounds.lower:
            bounds.lower, bounds.price = float(value - price * budget), float(price)
        bounds.offer(choice, cost, memory)
        points.append(_Point(float(price), float(value), float(cost), float(memory), choice))
    return points


def _next_prices(points: list[_Point], floor: _Point, budget: float, flat: FlatGraph) -> tuple[Floats, bool]:
    """Prices around the place where the bound may be highest; whether it is known to be reached."""
    best = max(range(len(points)), key=lambda i: points[i].value - points[i].price * budget)
    low, high = points[max(best - 1, 0)], points[best + 1] if best + 1 < len(points) else floor
    if flat.elimination.exact:  # the slope of the bound is known: bytes above the budget
        low = max((p for p in points if p.memory > budget), key=lambda p: p.price)
        high = min((p for p in points if p.memory <= budget), key=lambda p: p.price, default=floor)
    count = flat.elimination.batch(_BATCH)
    top = high.price if np.isfinite(high.price) else max(low.price, 1e-15) * 4.0**count
    if not low.price < top * (1 - 1e-12):
        return np.zeros(0), True
    bottom = max(low.price, top * 1e-3)
    around = bottom * (top / bottom) ** (np.arange(1, count) / count)
    if not flat.elimination.exact:
        return around, top <= bottom * (1 + 1e-6)
    crossing = (high.cost - low.cost) / (low.memory - high.memory)
    ceiling = low.cost + crossing * (low.memory - budget)  # no price gives a higher bound than this
    reached = max(p.value - p.price * budget for p in points)
    # half of the prices near the crossing, where the two lines meet
    near = (
        crossing + (crossing - low.price) * np.array([-0.1, -0.01]),
        crossing + (top - crossing) * np.array([0.01]),
    )
    prices = np.unique(np.concatenate([[crossing], *near, around[:: max(1, len(around) // (count - 4))]]))[
        :count
    ]
    return prices[(prices > low.price) & (prices < top)], reached >= ceiling - 1e-12 * abs(ceiling)


def _cross_over(flat: FlatGraph, bounds: PlanBounds, points: list[_Point], floor: _Point) -> None:
    """Mix plans that nearly fit with those that do; nodes that differ and are joined change together."""
    budget = bounds.budget or 0.0
    over = [p for p in points if p.memory > budget and np.isfinite(p.cost)]
    under = [p for p in [*points, floor] if p.memory <= budget and np.isfinite(p.cost)]
    for high in over[-2:]:
        for low in under[:2]:
            parts = _parts(flat, high.choice, low.choice)
            if 1 < len(parts) <= _MOST_PARTS:
                _pick(flat, bounds, high, low, parts)


def _parts(flat: FlatGraph, one: Ints, other: Ints) -> list[list[int]]:
    """The nodes that two plans choose differently, those together that are joined by edges among them."""
    differ = one != other
    root = list(range(len(one)))

    def find(v: int) -> int:
        while root[v] != v:
            root[v] = v = root[root[v]]
        return v

    for u, v in flat.edges:
        if differ[u] and differ[v]:
            root[find(u)] = find(v)
    parts: dict[int, list[int]] = {}
    for node in np.flatnonzero(differ).tolist():
        parts.setdefault(find(node), []).append(node)
    return list(parts.values())


def _pick(flat: FlatGraph, bounds: PlanBounds, high: _Point, low: _Point, parts: list[list[int]]) -> None:
    """Change parts of a plan that is too large, best price first, until it fits; end with the cheapest part
    that is large enough.
    """
    trial = np.repeat(high.choice[None], len(parts), axis=0)
    for row, members in zip(trial, parts, strict=True):
        row[members] = low.choice[members]
    costs, memories = flat.measure(trial)
    extra, saved = costs - high.cost, high.memory - memories
    useful = np.flatnonzero((saved > 0) & np.isfinite(extra)).tolist()
    order = sorted(useful, key=lambda i: (float(extra[i] / saved[i]), i))
    excess = high.memory - (bounds.budget or 0.0)
    best: tuple[float, list[int]] | None = None
    spent, taken = 0.0, list[int]()
    for position, part in enumerate(order):
        last = [j for j in order[position:] if saved[j] >= excess]
        if last:
            j = min(last, key=lambda j: float(extra[j]))
            if best is None or spent + extra[j] < best[0]:
                best = spent + float(extra[j]), [*taken, j]
        spent, excess = spent + float(extra[part]), excess - float(saved[part])
        taken.append(part)
        if excess <= 0:
            break
    if best is not None:
        mixed = np.array(high.choice)
        for i in best[1]:
            mixed[parts[i]] = low.choice[parts[i]]
        cost, memory = flat.measure(mixed[None])
        bounds.offer(mixed, float(cost[0]), float(memory[0]))


def polish(flat: FlatGraph, bounds: PlanBounds, passes: int = 2) -> None:
    """Let single nodes take better strategies while the plan fits."""
    if bounds.choice is None:
        return
    around: list[list[tuple[int, Floats]]] = [[] for _ in flat.sizes]
    for (u, v), table in flat.edges.items():
        around[u].append((v, table.T))
        around[v].append((u, table))
    choice, memory = np.array(bounds.choice), bounds.memory
    for _ in range(passes):
        changed = False
        for v, start in enumerate(flat.offsets[:-1]):
            own = slice(start, start + flat.sizes[v])
            cost = flat.cost[own] + sum(table[choice[u]] for u, table in around[v])
            grown = memory + flat.memory[own] - flat.memory[start + choice[v]]
            if bounds.budget is not None:
                cost = np.where(grown <= bounds.budget, cost, np.inf)
            c = int(cost.argmin())
            if cost[c] < cost[choice[v]]:
                choice[v], memory, changed = c, float(grown[c]), True
        if not changed:
            break
    costs, memories = flat.measure(choice[None])
    bounds.offer(choice, float(costs[0]), float(memories[0]))
