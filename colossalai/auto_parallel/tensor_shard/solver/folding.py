"""Folding: the same problem with fewer nodes, and the way back to a choice of every node."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

import numpy as np

from colossalai.auto_parallel.tensor_shard.solver.elimination import Ints, Pair
from colossalai.auto_parallel.tensor_shard.solver.strategy_graph import Floats, StrategyGraph


@dataclass
class FoldedGraph:
    """What is left to choose.  Indices of nodes are those of the graph before; folded nodes have no costs."""

    costs: dict[int, Floats]
    memories: dict[int, Floats]
    edges: dict[Pair, Floats]
    """One table per pair of neighbours ``(u, v)``, ``u < v``."""
    kept: dict[int, Ints]
    """Which strategies of the graph before the remaining ones are."""
    cost: float = 0.0
    """What the nodes cost whose choice is known."""
    memory: float = 0.0
    _folded: list[tuple[int, tuple[int, ...], Ints]] = field(default_factory=list)
    """Nodes in the order of folding, the neighbours that they follow, and what they choose for each choice of
    these.
    """
    _members: dict[int, tuple[int, ...]] = field(default_factory=dict)

    def unfold(self, choice: dict[int, int]) -> dict[int, int]:
        """The choice of every node of the graph before, from that of the remaining nodes."""
        whole = {v: int(self.kept[v][c]) for v, c in choice.items()}
        here = dict(choice)
        for v, around, table in reversed(self._folded):
            here[v] = int(table[tuple(here[u] for u in around)])
            whole[v] = int(self.kept[v][here[v]])
        for v, members in self._members.items():
            for m in members:
                whole[m] = whole[v]
        return whole

    def strategies(self) -> int:
        """How many strategies are left in all."""
        return sum(len(c) for c in self.costs.values())


def contract(graph: StrategyGraph, groups: Sequence[tuple[int, ...]] | None = None) -> FoldedGraph:
    """Make one node of every group, and one edge of all edges between two nodes."""
    groups = graph.groups if groups is None else groups
    of = list(range(len(graph.nodes)))
    for group in groups:
        for m in group:
            of[m] = group[0]
    costs: dict[int, Floats] = {}
    memories: dict[int, Floats] = {}
    for i, node in enumerate(graph.nodes):
        costs[of[i]] = costs[of[i]] + node.cost if of[i] in costs else node.cost
        memories[of[i]] = memories[of[i]] + node.memory if of[i] in memories else node.memory
    folded = FoldedGraph(costs, memories, {}, {v: np.arange(len(c)) for v, c in costs.items()})
    folded._members = {g[0]: tuple(g[1:]) for g in groups}
    for edge in graph.edges:
        u, v = of[edge.source], of[edge.target]
        if u == v:
            costs[u] = costs[u] + np.diagonal(edge.cost)
        else:
            _join(folded.edges, u, v, edge.cost)
    return folded


def fold(before: FoldedGraph, keep: dict[int, Ints] | None = None, budgeted: bool = True) -> FoldedGraph:
    """Leave out strategies that are not in ``keep``, and fold the nodes whose elimination is free.

    These are nodes with one strategy, and nodes of degree one or two whose memory does not depend on the
    strategy: their costs become costs of a neighbour, or of the edge between two.  Without a budget memory
    does not count.
    """
    if keep is None:  # a node that may take nothing keeps a strategy, so that the sum is inf
        keep = {v: np.flatnonzero(np.isfinite(c) | (c == c.min())) for v, c in before.costs.items()}
    after = FoldedGraph(
        {v: before.costs[v][k] for v, k in keep.items()},
        {v: before.memories[v][k] for v, k in keep.items()},
        {(u, v): table[np.ix_(keep[u], keep[v])] for (u, v), table in before.edges.items()},
        dict(keep),
        before.cost,
        before.memory,
    )
    near: dict[int, set[int]] = {v: set() for v in after.costs}
    for u, v in after.edges:
        near[u].add(v)
        near[v].add(u)
    waiting = sorted(
        near, key=lambda v: (len(after.costs[v]) == 1, -v)
    )  # these first: others lose neighbours
    while waiting:
        v = waiting.pop()
        if v in after.costs and _is_free(after, v, len(near[v]), budgeted):
            around = sorted(near.pop(v))
            for u in around:
                near[u].discard(v)
            if len(after.costs[v]) > 1 and len(around) == 2:
                near[around[0]].add(around[1])
                near[around[1]].add(around[0])
            _fold_node(after, v, around)
            waiting += around
    return after


def _is_free(graph: FoldedGraph, v: int, degree: int, budgeted: bool) -> bool:
    if len(graph.costs[v]) == 1:
        return True
    return degree <= 2 and (not budgeted or bool((graph.memories[v] == graph.memories[v][0]).all()))


def _fold_node(graph: FoldedGraph, v: int, around: list[int]) -> None:
    own, memory = graph.costs.pop(v), graph.memories.pop(v)
    graph.memory += float(memory[0])
    tables = [_take(graph.edges, v, u) for u in around]
    if len(own) == 1:
        graph._folded.append((v, (), np.zeros((), dtype=np.intp)))
        graph.cost += float(own[0])
        for u, table in zip(around, tables, strict=True):
            graph.costs[u] = graph.costs[u] + table[0]
        return
    total = own.reshape(-1, *[1] * len(around))
    for axis, table in enumerate(tables):
        total = total + (table if len(around) == 1 else np.expand_dims(table, 2 - axis))
    graph._folded.append((v, tuple(around), total.argmin(axis=0)))
    rest = total.min(axis=0)
    if not around:
        graph.cost += float(rest)
    elif len(around) == 1:
        graph.costs[around[0]] = graph.costs[around[0]] + rest
    else:
        _join(graph.edges, around[0], around[1], rest)


def _join(edges: dict[Pair, Floats], u: int, v: int, table: Floats) -> None:
    if u > v:
        u, v, table = v, u, table.T
    edges[u, v] = edges[u, v] + table if (u, v) in edges else table


def _take(edges: dict[Pair, Floats], v: int, u: int) -> Floats:
    """Remove the edge of two nodes; its rows are the strategies of ``v``."""
    return edges.pop((v, u)) if v < u else edges.pop((u, v)).T


def equal_layers(graph: StrategyGraph, radius: int = 1) -> list[tuple[int, ...]]:
    """Groups of nodes that are alike with all that is around them, as the layers of a transformer are.

    Two nodes are alike if their tables, those of their edges, and those of the nodes up to ``radius`` edges
    away are the same numbers.  A group of the graph stays together.
    """
    tables = [_digest(n.strategies, n.cost, n.memory) for n in graph.nodes]
    edges = [_digest(e.cost) for e in graph.edges]
    for _ in range(radius):
        around: list[list[bytes]] = [[] for _ in graph.nodes]
        for edge, digest in zip(graph.edges, edges, strict=True):
            around[edge.source].append(b">" + digest + tables[edge.target])
            around[edge.target].append(b"<" + digest + tables[edge.source])
        tables = [_digest(own, *sorted(a)) for own, a in zip(tables, around, strict=True)]
    alike: dict[bytes, list[int]] = {}
    first = {m: group[0] for group in graph.groups for m in group}
    rest = {group[0]: group for group in graph.groups}
    for i, digest in enumerate(tables):
        if first.get(i, i) == i:
            alike.setdefault(digest, []).extend(rest.get(i, (i,)))
    return [tuple(sorted(members)) for members in alike.values() if len(members) > 1]


def _digest(*parts: Floats | bytes | tuple[str, ...]) -> bytes:
    sha = blake2b(digest_size=16)
    for part in parts:
        data = (
            part
            if isinstance(part, bytes)
            else repr(part).encode()
            if isinstance(part, tuple)
            else part.tobytes()
        )
        sha.update(len(data).to_bytes(8, "little") + data)
    return sha.digest()
