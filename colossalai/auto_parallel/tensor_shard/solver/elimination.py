"""Min-sum variable elimination: the best choice of every node of a graph, exactly if the graph is narrow.

A node is eliminated by noting, for every choice of its neighbours, the least that it can cost; the note is a
table over the neighbours.  The graph of a transformer needs tables over two neighbours, whatever its depth.
Where a table would be too large, the node is split: each copy may choose for itself.  This makes the sum a
lower bound instead of the minimum, and the min-marginals bounds instead of values.

All functions take a batch of node costs, since for small tables several cost as little time as one.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import combinations
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from colossalai.auto_parallel.tensor_shard.solver.strategy_graph import Floats

Pair = tuple[int, int]
Ints = NDArray[np.intp]

MAX_CELLS = 2**18
"""Cells of the largest table; larger ones are split."""
_MAX_TOTAL_CELLS = 2**25  # 256 MiB per entry of a batch


@dataclass
class _Step:
    """One table: over ``variable`` and its neighbours, of which the ``variable`` is then minimized out."""

    variable: int
    inputs: list[int]
    """Factors that are added up: edges by their index, then messages of earlier steps."""
    scope: tuple[int, ...]
    """The neighbours, in the order of their elimination, so that no table is ever transposed."""
    first: bool = True
    """Whether this copy of the node carries its costs."""
    fixed: Floats | None = None
    """The sum of the edges, with a leading dim for the batch."""
    messages: list[tuple[int, tuple[int, ...]]] = field(default_factory=list)
    """Steps whose messages are added, and the shape (without the batch) that fits this table."""
    parent: int = -1
    """The step that adds this step's message."""
    dropped: tuple[int, ...] = ()
    """Dims of the parent's table that this step's message does not have."""
    edges: list[tuple[int, tuple[int, ...]]] = field(default_factory=list)
    """Edges of this table, and the dims that are not theirs."""


@dataclass(frozen=True)
class Marginals:
    """The least cost of a whole plan that takes a given strategy, or a given pair, for a batch of costs."""

    nodes: list[Floats]
    edges: dict[Pair, Floats]


class Elimination:
    """The order in which the nodes of a graph are eliminated, and the sweeps in this order.

    Args:
        sizes: the number of strategies of each node.
        edges: the cost of each pair of neighbours ``(u, v)``, ``u < v``.
        max_cells: cells of the largest table.
    """

    def __init__(self, sizes: Sequence[int], edges: dict[Pair, Floats], max_cells: int = MAX_CELLS) -> None:
        self.sizes = list(sizes)
        self.pairs = list(edges)
        self._starts = np.concatenate([[0], np.cumsum(self.sizes)]).astype(np.intp)
        while True:
            self._steps = _plan(self.sizes, self.pairs, max_cells)
            self.cells = [prod(self.sizes[v] for v in (s.variable, *s.scope)) for s in self._steps]
            if sum(self.cells) <= _MAX_TOTAL_CELLS or max_cells <= 1:
                break
            max_cells //= 8
        self.exact = all(s.first for s in self._steps)
        """Whether no node was split."""
        self.width = max((len(s.scope) for s in self._steps), default=0)
        """The number of neighbours in the largest table."""
        self._lay_out(edges)

    def batch(self, most: int) -> int:
        """How many costs one sweep should take, at most ``most``, for the memory of its tables."""
        return max(1, min(most, _MAX_TOTAL_CELLS // max(1, sum(self.cells))))

    def best(self, unary: Floats) -> tuple[Floats, Ints]:
        """The minimum (or a bound below it) and a choice for each row of node costs, laid end to end."""
        tables, _, total = self._up(unary)
        rows = np.arange(len(unary))
        choice = np.zeros((len(unary), len(self.sizes)), dtype=np.intp)
        scores: Floats | None = None
        for step, table in zip(reversed(self._steps), reversed(tables), strict=True):
            row = rows if len(table) == len(unary) else np.zeros_like(rows)
            at: tuple[Any, ...] = (row, slice(None), *(choice[:, v] for v in step.scope))
            here = table[at]
            scores = here if scores is None else scores + here
            if step.first:  # the copies of a node are neighbours in the list of steps, and this is the last
                choice[:, step.variable] = scores.argmin(axis=1)
                scores = None
        return total, choice

    def marginals(self, unary: Floats, pairs: bool = False) -> Marginals:
        """The least cost of a plan for each strategy of each node, and for each pair if ``pairs``."""
        tables, messages, total = self._up(unary)
        beliefs: list[Floats] = list(tables)
        nodes: list[Floats] = [np.full((len(unary), k), -np.inf) for k in self.sizes]
        edges: dict[Pair, Floats] = {}
        for i in range(len(self._steps) - 1, -1, -1):
            step = self._steps[i]
            if step.parent < 0:
                outside = total  # of a step without neighbours
            else:
                outside = (
                    beliefs[step.parent].min(axis=step.dropped) if step.dropped else beliefs[step.parent]
                )
            with np.errstate(invalid="ignore"):
                rest = outside - messages[i]
            rest = np.where(np.isnan(rest), np.inf, rest)  # inf - inf: what is forbidden here stays forbidden
            beliefs[i] = tables[i] + rest[:, None]
            own = beliefs[i].min(axis=tuple(range(2, beliefs[i].ndim)))
            np.maximum(nodes[step.variable], own, out=nodes[step.variable])
            if pairs:
                for edge, others in step.edges:
                    u, v = self.pairs[edge]
                    table = beliefs[i].min(axis=others) if others else beliefs[i]
                    edges[u, v] = table if step.variable == u else table.swapaxes(1, 2)
        return Marginals(nodes, edges)

    def _up(self, unary: Floats) -> tuple[list[Floats], list[Floats], Floats]:
        """The table and the message of every step, and the sum of all minima."""
        tables: list[Floats] = []
        messages: list[Floats] = []
        total = np.zeros(len(unary))
        for step in self._steps:
            table = step.fixed
            if step.first:
                start = self._starts[step.variable]
                own = unary[:, start : start + self.sizes[step.variable]]
                own = own.reshape(*own.shape, *[1] * len(step.scope))
                table = own if table is None else table + own
            for source, shape in step.messages:
                message = messages[source].reshape(-1, *shape)
                table = message if table is None else table + message
            assert table is not None
            tables.append(table)
            messages.append(table.min(axis=1))
            if step.parent < 0:
                total = total + messages[-1].reshape(-1)
        return tables, messages, total

    def _lay_out(self, edges: dict[Pair, Floats]) -> None:
        """Note for every step the shapes by which its inputs fit its table."""
        for i, step in enumerate(self._steps):
            axes = (step.variable, *step.scope)
            for factor in step.inputs:
                if factor >= len(self.pairs):
                    child = self._steps[factor - len(self.pairs)]
                    child.parent = i
                    child.dropped = tuple(1 + k for k, v in enumerate(axes) if v not in child.scope)
                    shape = tuple(self.sizes[v] if v in child.scope else 1 for v in axes)
                    step.messages.append((factor - len(self.pairs), shape))
                    continue
                u, v = self.pairs[factor]
                table = edges[u, v] if u == step.variable else edges[u, v].T
                table = table.reshape(1, *(self.sizes[a] if a in (u, v) else 1 for a in axes))
                step.fixed = table if step.fixed is None else step.fixed + table
                step.edges.append((factor, tuple(1 + k for k, a in enumerate(axes) if a not in (u, v))))


def _plan(sizes: list[int], pairs: list[Pair], max_cells: int) -> list[_Step]:
    """The steps of an elimination in which each node adds the fewest new neighbours (min-fill)."""
    scopes: list[set[int]] = [set(p) for p in pairs]
    live: list[set[int]] = [set() for _ in sizes]  # the factors of each node
    near: list[set[int]] = [set() for _ in sizes]
    for i, (u, v) in enumerate(pairs):
        live[u].add(i)
        live[v].add(i)
        near[u].add(v)
        near[v].add(u)
    keys = [_fill(near, v) for v in range(len(sizes))]
    heap = [(key, v) for v, key in enumerate(keys)]
    heapq.heapify(heap)
    steps: list[_Step] = []
    done: dict[int, int] = {}
    while heap:
        key, variable = heapq.heappop(heap)
        if variable in done or key != keys[variable]:
            continue
        done[variable] = len(done)
        changed = set(near[variable])
        for other in near[variable]:
            near[other].discard(variable)
        for first, bucket in enumerate(_buckets(variable, sorted(live[variable]), scopes, sizes, max_cells)):
            scope = set().union(*(scopes[f] for f in bucket)) - {variable}
            for f in bucket:
                for v in scopes[f]:
                    live[v].discard(f)
            for v in scope:
                live[v].add(len(scopes))
            for u, v in combinations(scope, 2):
                if v not in near[u]:
                    near[u].add(v)
                    near[v].add(u)
                    changed |= near[u] & near[v]
            scopes.append(scope)
            steps.append(_Step(variable, bucket, tuple(scope), first == 0))
        for v in changed:
            keys[v] = _fill(near, v)
            heapq.heappush(heap, (keys[v], v))
    for step in steps:
        step.scope = tuple(sorted(step.scope, key=done.__getitem__))
    return steps


def _fill(near: list[set[int]], v: int) -> tuple[int, int]:
    """How many pairs of neighbours are not neighbours of each other, and how many neighbours there are."""
    around = near[v]
    return sum(len(around - near[u]) - 1 for u in around), len(around)


def _buckets(
    variable: int, factors: list[int], scopes: list[set[int]], sizes: list[int], max_cells: int
) -> list[list[int]]:
    """The factors of a node in one bucket, or in several whose tables are not too large."""
    buckets: list[tuple[list[int], set[int]]] = []
    for factor in sorted(factors, key=lambda f: (-len(scopes[f]), f)):
        for bucket, scope in buckets:
            if prod(sizes[v] for v in scope | scopes[factor]) <= max_cells:
                bucket.append(factor)
                scope |= scopes[factor]
                break
        else:
            buckets.append(([factor], set(scopes[factor])))
    return [bucket for bucket, _ in buckets] or [[]]
